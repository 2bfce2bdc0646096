"""RSC against Huang et al., ECCV 2020."""

import pytest
import torch
from reference import UNEVEN, assert_steps
from torch import nn
from torch.nn.functional import cross_entropy

from medfedaug.errors import ConfigError
from medfedaug.methods.base import SiteContext
from medfedaug.research.methods.rsc import RSC


def test_the_features_that_speak_most_for_the_label_are_muted(federate):
    run = federate("rsc", plan=UNEVEN, settings={"rsc": {"features": 0.4}})
    muted = []

    def step(network, x, y, draws):
        z, kept = network.encoder(x).mean((2, 3)), []
        head = network.head[2]
        (gradient,) = torch.autograd.grad(head(z).gather(1, y[:, None]).sum(), z, retain_graph=True)
        for row in gradient:
            kept.append(row < torch.quantile(row, 0.6))
        kept = torch.stack(kept)
        falls = [
            (torch.softmax(head(a), 0)[label] - torch.softmax(head(a * m), 0)[label]).detach()
            for a, m, label in zip(z, kept, y, strict=True)
        ]
        most = torch.quantile(torch.stack(falls), 2 / 3)
        kept = torch.stack([m if fall >= most else m | True for m, fall in zip(kept, falls, strict=True)])
        muted.append(int((~kept).sum()))
        return cross_entropy(head(z * kept), y)

    assert_steps(run, step)
    assert min(muted) > 0


def test_shares_that_cannot_be_and_networks_without_a_last_layer_are_refused(federate):
    assert type(RSC(features=0).at_site(None)).__name__ == "SitePart"
    context = SiteContext("A", nn.Sequential(nn.Conv2d(3, 2, 1)))
    with pytest.raises(ConfigError, match="rsc"):
        RSC().at_site(context)
