"""FedProto against Tan et al., AAAI 2022: prototypes, their average and the term in the loss."""

import pytest
import torch
from reference import UNEVEN, Points, assert_models, federated_averaging, step_down
from torch import nn
from torch.nn.functional import cross_entropy

from medfedaug.methods.base import ServerContext, SiteContext, Step
from medfedaug.research.methods.fedproto import FedProto

WEIGHT = 0.3


def features(network, x):
    return network.encoder(x).mean((2, 3))


def test_classes_means_are_brought_together(federate):
    settings = {"fedproto": {"weight": WEIGHT}}
    run = federate("fedproto", plan=UNEVEN, settings=settings, local_epochs=2)
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
        # Of the last local epoch, in training.
        z, y = (torch.cat(part)[-run.server.sites[site] :] for part in zip(*kept, strict=True))
        values = [
            torch.stack([one[y == label].sum(0) for label in (0, 1)]) for one in (z, torch.ones(len(z)))
        ]
        sums.setdefault(round_, {})[site] = (values[0], values[1].double())

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    for round_ in (1, 2, 3):
        for site, (total, count) in sums[round_].items():
            payload = run.replies[round_][site].payload
            torch.testing.assert_close(payload["fedproto/sums"].double(), total, rtol=1e-5, atol=1e-5)
            assert payload["fedproto/counts"].tolist() == count.tolist()


def proto_network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def proto_site(network, images, **args):
    return FedProto(**args).at_site(SiteContext("A", network, num_samples=lambda: len(images), task=Points()))


def loss_of(site, network, images, labels):
    step = Step(network, images, labels, network(images))
    site.after_pass(step)
    loss = site.loss(step)
    site.after_step(step)
    return loss


def test_sums_of_a_class_without_images_are_refused():
    network = proto_network()
    server = FedProto().every_round(ServerContext(network, 1, task=Points()))
    images = torch.rand(3, 1, 2, 3)
    site = proto_site(network, images)
    loss_of(site, network, images, torch.tensor([0, 1, 0]))
    payload = site.collect()
    server.check(payload)
    payload["sums"][2] = 1.0
    with pytest.raises(ValueError, match="class without images"):
        server.check(payload)


def test_fedproto_at_its_prototypes_has_no_gradient_and_no_nan():
    network = proto_network()
    images, labels = torch.rand(2, 1, 2, 3), torch.tensor([0, 1])
    site = proto_site(network, images)
    means = torch.cat([network[:3](images).detach(), torch.zeros(1, 4)])
    site.apply({"means": means, "counts": torch.ones(3)})
    loss_of(site, network, images, labels).backward()
    assert bool(torch.isfinite(network[1].weight.grad).all())
