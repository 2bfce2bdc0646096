"""FedDG-GA against Zhang et al., CVPR 2023: weights in the mean that follow the generalization gaps."""

import pytest
import torch
from reference import Round, assert_models, assert_same, copied, descend, entries, labels_of, mean, pixels
from torch.nn.functional import cross_entropy

from medfedaug.methods.base import RoundMean, ServerContext, SiteUpdate
from medfedaug.research.methods.feddg_ga import FedDGGA


def of_training_images(run, site, network):
    """E: the mean loss of all training images, in evaluation."""
    with torch.no_grad():
        return float(cross_entropy(copied(network).eval()(pixels(run, site) / 255), labels_of(run, site)))


def written_out(run, step):
    """Rounds and the weights of each, by the equations."""
    start = run.network()
    model, rounds, history = entries(start), [], []
    weights, last = {}, {}
    for round_ in range(1, run.config.rounds + 1):
        local, gaps, losses = {}, {}, {}
        for site in run.took_part(round_):
            network = copied(start, model)
            received = of_training_images(run, site, network)
            if site in last:
                gaps[site] = received - last[site]
            descend(network, run.batches[site, round_], 0.05)
            local[site], losses[site] = entries(network), of_training_images(run, site, network)
        last.update(losses)
        for site in local:
            weights.setdefault(site, 1 / 3)
        if gaps:
            middle = sum(gaps.values()) / len(gaps)
            largest = max(abs(gap - middle) for gap in gaps.values())
            rate = step * (1 - (round_ - 2) / run.config.rounds)
            share = sum(weights[site] for site in gaps)
            for site, gap in gaps.items():
                weights[site] = min(1.0, max(0.001, weights[site] + rate * (gap - middle) / largest))
            total = sum(weights[site] for site in gaps)
            for site in gaps:
                weights[site] *= share / total
        model = mean(list(local.values()), [weights[site] for site in local])
        rounds.append(Round(model, local))
        history.append(dict(weights))
    return rounds, history


@pytest.mark.parametrize(
    ("plan", "step"),
    [
        (None, 0.1),
        (None, 1.0),  # so far that weights are clipped
        ([("A", "B", "C"), ("A", "C"), ("A", "B", "C"), ("A", "B", "C")], 0.1),
    ],
    ids=["all", "clipped", "one misses a round"],
)
def test_weights_follow_the_gaps(federate, plan, step):
    run = federate("feddg_ga", plan=plan, rounds=4, settings={"feddg_ga": {"step": step}}, local_epochs=2)
    rounds, history = written_out(run, step)
    assert_models(run, rounds)
    assert history[0] == {"A": 1 / 3, "B": 1 / 3, "C": 1 / 3}  # of 6, 12 and 18 images
    assert len({round(weight, 3) for weight in history[-1].values()}) == 3
    assert any(weight <= 0.001 for weights in history for weight in weights.values()) == (step == 1.0)
    for record, weights in zip(run.server.rounds, history, strict=True):
        assert record["methods"]["feddg_ga"]["weights"] == pytest.approx(weights, abs=1e-5)


def test_without_a_step_all_sites_weigh_the_same(federate):
    run = federate("feddg_ga", settings={"feddg_ga": {"step": 0.0}})
    plain = federate("fedavg", weighting="uniform")
    assert_same(run.models[3], plain.models[3])


def aggregator(sites="AB", rounds=4, **args):
    network = torch.nn.Linear(1, 1, bias=False)
    weights = {site: float(number) for number, site in enumerate(sites, start=1)}
    context = ServerContext(network, 1, weights=lambda: dict(weights), rounds=rounds)
    return FedDGGA(**args).aggregator(context)


def one_round(result, round_, losses, models):
    for site, values in losses.items():
        model = {"weight": torch.full((1, 1), models[site])}
        result.accept(SiteUpdate(site, round_, model, {"loss": torch.tensor(values)}, 1.0))
    return float(result.result(RoundMean(round_, {}, {}, {}))["weight"])


def test_equal_gaps_change_nothing_and_a_restart_goes_on():
    models = {"A": 1.0, "B": 3.0}
    whole, restarted = aggregator(step=0.5), aggregator(step=0.5)
    first = {"A": [1.0, 0.5], "B": [1.0, 0.25]}
    assert one_round(whole, 1, first, models) == one_round(restarted, 1, first, models) == 2.0
    other = aggregator(step=0.5)
    other.restore(restarted.state())
    equal = {"A": [0.75, 0.5], "B": [0.5, 0.25]}  # gaps of 0.25 each
    assert one_round(whole, 2, equal, models) == one_round(other, 2, equal, models) == 2.0
    # Gaps of 0 and 0.5: d = 0.5 · 3/4, of which all goes from A to B.
    third = {"A": [0.5, 0.5], "B": [0.75, 0.25]}
    expected = 2 + 2 * 0.5 * 3 / 4
    assert one_round(whole, 3, third, models) == one_round(other, 3, third, models) == expected


def test_no_choice_of_sites_leaves_a_round_without_a_mean():
    result = aggregator("ABCD", rounds=100, step=1.0)
    lost, won = [1.0, 1.0], [2.0, 1.0]  # gaps of 0 and 1
    for round_, losing in enumerate(("A", "B"), start=2):
        for number in (1, round_):
            one_round(result, number, {losing: lost, "C": won}, {losing: 1.0, "C": 2.0})
    weights = result.weights
    assert weights["A"] < 0.002
    assert weights["B"] < 0.002
    # These two share what little they had, and the one with the larger gap gets nearly all of it.
    before = weights["A"] + weights["B"]
    model = one_round(result, 4, {"A": won, "B": lost}, {"A": 3.0, "B": 1.0})
    assert model == pytest.approx(3.0, abs=0.01)
    assert weights["A"] + weights["B"] == pytest.approx(before)
    one_round(result, 5, {"D": lost}, {"D": 1.0})
    assert sum(weights.values()) == pytest.approx(1.0)
    # Beside a site that has weight, one without it gets its share again.
    one_round(result, 6, {"B": won, "C": lost}, {"B": 1.0, "C": 1.0})
    assert weights["B"] > 0.4
