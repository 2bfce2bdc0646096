"""The server's decisions and the site's training, without an engine."""

import math

import pytest
import torch

from medfedaug.config.run import Execution, derive_seed
from medfedaug.errors import DataError, RunFailed
from medfedaug.federation import FederationServer, Reply, Site, SiteTrainer, run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.federation.in_process import InProcessCarrier, run_pooled
from medfedaug.metrics.significance import has_stalled
from medfedaug.models import ffa_layers
from medfedaug.runs.load_results import check_record

SITES = ["site_A", "site_B", "site_C"]


def started_server(config, samples=(10, 30), min_sites=0):
    server = FederationServer(config, execution=Execution(min_sites=min_sites))
    for name, count in zip("AB", samples, strict=True):
        server.accept_preparation(name, Reply("prepare", num_samples=count))
    server.finish_preparation()
    return server


def update(server, site, value=None, **changes):
    weights = {key: torch.full_like(server.state[key], float(value or 0)) for key in server.shared}
    return Reply("train", server.round, weights=weights, num_samples=server.sites[site], **changes)


# ---------------------------------------------------------------- server


def test_average_is_weighted_by_samples_and_integers_stay(tiny_config):
    server = started_server(tiny_config())
    server.start_round()
    assert server.accept("A", update(server, "A", 1.0))
    assert server.accept("B", update(server, "B", 5.0))
    state = server.finish_round()
    for key in server.shared:
        torch.testing.assert_close(state[key], torch.full_like(state[key], 4.0))
    counters = [key for key in state if key.endswith("num_batches_tracked")]
    assert counters
    assert all(state[key].dtype == torch.int64 and key not in server.shared for key in counters)


def test_a_second_update_and_a_stranger_are_refused(tiny_config):
    server = started_server(tiny_config())
    server.start_round()
    assert server.accept("A", update(server, "A", 1.0))
    assert not server.accept("A", update(server, "A", 100.0))
    stranger = update(server, "A", 1.0)
    assert not server.accept("Z", stranger)
    assert [r["site"] for r in server.rounds[-1]["refused"]] == ["A", "Z"]


def test_too_few_good_updates_end_the_run_with_the_reason(tiny_config):
    server = started_server(tiny_config())
    before = {key: value.clone() for key, value in server.state.items()}
    server.start_round()
    server.accept("A", update(server, "A", 1.0))
    server.accept("B", update(server, "B", math.nan))
    with pytest.raises(RunFailed, match=r"1 of 2 needed.*site B.*NaN"):
        server.finish_round()
    assert all(torch.equal(before[key], server.state[key]) for key in before)


def test_selection_takes_the_best_validation_mean_and_scores_the_last_round(tiny_config):
    server = started_server(tiny_config(rounds=3))
    scores = {1: (0.2, 0.6), 2: (0.5, 0.1), 3: (0.9, None)}
    for round_ in (1, 2, 3):
        server.start_round()
        for i, site in enumerate("AB"):
            metrics = {"val_dice": scores[round_ - 1][i]} if round_ > 1 else {}
            server.accept(site, update(server, site, round_, metrics=metrics))
        server.finish_round()
    assert server.selected_round == 1
    for i, site in enumerate("AB"):
        server.accept_validation(site, Reply("validate", 3, metrics={"dice": scores[3][i]}))
    server.finish_validation()
    assert server.selected_round == 3
    assert [entry["val_dice"] for entry in server.rounds] == pytest.approx([0.4, 0.3, 0.9])
    assert server.rounds[0]["sites"]["B"]["val_dice"] == 0.6
    assert float(server.selection.state[server.shared[0]].flatten()[0]) == 3.0


def test_bytes_are_those_of_the_numbers(tiny_config):
    server = started_server(tiny_config("fedfa"))
    size = 4 * sum(server.state[key].numel() for key in server.shared)
    shapes = server.aggregation.every_round["fedfa"].shapes
    payload = {f"fedfa/{key}": torch.rand(shape) for key, shape in shapes.items()}
    ffa = 4 * 2 * (4 + 8 + 8)
    for _ in range(2):
        server.start_round()
        for site in "AB":
            server.accept(site, update(server, site, 1.0, payload=dict(payload)))
        server.finish_round()
    entry = server.rounds[1]
    assert entry["bytes"] == {
        "model": {"up": 2 * size, "down": 2 * size},
        "fedfa": {"up": 2 * ffa, "down": 2 * ffa},
    }
    assert entry["bytes_up"] == entry["bytes_down"] == 2 * (size + ffa)


