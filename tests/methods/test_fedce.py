"""FedCE against Jiang et al., CVPR 2023: weights by directions of updates and by errors without a site."""

from __future__ import annotations

import pytest
import torch
from reference import Round, assert_models, copied, descend, entries, labels_of, mean, pixels
from torch.nn.functional import cross_entropy

MISSED = [("A", "B", "C"), ("A", "C"), ("A", "B", "C"), ("A", "B", "C")]


def of_training_images(run, site, network, state):
    """The mean loss of all training images, in evaluation."""
    with torch.no_grad():
        return float(
            cross_entropy(copied(network, state).eval()(pixels(run, site) / 255), labels_of(run, site))
        )


def shares(values):
    values = {site: max(value / sum(values.values()), 1e-3) for site, value in values.items()}
    return {site: value / sum(values.values()) for site, value in values.items()}


def written_out(run, mode):
    """Rounds and the weights of each, by the equations."""
    start = run.network()
    names = [name for name, _ in start.named_parameters()]
    model, rounds, history = entries(start), [], []
    p, cosines, errors, last = {}, {}, {}, {}
    for round_ in range(1, run.config.rounds + 1):
        local = {}
        for site in run.took_part(round_):
            if round_ > 1 and site in last:
                without = {key: (model[key] - p[site] * last[site][key]) / (1 - p[site]) for key in model}
                errors.setdefault(site, []).append(of_training_images(run, site, start, without))
            network = copied(start, model)
            descend(network, run.batches[site, round_], 0.05)
            local[site] = entries(network)
        last = local
        u = {site: torch.cat([(w[k] - model[k]).flatten() for k in names]) for site, w in local.items()}
        for site in local:
            p.setdefault(site, 1 / 3)
        for site in local:
            others = sum(p[other] * u[other] for other in local if other != site)
            cosine = (u[site] @ others) / (u[site].norm() * others.norm())
            cosines.setdefault(site, []).append(float(cosine))
        unlike = shares({site: 1 - sum(cosines[site]) / len(cosines[site]) for site in local})
        known = {site: sum(errors[site]) / len(errors[site]) for site in local if site in errors}
        middle = sum(known.values()) / len(known) if known else 1.0
        wrong = shares({site: known.get(site, middle) for site in local})
        if mode == "plus":
            p.update(shares({site: unlike[site] + wrong[site] for site in local}))
        else:
            p.update(shares({site: unlike[site] * wrong[site] for site in local}))
        model = mean(list(local.values()), [p[site] for site in local])
        rounds.append(Round(model, local))
        history.append({site: p[site] for site in local})
    return rounds, history


@pytest.mark.parametrize(
    ("plan", "mode", "kept"),
    [(None, "plus", False), (MISSED, "times", True)],
    ids=["plus", "times, one misses a round, and sites start anew in every round"],
)
def test_weights_follow_the_contributions(federate, tmp_path, plan, mode, kept):
    run = federate(
        "fedce",
        plan=plan,
        rounds=4,
        settings={"fedce": {"mode": mode}},
        network="reference_convolutional",
        local_epochs=2,
        learning_rate=0.05,
        states=tmp_path / "states" if kept else None,
    )
    rounds, history = written_out(run, mode)
    assert_models(run, rounds, atol=2e-6)
    assert len({round(weight, 3) for weight in history[-1].values()}) == 3
    for record, weights in zip(run.server.rounds, history, strict=True):
        assert record["methods"]["fedce"]["weights"] == pytest.approx(weights, abs=1e-5)
