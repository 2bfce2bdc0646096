"""The layout of a network's weights."""

import pytest
import torch
from torch import nn

from medfedaug.models import build_network
from medfedaug.models.execution import lay_out, norm_of

NORMS = {"batch": "batch", "instance": "instance", "group": ("group", {"num_groups": 2})}


def is_last(network):
    weight = max((p for p in network.parameters() if p.ndim > 3), key=lambda p: p.shape[1])
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}[weight.ndim]
    return weight.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("norm", NORMS)
def test_a_network_has_the_faster_layout_of_its_norm(norm, dimensions):
    features = (4, 4, 4, 4, 4, 4)
    network = build_network("basicunet", spatial_dims=dimensions, features=features, norm=NORMS[norm])
    assert norm_of(network) == norm
    assert is_last(lay_out(network)) == (dimensions == 2 and norm != "instance")


def test_features_follow_the_weights():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    images = torch.rand(2, 2, 8, 8)
    assert not network(images).is_contiguous(memory_format=torch.channels_last)
    assert lay_out(network)(images).is_contiguous(memory_format=torch.channels_last)


def test_what_was_not_measured_keeps_its_own_layout():
    own = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)).to(memory_format=torch.channels_last)
    assert is_last(lay_out(own.to("meta")))
    assert not is_last(lay_out(nn.Sequential(nn.Conv2d(2, 2, 3)).to("meta")))
    lay_out(nn.Linear(2, 2))
