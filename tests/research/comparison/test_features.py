"""Feature metrics against the double loop over pairs, feature extraction and the pictures."""

import math

import pytest
import torch
from monai.networks.nets import BasicUNet

import medfedaug.research.comparison.features as module
from medfedaug.models import build_network, insert_ffa
from medfedaug.research.comparison import alignment, feature_picture, site_features, uniformity


def pairs(z):
    unit = [[v / math.sqrt(sum(w * w for w in row)) for v in row] for row in z.double().tolist()]
    for i in range(len(unit)):
        for j in range(i):
            yield i, j, math.sqrt(sum((a - b) ** 2 for a, b in zip(unit[i], unit[j], strict=True)))


@pytest.fixture(params=[2**20, 1, 50])
def blocks(request, monkeypatch):
    """One block, one row a block, and blocks that do not divide the number of features."""
    monkeypatch.setattr(module, "_BLOCK_ENTRIES", request.param)


@pytest.mark.parametrize("alpha", [1.0, 2.0, 3.0])
def test_alignment_is_the_mean_over_pairs_of_a_class(blocks, alpha):
    torch.manual_seed(0)
    z, y = torch.randn(23, 5), torch.randint(0, 4, (23,))
    expected = [d**alpha for i, j, d in pairs(z) if y[i] == y[j]]
    assert alignment(z, y, alpha) == pytest.approx(sum(expected) / len(expected), rel=1e-12)


@pytest.mark.parametrize("t", [0.5, 2.0])
def test_uniformity_is_the_log_of_the_mean_potential(blocks, t):
    torch.manual_seed(1)
    z = torch.randn(23, 5)
    potentials = [math.exp(-t * d * d) for _, _, d in pairs(z)]
    assert uniformity(z, t) == pytest.approx(math.log(sum(potentials) / len(potentials)), rel=1e-12)


def test_known_values():
    same = torch.ones(6, 4)
    assert alignment(same, torch.zeros(6)) == 0.0
    assert uniformity(same) == 0.0
    cross = torch.tensor([[1.0, 0], [-1, 0], [0, 1], [0, -1]])
    # Two pairs at distance 2, four at the square root of 2.
    assert uniformity(cross) == pytest.approx(math.log((2 * math.exp(-8) + 4 * math.exp(-4)) / 6))
    assert alignment(cross, torch.tensor([0, 0, 1, 1])) == pytest.approx(4.0)
    assert uniformity(cross, t=1e6) == pytest.approx(-2e6 + math.log(4 / 6))  # exp alone would give log(0)


def test_site_features_are_the_pooled_output_of_the_stage():
    torch.manual_seed(0)
    network = build_network("lenet5", in_channels=1, out_channels=3).train()
    network.head.eval()
    images = torch.rand(5, 1, 32, 32)
    found = site_features(network, [images[:3], images[3:]])
    assert network.training
    assert not network.head.training
    assert not network.encoder[-1]._forward_hooks
    network.eval()
    torch.testing.assert_close(found, network.encoder(images).mean(dim=(2, 3)).detach())
    first = site_features(network, [images], stage=1)
    torch.testing.assert_close(first, network.encoder[0](images).mean(dim=(2, 3)).detach())
    assert torch.equal(first, site_features(network, [images], stage="enc1"))


@pytest.mark.parametrize("dims", [2, 3])
def test_site_features_of_a_segmentation_network(dims):
    torch.manual_seed(0)
    network = BasicUNet(dims, 1, 2, (4, 4, 8, 8, 16, 4), norm="batch").eval()
    images = torch.rand(2, 1, *[32] * dims)
    plain = site_features(network, [images])
    assert plain.shape == (2, 16)
    assert torch.equal(site_features(insert_ffa(network, prob=1.0).train(), [images]), plain)


def test_picture_shows_the_principal_components():
    torch.manual_seed(0)
    z = torch.randn(40, 6, dtype=torch.float64) * torch.tensor([5.0, 3, 1, 1, 1, 1], dtype=torch.float64)
    sites, labels = ["A", "B"] * 20, torch.arange(40) // 20
    figure = feature_picture(z, sites, labels)
    (panel,) = figure.axes
    drawn = torch.cat([torch.as_tensor(c.get_offsets().data) for c in panel.collections])
    centred = z - z.mean(dim=0)
    eigenvalues, vectors = torch.linalg.eigh(centred.T @ centred)
    expected = centred @ vectors.flip(1)[:, :2]
    # Every drawn point is one of the expected ones, up to the components' signs.
    distance = (drawn.abs()[:, None] - expected.abs()).norm(dim=2)
    assert float(distance.min(dim=1).values.max()) < 1e-9
    assert len(drawn) == 40
    share = float(eigenvalues[-1] / eigenvalues.sum())
    assert panel.get_xlabel() == f"component 1 ({share:.0%})"
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["A", "B", "0", "1"]
