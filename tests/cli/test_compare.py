"""`medfedaug compare`: what is tried on a user's own data, and what is recommended."""

from __future__ import annotations

import json

import pytest
from results import Page
from running import TINY_NETWORK

from medfedaug.analysis.score_table import Row, Score, Table
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.quality.inspection import inspect_sites
from medfedaug.experiments.trial import recommend, suggest


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """Sites of which two store dark what the others store bright."""
    folder = tmp_path_factory.mktemp("apart") / "data"
    make_phantom(folder, sites=3, patients=5, shape=(32, 32, 4), inverted=[False, False, True])
    return folder


def scores(**means: tuple[float, ...]) -> Table:
    rows = tuple(
        Row(
            label,
            tuple(range(len(values))),
            {"A": Score(values)},
            Score(values),
            baseline=label == "fedavg",
        )
        for label, values in means.items()
    )
    return Table("dice", ("A",), (), rows)


def test_foreign_images_suggest_norm_and_not_the_exchange(apart):
    found = suggest(inspect_sites(apart, None))
    assert found.methods == ("norm",)
    assert "images lie far from 0" in found.reason


def test_alike_scanners_suggest_the_cheapest_method(tmp_path):
    make_phantom(tmp_path / "data", sites=3, patients=5, shape=(32, 32, 4), shift=0)
    found = suggest(inspect_sites(tmp_path / "data", None))
    assert found.methods == ("norm",)
    assert "no method gained" in found.reason


def test_an_odd_scanner_suggests_what_gained_at_the_farthest_site(tmp_path):
    make_phantom(
        tmp_path / "data", patients=12, shift=(0, 0, 2, 0), shape=(48, 48, 8), scanner_seed=0, seed=3
    )
    found = suggest(inspect_sites(tmp_path / "data", None))
    assert set(found.methods) <= {"norm", "fedrdn", "fedrdn,fedfa"}
    assert "of 10 phantom federations that far apart" in found.reason


def test_the_recommendation_names_what_it_rests_on():
    first, second, last = recommend(
        scores(single=(0.5, 0.6, 0.7), fedavg=(0.6, 0.7, 0.6), fedrdn=(0.7, 0.8, 0.5))
    )
    assert first == (
        "Train together: Dice 0.667 with fedrdn against 0.600 with single, better in 2 of 3 trainings."
    )
    assert second.startswith("Go on with fedrdn: Dice 0.667 with fedrdn against 0.633 with fedavg")
    assert "3 trainings" in last
    assert "no verdict" in last


def test_it_says_so_where_sites_alone_are_better_and_where_plain_averaging_is_best():
    first, second, _ = recommend(scores(single=(0.8, 0.8), fedavg=(0.6, 0.6), norm=(0.5, 0.5)))
    assert first.startswith("Stay alone, as it looks now: Dice 0.600 with fedavg against 0.800 with single")
    assert second == "Go on with fedavg: no other method that was tried scored above it."


def test_the_command_tries_alone_together_and_the_remedy(run, apart, tmp_path):
    options = ("--seeds", 1, "--rounds", 1, "--device", "cpu", "--out", tmp_path / "trial")
    options += ("--set", f"network_args={json.dumps(TINY_NETWORK)}")
    code, out, err = run("compare", "--data", apart, *options, "--json", tmp_path / "trial.json")
    assert code == 0, err
    assert "trying single, fedavg, norm" in out
    written = json.loads((tmp_path / "trial.json").read_text())
    assert set(written["scores"]) == {"single", "fedavg", "norm"}
    page = Page((tmp_path / "trial/report.html").read_text())
    for sentence in written["recommendation"]:
        assert " ".join(sentence.split()) in " ".join(out.split())
        assert sentence in page.text
    # The trial's gains, beside those of fingerprints.
    assert any("norm: predicted" in line and "agree" in line for line in written["predicted"])
    assert all(" ".join(line.split()) in " ".join(out.split()) for line in written["predicted"])
    # Asked again, nothing is trained anew.
    (results,) = (tmp_path / "trial/norm").rglob("results.json")
    before = results.stat().st_mtime_ns
    assert run("compare", "--data", apart, *options)[0] == 0
    assert results.stat().st_mtime_ns == before


def test_several_values_of_a_setting_are_the_benchmarks(run, apart, tmp_path):
    options = ("--methods", "norm", "--set", "image_size=16,32", "--out", tmp_path / "trial")
    code, _, err = run("compare", "--data", apart, *options)
    assert code == 2
    assert "--set image_size: give one value; medfedaug benchmark compares several" in err
    assert not (tmp_path / "trial").exists()
