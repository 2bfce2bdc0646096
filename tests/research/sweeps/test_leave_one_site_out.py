"""Leaving each site out in turn: what is run, what it leaves, and how an unseen site is scored."""

import json

import pytest

from medfedaug.errors import ConfigError, DataError
from medfedaug.research.sweeps import leave_one_site_out as holdout
from medfedaug.research.sweeps.leave_one_site_out import HOLDOUT, leave_one_site_out
from medfedaug.runs.evaluate import evaluate_model
from medfedaug.simulate import Simulation, simulate


def in_turn(data, out, config, sites=None, **options):
    return leave_one_site_out(Simulation(data=data, out=out, config=config, **options), sites)


OPTIONS = {"engine": "inprocess", "device": "cpu", "report": False}


@pytest.fixture
def three_sites(make_site, tmp_path):
    for name in "ABC":
        make_site(name, shape=(32, 32, 4))
    return tmp_path / "data"


def test_each_site_is_left_out_once_and_the_table_holds_its_score(three_sites, tiny_config, tmp_path):
    out, events = tmp_path / "out", []
    config = tiny_config("fedrdn", rounds=1)
    table = in_turn(three_sites, out, config, on_event=events.append, **OPTIONS)
    assert [event["site"] for event in events if event["event"] == "holdout"] == ["A", "B", "C"]
    scores = {}
    for name in "ABC":
        results = json.loads((out / name / "results.json").read_text())
        assert results["config"]["holdout"] == [name]
        assert set(results["sites"]) == set("ABC") - {name}
        scores[name] = results["test"]["unseen"][name]["dice"]
        assert table["seen"][name] == results["test"]["mean"]["dice"]
        for metric in ("dice", "hd95", "nsd"):
            by_site = table["metrics"][metric]
            assert by_site["unseen"][name] == results["test"]["unseen"][name][metric]
            assert by_site["seen"][name] == results["test"]["mean"][metric]
    assert table["unseen"] == scores
    assert table["mean"] == pytest.approx(sum(scores.values()) / 3)
    assert json.loads((out / HOLDOUT).read_text()) == table
    with pytest.raises(ConfigError, match="earlier run"):
        in_turn(three_sites, out, config, **OPTIONS)


@pytest.mark.parametrize(("unit", "mean"), [("mm", 32.0), ("px", None)])
def test_millimetres_and_pixels_have_no_common_mean(
    three_sites, tiny_config, tmp_path, monkeypatch, unit, mean
):
    """Two sites with spacings and one of photographs, say."""
    lengths = {"A": (4.0, "mm"), "B": (60.0, unit), "C": (None, "mm")}

    def simulated(simulation):
        simulation.out.mkdir(parents=True)
        (name,) = simulation.config.holdout
        scores = dict.fromkeys(("dice", "nsd"), 0.5) | {"hd95": lengths[name][0], "unit": lengths[name][1]}
        means = {"dice": 0.5, "nsd": 0.5, "hd95": None}
        return {"test": {"sites": {}, "unseen": {name: scores}, "mean": means}}

    monkeypatch.setattr(holdout, "run_simulation", simulated)
    metrics = in_turn(three_sites, tmp_path / "out", tiny_config(rounds=1), **OPTIONS)["metrics"]
    assert metrics["hd95"]["unseen"] == {"A": 4.0, "B": 60.0, "C": None}
    assert metrics["hd95"]["mean"] == mean
    assert metrics["dice"]["mean"] == 0.5


def test_some_sites_may_be_chosen_and_a_wrong_one_is_named(three_sites, tiny_config, tmp_path):
    table = in_turn(three_sites, tmp_path / "out", tiny_config("fedbn", rounds=1), sites=["C"], **OPTIONS)
    assert table["unseen"] == {"C": None}  # its norm layers are nobody's
    assert table["mean"] is None
    with pytest.raises(ConfigError, match="'D'"):
        in_turn(three_sites, tmp_path / "other", tiny_config(), sites=["D"], **OPTIONS)
    with pytest.raises(DataError, match="two sites must remain"):
        in_turn(three_sites, tmp_path / "other", tiny_config(holdout=("A",)), **OPTIONS)
    (tmp_path / "out" / "results.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds the results of a run"):
        in_turn(three_sites, tmp_path / "out", tiny_config(), **OPTIONS)


@pytest.mark.parametrize(
    ("methods", "settings"),
    [
        ("fedfd_a", None),
        ("fedbn", {"fedbn": {"unseen": "average"}}),
        ("fedrdn_v", None),
    ],
)
def test_a_finished_run_is_evaluated_with_the_exchange_beside_its_model(
    three_sites, tiny_config, tmp_path, methods, settings
):
    config = tiny_config(methods, rounds=2, holdout=("B",), settings=settings)
    results = simulate(three_sites, tmp_path / "out", config, **OPTIONS)
    model = tmp_path / "out" / "global_model.pt"
    exchanged = (tmp_path / "out" / "global_exchange.pt").exists()
    assert exchanged
    evaluated = evaluate_model(model, three_sites / "B", device="cpu")
    assert evaluated["sites"]["B"] == results["test"]["unseen"]["B"]
    assert evaluated["sites"]["B"]["dice"] is not None
