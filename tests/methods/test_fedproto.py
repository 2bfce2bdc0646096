"""FedProto against Tan et al., AAAI 2022: prototypes, their average and the term in the loss."""

from __future__ import annotations

import pytest
import torch
from reference import UNEVEN, assert_models, federated_averaging, images_of, step_down
from torch.nn.functional import cross_entropy

WEIGHT = 0.3


def features(network, x):
    return network.encoder(x).mean((2, 3))


@pytest.mark.parametrize("passes", ["training", "evaluation"])
def test_classes_means_are_brought_together(federate, passes):
    settings = {"fedproto": {"weight": WEIGHT, "passes": passes}}
    run = federate(
        "fedproto", plan=UNEVEN, settings=settings, network="reference_convolutional", local_epochs=2
    )
    sums = {}

    def train(site, round_, network):
        prototypes = None
        if round_ > 1:
            sites = sums[round_ - 1].values()
            prototypes = sum(s for s, _ in sites) / sum(n for _, n in sites)[:, None]
        batches, kept = run.batches[site, round_], []
        for x, y in batches:
            network.train()
            z = features(network, x)
            loss = cross_entropy(network.head[2](z), y)
            if prototypes is not None:
                for label in y.unique():
                    loss = loss + WEIGHT * (z[y == label].mean(0) - prototypes[label]).norm()
            step_down(network, loss, 0.05)
            kept.append((z.detach(), y))
        if passes == "evaluation":
            images, labels = images_of(batches, run.server.sites[site])
            with torch.no_grad():
                kept = [(features(network.eval(), images), labels)]
        # Of the last local epoch, in training.
        z, y = (torch.cat(part)[-run.server.sites[site] :] for part in zip(*kept, strict=True))
        found = [torch.stack([one[y == label].sum(0) for label in (0, 1)]) for one in (z, torch.ones(len(z)))]
        sums.setdefault(round_, {})[site] = (found[0], found[1].double())

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    for round_ in (1, 2, 3):
        for site, (total, count) in sums[round_].items():
            payload = run.replies[round_][site].payload
            torch.testing.assert_close(payload["fedproto/sums"].double(), total, rtol=1e-5, atol=1e-5)
            assert payload["fedproto/counts"].tolist() == count.tolist()
