"""Benchmarks of photographs in their published layouts, and the real ones where they are at hand."""

import os
import pickle

import numpy as np
import pytest
from benchmark_files import DOMAINNET, OFFICE, PACS, counts, picture, write_fedbn, write_pacs

from medfedaug.data.sites import check_federation, open_site
from medfedaug.errors import DataError
from medfedaug.research.datasets.benchmarks import open_benchmark


def test_office_caltech_10_as_fedbn_publishes_it(tmp_path):
    root = tmp_path / "office_caltech_10"
    write_fedbn(root, "office_caltech_10", OFFICE, train=11, test=3)
    for folder in (root, tmp_path):
        sites = open_benchmark("office_caltech_10", folder)
        assert counts(sites) == dict.fromkeys(OFFICE, (6, 5, 3))
        assert check_federation(sites) == ("classification", 3, ("bird", "tiger"))
    listed = pickle.loads((root / "dslr_train.pkl").read_bytes())[0]
    assert [f"office_caltech_10/{case.name}" for case in sites[2].cases["training"]] == listed[:6].tolist()
    assert sites[2].load_image(sites[2].cases["test"][0]).shape == (3, 8, 8)


def test_domainnet_10_has_the_papers_shares(tmp_path):
    write_fedbn(tmp_path / "DomainNet", "DomainNet", DOMAINNET, train=50, test=4)
    sites = open_benchmark("domainnet_10", tmp_path)
    assert counts(sites) == dict.fromkeys(DOMAINNET, (16, 10, 4))
    listed = pickle.loads((tmp_path / "DomainNet/real_train.pkl").read_bytes())[0].tolist()
    real = sites[4]
    assert [f"DomainNet/{case.name}" for case in real.cases["training"]] == listed[:16]
    assert [f"DomainNet/{case.name}" for case in real.cases["validation"]] == listed[-10:]
    assert counts(open_benchmark("domainnet_10", tmp_path, fraction=1.0))["real"] == (40, 10, 4)


def test_pacs_split_by_seed(tmp_path):
    write_pacs(tmp_path)
    sites = open_benchmark("pacs", tmp_path)
    assert counts(sites) == dict.fromkeys(PACS, (6, 2, 2))
    assert sites[0].cases == open_site(tmp_path / "kfold/art_painting").cases
    assert check_federation(sites) == ("classification", 3, ("dog", "house"))


def test_officehome_has_a_site_with_a_space_in_its_folder(tmp_path):
    root = tmp_path / "OfficeHomeDataset_10072016"
    for folder in ("Art", "Clipart", "Product", "Real World"):
        for label in ("Alarm_Clock", "Backpack"):
            for i in range(1, 6):
                picture(root / folder / label / f"{i:05d}.jpg", i)
    sites = open_benchmark("officehome", tmp_path)
    assert counts(sites) == dict.fromkeys(("Art", "Clipart", "Product", "Real_World"), (6, 2, 2))
    check_federation(sites)


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Harmful()),
        pickle.dumps((np.array([Harmful()], dtype=object), np.zeros(1))),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c_codecs\nencode\n(S'x'\nS'zlib'\ntR.",
        b"",
        b"\x80\x04",
    ],
)
def test_a_pickle_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "amazon_train.pkl").write_bytes(content)
    with pytest.raises(DataError, match=r"site amazon, .*amazon_train\.pkl: cannot be read"):
        open_benchmark("office_caltech_10", tmp_path)
    assert not (tmp_path / "harmed").exists()
