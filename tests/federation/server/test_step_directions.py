"""Directions of steps against a float64 reference, and sites that are named."""

import pytest
import torch
from reference import same

from medfedaug.federation.server.history import RunHistory
from medfedaug.federation.server.outlier_checks import cosines, suspects
from medfedaug.runs.load_results import check_record
from medfedaug.utils.event_text import EventLines


def test_the_cosine_is_that_with_the_mean_of_the_other_directions():
    generator = torch.Generator().manual_seed(0)
    state = {key: torch.randn(3, 4, generator=generator) for key in ("a", "b", "buffer")}
    updates = {
        site: {k: v + size * torch.randn(3, 4, generator=generator) for k, v in state.items()}
        for site, size in zip("ABCD", (1.0, 2.0, 3.0, 0.1), strict=True)
    }
    found = cosines({**updates, "idle": state}, state, ["a", "b"])
    flat = {s: torch.cat([(u[k].double() - state[k]).flatten() for k in "ab"]) for s, u in updates.items()}
    for site, own in flat.items():
        others = sum(flat[other] / flat[other].norm() for other in flat if other != site)
        expected = float(torch.nn.functional.cosine_similarity(own, others, dim=0))
        assert found[site] == pytest.approx(expected, abs=0.05 + 1e-9)
    assert found["idle"] == 0


def backwards(site, request, reply):
    """B goes the opposite way of its training."""
    if site == "B" and request.task == "train":
        for key, value in reply.weights.items():
            if "running_" not in key:
                reply.weights[key] = 2 * request.weights[key] - value


@pytest.mark.parametrize("methods", ["fedavg", "trimmed_mean"])
def test_a_site_whose_steps_go_against_the_others_is_named_once(federation, methods):
    server, events = federation(backwards, methods=methods, rounds=4)
    (event,) = [event for event in events if event["event"] == "suspected"]
    assert event["site"] == "B"
    (line,) = EventLines(4).lines(event)
    assert line.startswith("suspected: B: its steps went against the others' in ")
    results = server.results()
    assert set(results["suspected"]) == {"B"}
    check_record(results)


def test_naming_a_site_changes_no_model_and_honest_sites_are_not_named(federation, monkeypatch):
    server, events = federation(rounds=4)
    assert not [event for event in events if event["event"] == "suspected"]
    monkeypatch.setattr("medfedaug.federation.server.aggregation.cosines", lambda *_: {})
    other, _ = federation(rounds=4)
    assert same(server.state, other.state)


def test_a_run_that_continues_after_a_restart_names_nobody_twice():
    events = []
    record = RunHistory(["dice"], {"scaling": "scale"}, on_event=events.append)
    record.rounds = [
        {"round": r, "cosines": {"B": -0.5}, "sites": {}, "bytes": {}, "methods": {}} for r in range(4)
    ]
    again = RunHistory(["dice"], {"scaling": "scale"}, on_event=events.append)
    again.restore(record.saved())
    again.finish_round({}, 1.0)
    assert not [event for event in events if event["event"] == "suspected"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([-0.3] * 3, "in 3 of 3 rounds"),
        ([0.4, -0.3, -0.2, -0.3, 0.4, 0.4], "in 3 of 6 rounds"),
        ([-0.3] * 2, ""),
        ([-0.3] * 3 + [0.4] * 4, ""),
        ([-0.1] * 9, ""),
    ],
)
def test_a_site_is_named_from_most_of_three_rounds_or_more_on(values, words):
    named = suspects([{"cosines": {"A": 0.4, "B": value}} for value in values])
    assert set(named) == ({"B"} if words else set())
    assert words in named.get("B", "")
