"""FedMix against Yoon et al., ICLR 2021, Proposition 1."""

import pytest
import torch
from reference import SEGMENTING_OPTIONS, UNEVEN, Points, assert_steps
from torch import nn
from torch.nn.functional import cross_entropy

from medfedaug.errors import DataError
from medfedaug.federation.messages.tensor_checks import check_tensors
from medfedaug.methods.base import ServerContext, SiteContext
from medfedaug.research.methods.fedmix import FedMix


@pytest.mark.parametrize("dense", [False, True], ids=["photographs", "label maps"])
def test_the_loss_is_the_first_order_of_mixing_with_other_sites_means(federate, make_regions, dense):
    share, options = 0.2, {"local_epochs": 2}
    if dense:
        folders = [make_regions(name, n, 8) for name, n in zip("ABC", (3, 4, 5), strict=True)]
        options = {"folder": folders[0].parent, **SEGMENTING_OPTIONS}
    settings = {"fedmix": {"mixing": share, "group": 2 if dense else 3}}
    run = federate("fedmix", plan=UNEVEN, settings=settings, **options)
    sent = run.requests[1].once
    means = [
        (image.double(), label.double())
        for site in "ABC"
        for image, label in zip(sent[f"fedmix/images/{site}"], sent[f"fedmix/labels/{site}"], strict=True)
    ]
    assert {len(label) for _, label in means} == {3 if dense else 2}
    assert any(float(label[-1].max()) > 0 for _, label in means)

    def step(network, x, y, draws):
        image, label = means[int(draws[0])]
        inputs, y = ((1 - share) * x).requires_grad_(), y[:, 0].long() if dense else y
        out = network(inputs)
        own = cross_entropy(out, y)
        (slope,) = torch.autograd.grad(own, inputs, create_graph=True)
        other = cross_entropy(out, label.expand(len(y), *label.shape))
        return (1 - share) * own + share * other + share * (slope * image).sum()

    assert_steps(run, step)


def fedmix_sites(counts, group=5, mixing=0.1, size=(2, 3)):
    torch.manual_seed(0)
    sites = {}
    for name, count in counts.items():
        images, labels = torch.rand(count, 1, *size), torch.randint(3, (count,))
        network = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        context = SiteContext(
            name,
            network,
            num_samples=lambda n=count: n,
            training_batches=lambda x=images, y=labels: zip(x.split(4), y.split(4), strict=True),
            task=Points(),
        )
        part = FedMix(mixing, group).at_site(context)
        sites[name] = (images, labels, network, part)
    return sites


def test_fedmix_sends_means_of_groups_that_cover_the_site():
    sites = fedmix_sites({"A": 13, "B": 5}, group=5)
    server = FedMix().before_training(ServerContext(nn.Identity(), 1, task=Points()))
    for name, (images, labels, _, part) in sites.items():
        payload = part.before_training.collect()
        groups = len(images) // 5
        assert payload["images"].shape == (groups, 1, 2, 3)
        assert payload["labels"].shape == (groups, 3)
        check_tensors(name, payload, server.shapes)
        server.check(payload)
        server.accept(name, payload)
        # 13 images in two groups of 7 and 6: whichever they are, together they are all.
        sizes = torch.tensor([7.0, 6.0] if groups == 2 else [5.0])
        total = (payload["images"] * sizes[:, None, None, None]).sum(0)
        torch.testing.assert_close(total, images.sum(0))
        counts = (payload["labels"] * sizes[:, None]).sum(0)
        torch.testing.assert_close(counts, labels.bincount(minlength=3).float())
    for *_, part in sites.values():
        part.before_training.apply(server.result())
        assert len(part.means) == 3


def test_fedmix_refuses_invalid_means_and_sites_with_too_few_samples():
    server = FedMix().before_training(ServerContext(nn.Identity(), 1, task=Points()))
    images, labels = torch.rand(2, 1, 4, 4), torch.full((2, 3), 1 / 3)
    server.check({"images": images, "labels": labels})
    for wrong in ({"labels": labels[:1]}, {"labels": labels * 2}, {"labels": labels - 0.5}):
        with pytest.raises(ValueError, match="labels"):
            server.check({"images": images, "labels": labels, **wrong})
    with pytest.raises(DataError, match=r"site A.*4 training samples.*means of 5"):
        fedmix_sites({"A": 4})["A"][3].collect()
    sites = fedmix_sites({"A": 6, "B": 5})
    part = sites["A"][3]
    part.means = [(torch.rand(1, 4, 4), torch.rand(3))]
    with pytest.raises(DataError, match=r"site A.*shape \(1, 2, 3\) and \(1, 4, 4\)"):
        part.mix(sites["A"][0], [(1.0, sites["A"][1])])
