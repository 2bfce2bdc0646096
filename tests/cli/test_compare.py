"""`medfedaug compare`: what is tried on a user's own data, and what is recommended."""

from __future__ import annotations

import json

import pytest
from calibrations import fingerprint, write_table
from results import Page
from running import TINY_AXES

from medfedaug.analysis.calibration_table import Calibration
from medfedaug.analysis.prospect import make_prospect
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


@pytest.fixture
def law(tmp_path, monkeypatch):
    """A calibration table in which `norm` gains with the distance, and `fedfa` never does."""

    def load(slope):
        path = write_table(tmp_path / "t.csv", families=10, each=4, seed=3, noise=0.01, slope=slope)
        monkeypatch.setattr("medfedaug.analysis.calibration_table._TABLE", "analysis/none.csv")
        return Calibration.load([path])

    return load


def prospect(table, apart=0.1):
    return make_prospect([fingerprint("A"), fingerprint("B"), fingerprint("C", mean=0.3 + apart)], table)


def test_foreign_images_suggest_norm_and_not_the_exchange(apart, law):
    found = suggest(inspect_sites(apart, None), prospect(law(0.1)))
    assert found.methods == ("norm",)
    assert "images lie far from 0" in found.reason


def test_the_expected_remedy_is_suggested_where_the_prediction_has_skill(law):
    table = law(0.1)
    found = suggest([], prospect(table))
    assert found.methods == ("norm",)
    assert found.reason.startswith("expected gain over fedavg +0.")
    # Too few to show skill: the cheapest.
    few = suggest([], prospect(Calibration(table.federations[:12])))
    assert "norm costs least" in few.reason
    assert few.methods == ("norm",)


@pytest.mark.parametrize("slope", [0.0, -0.1])
def test_where_nothing_surely_gains_the_cheapest_is_suggested(law, slope):
    for given in (prospect(law(slope)), None):
        found = suggest([], given)
        assert found.methods == ("norm",)
        assert "no method is surely expected to gain" in found.reason


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
    options += tuple(part for axis in TINY_AXES for part in ("--set", axis))
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
