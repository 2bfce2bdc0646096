"""A site that lies below all limits: the others' values speak against it, and against nobody else."""

import pytest
import torch
from reference import same

from medfedaug.config.run import Execution
from medfedaug.errors import RunFailed
from medfedaug.federation import FederationServer, Reply
from medfedaug.federation.server.outlier_checks import Plausibility

SITES = list("ABCDE")


def test_statistics_before_training_that_no_other_site_has_keep_their_site_out(federation, lies):
    lie = lies("BE", {"fedrdn/std": 1e-6}, "prepare")
    server, _ = federation(lie, methods="fedrdn", rounds=1)
    assert set(server.left_out) == {"B", "E"}
    assert not [entry for entry in server.rounds if entry["refused"]]
    alone, _ = federation(methods="fedrdn", sites="ACD", rounds=1)
    assert same(server.state, alone.state)


LIES = {
    "fedfa": ("fedfa", {"fedfa/enc1/std": 1e5}, {"fedfa": {"variance": "direct"}}),
    "fedfd": ("fedfd", {"fedfd/model.0.conv.unit0.adn.N.running_var": 1e9}, None),
    "fedfd_a": ("fedfd_a", {"fedfd_a/model.0.conv.unit0.adn.N.adapter.out_weight": 1e6}, None),
    "fednova": ("fednova", {"fednova/length": 1e6}, None),
    "scaffold": ("scaffold", {"scaffold/model.0.conv.unit0.conv.weight": 1e6}, None),
}


@pytest.mark.all_layers
@pytest.mark.parametrize("method", LIES)
def test_a_lie_in_a_round_is_refused_by_name_and_the_round_goes_on(federation, lies, method):
    liars = "BE"
    methods, values, settings = LIES[method]
    server, _ = federation(lies(liars, values), methods=methods, settings=settings, rounds=1)
    (key,) = values
    for entry in server.rounds:
        assert {one["site"] for one in entry["refused"]} == set(liars)
        assert all(f"site {one['site']}, {key}: expected" in one["reason"] for one in entry["refused"])
        assert set(entry["sites"]) >= set(SITES) - set(liars)
        assert not any("samples" in entry["sites"].get(site, {}) for site in liars)
    others = [site for site in SITES if site not in liars]
    alone, _ = federation(methods=methods, sites=others, settings=settings, rounds=1)
    if method != "scaffold":  # whose control variate counts sites that did not answer
        assert all(torch.equal(server.payload[k], v) for k, v in alone.payload.items())
    assert same(server.state, alone.state)


def test_without_a_least_number_of_sites_the_run_ends_and_names_the_liar_alone(federation, lies):
    with pytest.raises(RunFailed) as caught:
        federation(lies("D", {"fedrdn/std": 1e-6}, "prepare"), methods="fedrdn", min_sites=0)
    assert "site D, fedrdn/std: expected values from" in str(caught.value)
    assert not any(f"site {other}" in str(caught.value) for other in "ABCE")


def test_of_three_sites_one_can_be_told_and_of_two_none(federation, lies):
    lie = lies("B", {"fedrdn/mean": 1e10}, "prepare")
    three, _ = federation(lie, methods="fedrdn", sites="ABC", rounds=1)
    assert set(three.left_out) == {"B"}
    # Two that lie alike are the majority: the page says so.
    fooled = FederationServer(three.config, execution=Execution(min_sites=2))
    prepare(fooled, {"A": 0.3, "B": 1e8, "C": 1e8})
    assert set(fooled.left_out) == set()  # 0.3 is no multiple of theirs; only a deviation can be too small
    two = FederationServer(three.config, execution=Execution(min_sites=2))
    prepare(two, {"A": 0.3, "B": 1e10})
    assert not two.left_out


def fedfa_payload(server, value):
    shapes = server.aggregation.every_round["fedfa"].shapes
    return {f"fedfa/{key}": torch.full(size, float(value)) for key, size in shapes.items()}


def statistics(mean=0.3, std=0.2):
    values = {"mean": mean, "std": std, "count": 12.0}
    return {f"fedrdn/{key}": torch.tensor([value]) for key, value in values.items()}


def prepare(server, means):
    for site, mean in means.items():
        assert server.accept_preparation(site, Reply("prepare", num_samples=10, payload=statistics(mean)))
    server.finish_preparation()


def test_a_site_that_joins_late_is_compared_with_those_that_are_there_also_after_a_restart(
    tiny_config, tmp_path
):
    server = FederationServer(tiny_config("fedrdn"), execution=Execution(min_sites=2))
    prepare(server, {"A": 0.3, "B": 0.4})
    server.start_round()
    server.save(tmp_path / "checkpoint.pt")
    again = FederationServer(tiny_config("fedrdn"), execution=Execution(min_sites=2))
    again.restore(tmp_path / "checkpoint.pt")
    for one in (server, again):
        late = Reply("prepare", num_samples=10, payload=statistics(std=1e-6))
        assert not one.accept_preparation("C", late)
        assert "site C, fedrdn/std: expected values from 0.0002 on" in one.left_out["C"]
        assert one.accept_preparation("C", Reply("prepare", num_samples=10, payload=statistics(0.5)))
        assert sorted(one.statistics) == ["A", "B", "C"]


