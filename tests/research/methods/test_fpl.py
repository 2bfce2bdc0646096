"""FPL: clusters of prototypes and the two terms of its loss, from the equations, and what it refuses."""

import math

import pytest
import torch
from reference import assert_models, federated_averaging, step_down
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from medfedaug.methods.base import ServerContext, SiteContext, Step
from medfedaug.research.methods.fpl import FPL, first_neighbours, prototype_contrast
from medfedaug.tasks import ClassificationTask

TASK = ClassificationTask(["a", "b", "c"], scale=True)


# ---------------------------------------------------------------- functions


def components(x):
    """Eq. 4 element by element, and the components as the closure of A."""
    n = len(x)
    cosine = [
        [float(x[i] @ x[j]) / math.sqrt(float(x[i] @ x[i]) * float(x[j] @ x[j])) for j in range(n)]
        for i in range(n)
    ]
    v = [max((j for j in range(n) if j != i), key=lambda j, i=i: cosine[i][j], default=i) for i in range(n)]
    linked = [[i == j or j == v[i] or i == v[j] or v[i] == v[j] for j in range(n)] for i in range(n)]
    for k in range(n):
        for i in range(n):
            for j in range(n):
                linked[i][j] = linked[i][j] or (linked[i][k] and linked[k][j])
    return linked


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_clusters_are_the_components_of_first_neighbours(count):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    result = first_neighbours(x)
    assert (result[:, None] == result).tolist() == components(x)
    # Numbered from 0 as they appear, and whatever the lengths of the vectors.
    assert list(dict.fromkeys(result.tolist())) == list(range(int(result.max()) + 1))
    lengths = torch.rand(count, 1, generator=generator, dtype=torch.float64) + 0.5
    assert torch.equal(first_neighbours(lengths * x), result)


def test_there_can_be_several_clusters_and_vectors_of_zeros():
    angles = torch.tensor([0.0, 90.0, 5.0, 180.0, 93.0, 185.0, 187.0]).deg2rad()
    x = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert first_neighbours(x).tolist() == [0, 1, 0, 2, 1, 2, 2]
    assert first_neighbours(torch.zeros(3, 2)).tolist() == [0, 0, 0]


def test_the_contrast_without_another_class_or_without_a_direction():
    z = torch.zeros(2, 3, requires_grad=True)
    prototypes, labels = torch.eye(3), torch.tensor([0, 1])
    one_class = prototype_contrast(torch.rand(2, 3), labels * 0, prototypes, torch.zeros(3), 0.02)
    torch.testing.assert_close(one_class, torch.zeros(2))
    loss = prototype_contrast(z, labels, prototypes, torch.arange(3), 0.02)
    torch.testing.assert_close(loss.detach(), torch.full((2,), math.log(3)))
    loss.sum().backward()
    assert float(z.grad.abs().max()) < 100  # and not the inverse of a smallest length
    # The paper's temperature lies beyond what the exponentials of half precision hold.
    half = prototype_contrast(torch.eye(3).half()[:2], labels, prototypes.half(), torch.arange(3), 0.02)
    assert half.dtype == torch.float16
    assert bool(torch.isfinite(half).all())


# ---------------------------------------------------------------- server


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 3))


def test_the_server_refuses_what_no_site_can_have():
    server = FPL().every_round(ServerContext(network(), 1, task=TASK))
    good = {
        "means": torch.tensor([[1.0, 0.0], [0.0, 3.0], [0.0, 0.0]]),
        "known": torch.tensor([1.0, 1.0, 0.0]),
    }
    server.check(good)
    for wrong in ({"known": good["known"] / 2}, {"known": -good["known"]}, {"means": good["means"] + 1}):
        with pytest.raises(ValueError, match="other than 0 or 1, or a class without images"):
            server.check({**good, **wrong})


# ---------------------------------------------------------------- site


def site(net, images, **args):
    return FPL(**args).at_site(SiteContext("A", net, num_samples=lambda: len(images), task=TASK))


def loss_of(part, net, images, labels):
    step = Step(net, images, labels, net(images))
    part.after_pass(step)
    return part.loss(step), step


