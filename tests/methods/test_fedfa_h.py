"""FedFAʰ against Eq. 11 to 15 of the FedFA+ paper, at sites that join late and miss rounds."""

from __future__ import annotations

import pytest
import torch
from reference import assert_same, copied, descend, entries, images_of, mean

BINS, TAU, WEIGHT = 4, 0.8, 0.05


def features(network, images):
    """z of Eq. 12: the last stage's output, averaged over space, (N, C)."""
    return network.encoder(images).mean(dim=(2, 3))


def histogram(z, low, high):
    """Eq. 11 and 12, (C, L)."""
    cuts = torch.arange(BINS - 1, dtype=torch.float64) / (BINS - 2)
    bias = torch.tensor([-float(cuts[:k].sum()) for k in range(BINS)], dtype=torch.float64)
    scaled = (z - low) / (high - low)
    logits = torch.arange(1, BINS + 1) * scaled[..., None] + bias
    return torch.softmax(logits / TAU, dim=-1).mean(dim=0)


def divergence(p, q):
    """Eq. 14, the mean over the channels."""
    both = (p * (p / q).log()).sum(1) + (q * (q / p).log()).sum(1)
    return both.mean() / 2


@torch.no_grad()
def range_of(network, images):
    z = features(network.eval(), images)
    return z.amin(0), z.amax(0)


def by_hand(run, plan):
    """The global models and histograms, by round."""
    model, target, ranges, found = run.network(), None, {}, []
    for round_, asked in enumerate(plan, start=1):
        local, histograms = [], []
        for site in asked:
            batches = run.batches[site, round_]
            images, _ = images_of(batches, run.server.sites[site])
            network = copied(model)
            # The site's own model of the round before, or the global one where it took no part in it.
            low, high = ranges.get((site, round_ - 1)) or range_of(network, images)

            # What the pass of the loss itself makes of the batch.
            seen = {}
            handle = network.encoder.register_forward_hook(
                lambda _module, _args, out, seen=seen: seen.update(z=out.mean(dim=(2, 3)))
            )

            def term(_net, _x, _y, low=low, high=high, target=target, seen=seen):
                return 0.0 if target is None else WEIGHT * divergence(histogram(seen["z"], low, high), target)

            descend(network, batches, 0.05, term)
            handle.remove()
            ranges[site, round_] = range_of(network, images)
            with torch.no_grad():
                histograms.append(histogram(features(network, images), *ranges[site, round_]))
            local.append(entries(network))
        model = copied(model, mean(local, [run.server.sites[site] for site in asked]))
        target = sum(histograms) / len(histograms)
        found.append((entries(model), target))
    return found


SETTINGS = {"fedfa_h": {"bins": BINS, "tau": TAU, "weight": WEIGHT}}
NETWORK = {"network": "reference_convolutional", "learning_rate": 0.05}
# C joins late, B misses two rounds, A is always there; D comes for the last round alone.
PLAN = [("A", "B"), ("A", "C"), ("A", "C"), ("A", "B", "C", "D")]


def check(run, plan):
    for round_, (model, target) in enumerate(by_hand(run, plan), start=1):
        assert_same(run.models[round_], model, atol=2e-5)
        received = run.server.payload if round_ == len(plan) else run.requests[round_ + 1].payload
        torch.testing.assert_close(received["fedfa_h/histogram"].double(), target, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("restarts", [False, True], ids=["one process", "restarted before each round"])
def test_a_site_that_joins_late_or_misses_rounds_aligns_from_its_first_step_on(federate, tmp_path, restarts):
    states = tmp_path / "states" if restarts else None
    sizes = {"A": 5, "B": 10, "C": 15, "D": 5}
    run = federate("fedfa_h", plan=PLAN, sizes=sizes, settings=SETTINGS, rounds=4, states=states, **NETWORK)
    check(run, PLAN)


def test_a_share_of_the_sites_in_each_round(federate):
    run = federate("fedfa_h", settings=SETTINGS, rounds=5, participation=0.67, **NETWORK)
    plan = [run.took_part(round_) for round_ in range(1, 6)]
    assert all(len(asked) == 2 for asked in plan)
    assert len({tuple(asked) for asked in plan}) > 1
    check(run, plan)


def test_the_term_moves_the_model(federate):
    """What the tests above compare with differs from FedAvg by far more than they allow."""
    with_term = federate("fedfa_h", plan=PLAN[:2], settings=SETTINGS, rounds=2, **NETWORK)
    without = federate("fedavg", plan=PLAN[:2], rounds=2, **NETWORK)
    moved = [(with_term.models[2][key] - value).abs().max() for key, value in without.models[2].items()]
    assert float(max(moved)) > 1e-3