def test_both_ends_are_named_with_their_own_factor(tiny_config):
    server = FederationServer(tiny_config("fedrdn"), execution=Execution(min_sites=2))
    for site, std in zip(SITES, (1e-5, 0.2, 0.2, 0.2, 1e5), strict=True):
        server.accept_preparation(site, Reply("prepare", num_samples=10, payload=statistics(std=std)))
    server.finish_preparation()
    among = "the median of 5 sites"
    assert server.left_out == {
        "A": f"site A, fedrdn/std: expected values from 0.0002 on, a 1000th of {among}, got 1e-05",
        "E": f"site E, fedrdn/std: expected values up to 200, 1000 times {among}, got 1e+05",
    }


@pytest.mark.all_layers
def test_the_score_that_came_with_a_lie_chooses_no_round(tiny_config):
    server = FederationServer(tiny_config("fednova", rounds=3), execution=Execution(min_sites=2))
    for site in SITES:
        server.accept_preparation(site, Reply("prepare", num_samples=10))
    server.finish_preparation()
    for sites, liars in (("ABCD", ""), ("ABCDE", "DE")):
        server.start_round()
        for site in sites:
            length = torch.tensor([1.0 if site in liars else 5e3])
            metrics = {"val_dice": 1.0 if site in liars else 0.5}
            reply = trained(server, payload={"fednova/length": length}, metrics=metrics)
            assert server.accept(site, reply), server.rounds[-1]["refused"]
        server.finish_round()
    assert [one["site"] for one in server.rounds[1]["refused"]] == ["D", "E"]
    scored = {site: numbers.get("val_dice") for site, numbers in server.rounds[0]["sites"].items()}
    assert scored == {"A": 0.5, "B": 0.5, "C": 0.5, "D": None}  # E was not in the first round


@pytest.mark.all_layers
@pytest.mark.parametrize("method", ["feddg", "feddg_ga", "fedproto"])
def test_what_these_methods_exchange_is_not_compared(tiny_config, method):
    """docs/reliability.md names them."""
    photographs = {"task": "classification", "network": "lenet5", "network_args": {}, "in_channels": 3}
    config = tiny_config(method, **(photographs if method == "fedproto" else {}))
    aggregation = FederationServer(config).aggregation
    exchanges = {**aggregation.once, **aggregation.every_round}
    assert set(exchanges) == {method}
    assert not Plausibility(exchanges).kinds


# ---------------------------------------------------------------- buffers, and errors of any kind


def trained(server, **changes):
    weights = {key: server.state[key].clone() for key in server.shared}
    return Reply("train", server.round, weights=weights, num_samples=10, **changes)


@pytest.fixture
def second_round(tiny_config):
    server = FederationServer(tiny_config(), execution=Execution(min_sites=1))
    for site in "AB":
        server.accept_preparation(site, Reply("prepare", num_samples=10))
    server.finish_preparation()
    server.start_round()
    assert server.accept("A", trained(server))
    server.finish_round()
    server.start_round()
    return server


@pytest.mark.parametrize("kind", ["running_mean", "running_var"])
def test_running_statistics_may_not_move_far_once_they_are_known(second_round, kind):
    reply = trained(second_round)
    for key in reply.weights:
        if key.endswith(kind):
            reply.weights[key] += 1e6
    assert not second_round.accept("A", reply)
    (refused,) = second_round.rounds[-1]["refused"]
    assert refused["reason"].startswith("site A, buffers: expected a step of norm up to")
    assert second_round.accept("B", trained(second_round))


class Spiteful(dict):
    """A mapping that raises as soon as somebody looks at it."""

    def items(self):
        raise ZeroDivisionError("spite")

    get = __iter__ = __getitem__ = items


@pytest.mark.parametrize("field", ["metrics", "payload", "weights"])
def test_an_exception_of_any_kind_is_a_refusal_of_that_site_alone(second_round, tiny_config, field):
    server = FederationServer(tiny_config("fedrdn"), execution=Execution(min_sites=2))
    bad = Reply("prepare", num_samples=10, payload=statistics())
    setattr(bad, field, Spiteful({"input": 1}))
    taken = server.accept_preparation("E", bad)
    assert taken is (field == "weights")  # which nobody looks at before training
    if not taken:
        assert "ZeroDivisionError: spite" in server.left_out["E"]
    prepare(server, {"A": 0.3, "B": 0.4})
    reply = trained(second_round)
    setattr(reply, field, Spiteful({"x": 1}))
    assert not second_round.accept("A", reply)
    assert "ZeroDivisionError: spite" in second_round.rounds[-1]["refused"][0]["reason"]
    assert second_round.accept("B", trained(second_round))
    second_round.finish_round()