@pytest.mark.parametrize("dropped", [0, 1])
def test_a_site_sends_the_features_of_the_last_epoch_as_the_network_made_them(dropped):
    """With a batch of four of nine images, the one left over makes a batch or none."""
    net = network()
    images, labels = torch.rand(9, 1, 2, 3), torch.tensor([0, 2, 0, 0, 2, 2, 0, 0, 1])
    part = site(net, images)
    for _ in range(2):
        part.start_round()
        for epoch in range(3):
            seen = []
            for batch in torch.randperm(9 - dropped).split(4):
                for passes in range(2):  # a second gradient, whose features are not counted twice
                    _, step = loss_of(part, net, images[batch] + passes, labels[batch])
                seen.append((net[:3](images[batch] + 1).detach(), labels[batch]))
                net[1].weight.data += 0.1 * (epoch + 1)
                part.after_step(step)
        sent = part.collect()
    features, targets = torch.cat([z for z, _ in seen]).double(), torch.cat([y for _, y in seen])
    for label in targets.unique().tolist():
        expected = features[targets == label].mean(0)
        torch.testing.assert_close(sent["means"][label].double(), expected, rtol=1e-5, atol=1e-6)
    assert sent["known"].tolist() == [1.0, 1.0 - dropped, 1.0]


def test_a_batch_of_unknown_classes_adds_nothing():
    net = network()
    images, labels = torch.rand(2, 1, 2, 3), torch.tensor([2, 2])
    part = site(net, images)
    part.apply({"clusters": torch.eye(2), "classes": torch.tensor([0.0, 1.0])})
    loss, _ = loss_of(part, net, images, labels)
    assert float(loss.detach()) == 0
    loss.backward()


# ---------------------------------------------------------------- federation


PLAN = [tuple("ABCDEF"), tuple("ACDF"), tuple("ABCDEF")]


TEMPERATURE, CONTRAST, CONSISTENCY = 0.5, 0.7, 0.2


def clusters(prototypes):
    """Eq. 4 and 5: the means of the sets that nearest neighbours link."""
    groups = [{i} for i in range(len(prototypes))]
    for i, own in enumerate(prototypes):
        similar = [cosine_similarity(own, other, dim=0) for other in prototypes]
        similar[i] = torch.tensor(-2.0)
        j = int(torch.stack(similar).argmax())
        joined = [group for group in groups if i in group or j in group]
        groups = [group for group in groups if group not in joined] + [set().union(*joined)]
    return [torch.stack([prototypes[i] for i in sorted(group)]).mean(0) for group in groups]


def test_features_are_contrasted_with_clusters_of_prototypes(federate):
    settings = {"fpl": {"temperature": TEMPERATURE, "contrastive": CONTRAST, "consistency": CONSISTENCY}}
    run = federate(
        "fpl",
        plan=PLAN,
        sizes={"A": 5, "B": 10, "C": 5, "D": 5, "E": 5, "F": 10},
        settings=settings,
        local_epochs=2,
    )
    prototypes, numbers = {}, set()

    def train(site, round_, network):
        known = {}
        if round_ > 1:
            for label in (0, 1):
                known[label] = clusters([one[label] for _, one in sorted(prototypes[round_ - 1].items())])
                numbers.add(len(known[label]))
        network.train()
        kept = []
        for x, y in run.batches[site, round_]:
            z = network.encoder(x).mean((2, 3))
            loss = cross_entropy(network.head[2](z), y)
            terms = []
            for feature, label in zip(z, y.tolist(), strict=True):
                if not known:
                    continue
                exponentials = {
                    k: sum((cosine_similarity(feature, c, dim=0) / TEMPERATURE).exp() for c in cs)
                    for k, cs in known.items()
                }
                contrast = -(exponentials[label] / sum(exponentials.values())).log()
                unbiased = torch.stack(known[label]).mean(0)
                terms.append(CONTRAST * contrast + CONSISTENCY * (feature - unbiased).square().sum())
            step_down(network, loss + (torch.stack(terms).mean() if terms else 0.0), 0.05)
            kept.append((z.detach(), y))
        z, y = (torch.cat(part)[-run.server.sites[site] :] for part in zip(*kept, strict=True))
        prototypes.setdefault(round_, {})[site] = [z[y == label].mean(0) for label in (0, 1)]

    assert_models(run, federated_averaging(run, train), atol=5e-6)
    assert max(numbers) > 1