def test_one_training_site_is_no_federation(tiny_config):
    server = FederationServer(tiny_config())
    server.accept_preparation("A", Reply("prepare", num_samples=3))
    server.accept_preparation("B", Reply("prepare", num_samples=0))
    with pytest.raises(RunFailed, match="1 of the sites"):
        server.finish_preparation()


# ---------------------------------------------------------------- site


def trainer_for(config, data, site="site_A"):
    trainer = SiteTrainer(config, data, device="cpu")
    trainer.open(site)
    return trainer


def test_a_round_repeats_to_the_bit_and_differs_by_round_site_and_seed(tiny_config, phantom_dir):
    def weights(config, site="site_A", round_=1):
        trainer = trainer_for(config, phantom_dir, site)
        torch.rand(3)  # whatever else the process drew
        return torch.cat([value.flatten() for value in trainer.train(round_).weights.values()])

    config = tiny_config("fedfa")
    first = weights(config)
    assert torch.equal(first, weights(config))
    assert not torch.equal(first, weights(config, round_=2))
    assert not torch.equal(first, weights(tiny_config("fedfa", seed=1)))
    assert derive_seed(0, "A", 1) != derive_seed(0, "B", 1)


def test_training_leaves_the_random_numbers_of_the_process_alone(tiny_config, phantom_dir):
    trainer = trainer_for(tiny_config("fedfa"), phantom_dir)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    trainer.train(1)
    assert torch.equal(torch.rand(2), expected)


def test_data_folder_comes_from_the_site(tiny_config, phantom_dir, monkeypatch):
    monkeypatch.delenv("MEDFEDAUG_DATA", raising=False)
    with pytest.raises(DataError, match="MEDFEDAUG_DATA"):
        trainer_for(tiny_config(), None)
    for value in (phantom_dir, phantom_dir / "site_A"):
        monkeypatch.setenv("MEDFEDAUG_DATA", str(value))
        assert trainer_for(tiny_config(), None).folder.path == phantom_dir / "site_A"


# ---------------------------------------------------------------- in process


def test_a_run_in_process(tiny_config, phantom_dir):
    events = []
    server = run_in_process(tiny_config("fedrdn,fedfa"), phantom_dir, SITES, "cpu", events.append)
    results = server.results()
    assert [entry["round"] for entry in results["rounds"]] == [1, 2]
    for entry in results["rounds"]:
        assert set(entry["sites"]) == {"site_A", "site_B"}
        for site in entry["sites"].values():
            assert 0 < site["train_loss"] < 10
            assert 0 <= site["val_dice"] <= 1
    assert set(results["test"]["sites"]) == {"site_A", "site_B"}
    assert set(results["test"]["unseen"]) == {"site_C"}
    assert results["unseen"] == ["site_C"]
    assert {event["event"] for event in events} >= {
        "prepared",
        "unseen",
        "trained",
        "round_finished",
        "tested",
    }
    ranges = results["rounds"][1]["methods"]["fedfa"]
    assert list(ranges) == list(ffa_layers(Composition(server.config).network))
    assert all(low < high for stage in ranges.values() for low, high in stage.values())
    assert set(server.statistics) == {"site_A", "site_B"}
    assert results["bytes_up_before_training"] == {"fedrdn": 2 * (8 + 8 + 4)}


@pytest.mark.parametrize("methods", ["ditto", "pooled"])
def test_validation_after_every_second_round_and_the_last(tiny_config, phantom_dir, methods):
    runs = run_pooled if methods == "pooled" else run_in_process
    always, seldom = (
        runs(tiny_config(methods, rounds=5, validate_every=every), phantom_dir, SITES, "cpu").results()
        for every in (1, 2)
    )
    scored = [entry["round"] for entry in seldom["rounds"] if "val_dice" in entry]
    assert scored == [2, 4, 5]
    for entry, other in zip(always["rounds"], seldom["rounds"], strict=True):
        for name, site in entry["sites"].items():
            assert other["sites"][name]["train_loss"] == site["train_loss"]
            assert ("val_dice" in other["sites"][name]) == (entry["round"] in scored)
        assert entry["round"] not in scored or other["val_dice"] == entry["val_dice"]
    best = max(scored, key=lambda round_: always["rounds"][round_ - 1]["val_dice"])
    assert seldom["selected_round"] == best


