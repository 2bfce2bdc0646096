"""RandConv against Xu et al., ICLR 2021: random convolutions and the consistency of predictions."""

import math

import numpy as np
import pytest
import torch
from reference import UNEVEN, assert_models, federated_averaging, step_down
from scipy import ndimage
from torch.nn.functional import cross_entropy

from medfedaug.research.methods.randconv import mix_convolution, prediction_spread

KERNELS = (1, 3, 5)


def convolved(x, weight):
    """Σ_c W_oc ⋆ x_c, channel by channel, with zeros around."""
    x, weight = x.numpy(), weight.double().numpy()
    weight = weight / math.sqrt(x.shape[1] * weight[0, 0].size)
    values = [
        [
            sum(ndimage.correlate(image[c], row[c], mode="constant") for c in range(len(image)))
            for row in weight
        ]
        for image in x
    ]
    return torch.from_numpy(np.array(values))


def versions(x, draws):
    """The versions of a batch, from what was drawn for them."""
    values, draws = [], list(draws)
    while draws:
        share, size, weight = float(draws.pop(0)), KERNELS[int(draws.pop(0))], draws.pop(0)
        assert weight.shape[2:] == (size, size)
        values.append(share * x + (1 - share) * convolved(x, weight))
    return values


@pytest.mark.parametrize("consistency", [2.0, 0.0])
def test_three_versions_of_a_batch_agree(federate, consistency):
    settings = {"consistency": consistency, "kernels": list(KERNELS)}
    run = federate("randconv", plan=UNEVEN, settings={"randconv": settings})
    spreads = {}

    def train(site, round_, network):
        network.train()
        batches = run.batches[site, round_]
        for (x, y), draws in zip(batches, batches.draws, strict=True):
            inputs = versions(x, draws)
            assert len(inputs) == (3 if consistency else 1)
            logits = [network(one) for one in inputs]
            p = [torch.exp(one) / torch.exp(one).sum(dim=1, keepdim=True) for one in logits]
            mean = sum(p) / len(p)
            spread = sum((one * torch.log(one / mean)).sum(dim=1).mean() for one in p) / len(p)
            spreads.setdefault((site, round_), []).append(spread.item())
            step_down(network, cross_entropy(logits[0], y) + consistency * spread, 0.05)

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    metrics = run.server.rounds[0]["sites"]["C"]
    if consistency:
        assert metrics["randconv/spread"] == pytest.approx(np.mean(spreads["C", 1]), rel=1e-5, abs=1e-7)
    else:
        assert "randconv/spread" not in metrics


def test_volumes_are_convolved_in_three_dimensions():
    x, weight = torch.rand(2, 2, 5, 6, 7).double(), torch.randn(2, 2, 3, 3, 3)
    expected = 0.25 * x + 0.75 * convolved(x, weight) * math.sqrt(2 * 27)
    torch.testing.assert_close(mix_convolution(x, weight, 0.25), expected)


def test_the_spread_of_label_maps_is_a_mean_over_voxels():
    maps = [torch.randn(2, 3, 4, 5).double() for _ in range(3)]
    by_voxel = [one.movedim(1, -1).reshape(-1, 3) for one in maps]
    torch.testing.assert_close(prediction_spread(maps), prediction_spread(by_voxel))
    assert prediction_spread([maps[0]] * 3).item() == pytest.approx(0, abs=1e-12)
