"""FedMix against Yoon et al., ICLR 2021, Proposition 1."""

from __future__ import annotations

import torch
from reference import UNEVEN, assert_steps
from torch.nn.functional import cross_entropy


def test_the_loss_is_the_first_order_of_mixing_with_other_sites_means(federate):
    share = 0.2
    settings = {"fedmix": {"mixing": share, "group": 3}}
    run = federate(
        "fedmix", plan=UNEVEN, settings=settings, network="reference_convolutional", local_epochs=2
    )
    sent = run.requests[1].once
    means = [
        (image.double(), label.double())
        for site in "ABC"
        for image, label in zip(sent[f"fedmix/images/{site}"], sent[f"fedmix/labels/{site}"], strict=True)
    ]
    assert len(means) == 2 + 4 + 6
    # A group's mean is one of the site's own images: together they are the mean of all of them.
    for site, count in run.server.sites.items():
        images = torch.cat([x for x, _ in run.batches[site, 1]])[:count]
        own = sent[f"fedmix/images/{site}"].double()
        torch.testing.assert_close(own.mean(0), images.mean(0), rtol=1e-5, atol=1e-6)

    def step(network, x, y, draws):
        image, label = means[int(draws[0])]
        inputs = ((1 - share) * x).requires_grad_()
        out = network(inputs)
        own = cross_entropy(out, y)
        (slope,) = torch.autograd.grad(own, inputs, create_graph=True)
        other = cross_entropy(out, label.expand(len(y), -1))
        return (1 - share) * own + share * other + share * (slope * image).sum()

    assert_steps(run, step)
