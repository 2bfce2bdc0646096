"""Common behaviour of all benchmarks: options, missing files, markers, and a run over one."""

import json

import pytest
from benchmark_files import counts, write_pacs
from running import SHARED

from medfedaug.data.sites import MARKER, find_sites, open_site
from medfedaug.errors import ConfigError, DataError
from medfedaug.research.datasets.benchmarks import BENCHMARKS, open_benchmark, write_federation


@pytest.mark.skipif(
    not (SHARED / "data/office_caltech_10").is_dir(), reason="Office-Caltech 10 is not beside the project"
)
def test_office_caltech_10_is_the_same_as_folder_and_as_benchmark():
    root = SHARED / "data/office_caltech_10"
    sites = open_benchmark("office_caltech_10", root)
    for site, folder in zip(sites, find_sites(root), strict=True):
        for split, cases in site.cases.items():
            assert [(case.name, case.label) for case in cases] == [
                (case.name, case.label) for case in folder.cases[split]
            ]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_is_missing_is_named_with_its_source_and_layout(tmp_path, name):
    with pytest.raises(DataError) as caught:
        open_benchmark(name, tmp_path / "nowhere")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'nowhere'}")
    assert f"is missing, and {name} needs it. Get the files from " in message
    assert "http" in BENCHMARKS[name].source
    for text in (BENCHMARKS[name].source, BENCHMARKS[name].layout, f"below {tmp_path / 'nowhere'}."):
        assert text in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pac", {}, "benchmark 'pac' is not known; did you mean pacs"),
        ("pacs", {"folds": 3}, "pacs has no option folds; known: fraction, unseen, split"),
        ("pacs", {"split": "random"}, "split 'random' is not known"),
        (
            "pacs",
            {"unseen": "dslr"},
            "unseen: site 'dslr' is not known; choose from art_painting, cartoon, photo, sketch",
        ),
        ("pacs", {"fraction": 0.0}, "pacs: fraction must be positive, got 0.0"),
        ("prostate_mri", {"neighbours": 1}, "neighbours must be true or false, got 1"),
    ],
)
def test_options_that_cannot_be(tmp_path, name, options, message):
    write_pacs(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_benchmark(name, tmp_path, **options)


def test_fraction_unseen_and_limit_apply_to_every_benchmark(tmp_path):
    write_pacs(tmp_path)
    sites = open_benchmark("pacs", tmp_path, fraction=0.5, unseen="photo")
    assert counts(sites) == {
        "art_painting": (3, 2, 2),
        "cartoon": (3, 2, 2),
        "photo": (0, 0, 10),
        "sketch": (3, 2, 2),
    }
    assert {case.label for case in sites[0].cases["training"]} == {"dog", "house"}
    assert not sites[2].trains
    assert counts(open_benchmark("pacs", tmp_path, limit=1))["photo"] == (1, 1, 1)


def test_a_marker_makes_a_folder_the_data_of_a_federation(tmp_path):
    write_pacs(tmp_path / "files")
    folder = tmp_path / "federation"
    write_federation(folder, "pacs", tmp_path / "files", fraction=0.5)
    assert json.loads((folder / MARKER).read_text()) == {
        "format": "medfedaug.federation",
        "version": 1,
        "benchmark": "pacs",
        "root": "../files",
        "options": {"fraction": 0.5},
    }
    sites = find_sites(folder)
    assert counts(sites) == counts(open_benchmark("pacs", tmp_path / "files", fraction=0.5))
    assert open_site(folder, "photo").cases == sites[2].cases
    assert counts([open_site(folder, "photo", limit=1)]) == {"photo": (1, 1, 1)}
    with pytest.raises(
        DataError, match=r"site Basel, .*federation\.json: no such site; there are art_painting"
    ):
        open_site(folder, "Basel")
    with pytest.raises(ConfigError, match="no option beta"):
        write_federation(folder, "pacs", tmp_path / "files", beta=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "names no benchmark"),
        ("[]", "not a federation file of this release"),
        ('{"format": "medfedaug.federation", "version": 2}', "not a federation file of this release"),
        ('{"format": "medfedaug.federation", "version": 1}', 'expected "benchmark"'),
        ('{"format": "medfedaug.federation", "version": 1, "benchmark": "pacs", "options": 3}', "a mapping"),
    ],
)
def test_markers_that_cannot_be_read_are_named(tmp_path, content, message):
    (tmp_path / MARKER).write_text(content)
    with pytest.raises(DataError, match=rf"{MARKER}: names no benchmark \(.*"):
        find_sites(tmp_path)
    with pytest.raises(DataError, match=message):
        open_site(tmp_path, "A")