def test_a_run_ends_where_validation_no_longer_rises(tiny_config, phantom_dir):
    events, every = [], 2
    options = {"rounds": 12, "learning_rate": 1e-9, "validate_every": every}
    patient = tiny_config("fedrdn", patience=2, **options)
    results = run_in_process(patient, phantom_dir, SITES, "cpu", on_event=events.append).results()
    scores = [entry["val_dice"] for entry in results["rounds"] if "val_dice" in entry]
    # The score of a round's model comes with the next round; the last one is asked for afterwards.
    assert [has_stalled(scores[:n], 2) for n in range(len(scores))] == [False] * (len(scores) - 1) + [True]
    assert len(results["rounds"]) == every * len(scores) < 12
    assert results["stalled"]["round"] == len(results["rounds"])
    assert "the last 2 validation scores are not better" in results["stalled"]["reason"]
    assert [event["round"] for event in events if event["event"] == "stalled"] == [len(results["rounds"])]
    assert results["rounds"][-1]["val_dice"] is not None
    check_record(results)


def test_a_site_that_has_left_before_the_test_is_named(tiny_config, make_site, tmp_path):
    for name in "ABC":
        make_site(name)

    class Leaving(InProcessCarrier):
        def connected(self):
            return [site for site in self.sites if site != "C" or self.server.round < 2]

    execution = Execution(min_sites=2)
    config = tiny_config()
    server = run_in_process(
        config, tmp_path / "data", list("ABC"), "cpu", execution=execution, carrier=Leaving
    )
    results = server.results()
    assert set(results["test"]["sites"]) == {"A", "B"}
    assert results["test"]["missing"] == {"C": "site C is not connected"}
    assert results["rounds"][1]["missing"] == [
        {"site": "C", "task": "validate", "reason": "site C is not connected"}
    ]


def test_metrics_that_no_json_could_hold_are_dropped():
    from medfedaug.federation.server.reply_checks import clean_metrics

    deep: dict = {}
    for _ in range(5000):
        deep = {"a": deep}
    metrics = clean_metrics(
        {
            "loss": 0.5,
            "nan": float("nan"),
            "huge": float("inf"),
            "object": object(),
            3: 4,
            "note": "text",
            "long": "x" * 1000,
            "none": None,
            "cases": {"p1": 0.25, "p2": [1], "deeper": {"a": 1}},
            "deep": deep,
        }
    )
    assert metrics == {"loss": 0.5, "note": "text", "none": None, "cases": {"p1": 0.25}, "deep": {}}


@pytest.mark.parametrize("score", [2.0, -1.0, float("nan"), "0.9", True, 1e30])
def test_an_impossible_score_selects_no_model(tiny_config, score):
    server = started_server(tiny_config())
    for _ in range(2):
        server.start_round()
        for site in "AB":
            reply = update(server, site, 1.0)
            reply.metrics["val_dice"] = score if site == "A" else 0.5
            server.accept(site, reply)
        server.finish_round()
    assert server.rounds[0]["sites"]["A"]["val_dice"] is None
    assert server.rounds[0]["val_dice"] == 0.5


def test_a_request_brings_one_model_which_is_loaded_once(tiny_config, phantom_dir, monkeypatch):
    """It is first scored, as the model of the round before, and then trained."""
    config = tiny_config("fedrdn,fedfa")
    server, sites = FederationServer(config), {}
    for name in SITES[:2]:
        sites[name] = Site(name, SiteTrainer(config, phantom_dir, "cpu"))
        server.accept_preparation(name, sites[name].answer(server.prepare()))
    server.finish_preparation()
    loaded = []
    load = torch.nn.Module.load_state_dict

    def watched(self, state, *args, **kwargs):
        loaded.append(len(state))
        return load(self, state, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", watched)
    for _ in range(2):
        request = server.start_round()
        for name, site in sites.items():
            loaded.clear()
            assert server.accept(name, site.answer(request))
            assert loaded == [len(server.shared)]
        server.finish_round()
    assert server.rounds[0]["val_dice"] >= 0
