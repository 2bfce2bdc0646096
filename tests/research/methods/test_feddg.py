"""FedDG (ELCFS) against Liu et al., CVPR 2021: counterparts, episodes and the boundary loss."""

import numpy as np
import pytest
import torch
from reference import SEGMENTING_OPTIONS, UNEVEN, assert_models, federated_averaging, images_of
from running import TINY_NETWORK
from scipy import ndimage
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from medfedaug.data.sites import find_sites, open_site
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation import run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.methods import parse_methods
from medfedaug.methods.base import SiteContext, Step
from medfedaug.research.methods.feddg import FedDG, boundary_features, class_contrast
from medfedaug.simulate import configure

SIDE, BAND, BETA, GAMMA, TAU = 32, 0.1, 0.5, 0.3, 0.2
REACH = 3


@pytest.fixture
def pictures(make_regions):
    """Three sites of three to five pictures to train on, of three classes."""
    for name, training in zip("ABC", (3, 4, 5), strict=True):
        root = make_regions(name, training, SIDE).parent
    return root


def amplitudes(images):
    """|F| / HW of the low frequencies, u from -r on."""
    spectrum = np.abs(np.fft.fft2(images.numpy())) / SIDE**2
    rows = np.arange(-REACH, REACH + 1) % SIDE
    return torch.from_numpy(spectrum[:, :, rows][..., : REACH + 1])


def interpolated(image, bank, share):
    """The whole of FedDG's interpolation, of one image (C, H, W)."""
    spectrum = np.fft.fft2(image.numpy())
    amplitude, phase = np.abs(spectrum), np.angle(spectrum)
    for u in range(-REACH, REACH + 1):
        for v in range(-REACH, REACH + 1):
            other = bank[:, u + REACH, v] if v >= 0 else bank[:, REACH - u, -v]
            low = (1 - share) * amplitude[:, u, v] + share * SIDE**2 * other.double().numpy()
            amplitude[:, u, v] = low
    return torch.from_numpy(np.fft.ifft2(amplitude * np.exp(1j * phase)).real)


def bands(label, number):
    """Boundary and background of a class's region, (H, W) each."""
    square, region = np.ones((3, 3)), label.numpy() == number
    inner = ndimage.binary_erosion(region, square, border_value=1)
    outer = ndimage.binary_dilation(region, square, iterations=5)
    return torch.from_numpy(region & ~inner), torch.from_numpy(outer & ~region)


def boundary_loss(passes, labels):
    """NT-Xent between the features of all images and looks, summed over the classes."""
    return contrast(passes, labels, 1) + contrast(passes, labels, 2)


def contrast(passes, labels, number):
    features = []
    for z in passes:
        for image, label in zip(z, labels, strict=True):
            if bool((label == number).any()):
                features += [
                    (kind, image[:, part].mean(dim=1)) for kind, part in enumerate(bands(label[0], number))
                ]
    if not features:
        return torch.zeros((), dtype=torch.float64)
    terms = []
    for m, (kind, h) in enumerate(features):
        s = [
            float("nan") if q == m else torch.cosine_similarity(h, other, dim=0) / TAU
            for q, (_, other) in enumerate(features)
        ]
        negative = sum(torch.exp(s[q]) for q, (other, _) in enumerate(features) if other != kind)
        terms += [
            -torch.log(torch.exp(s[p]) / (torch.exp(s[p]) + negative))
            for p, (other, _) in enumerate(features)
            if other == kind and p != m
        ]
    return torch.stack(terms).mean()


def bank_of(run, site):
    return run.sites[site].trainer.parts["feddg"].others


def test_an_episode_is_a_step_and_a_test_of_it(federate, pictures):
    settings = {"band": BAND, "beta": BETA, "gamma": GAMMA, "temperature": TAU}
    run = federate("feddg", plan=UNEVEN, folder=pictures, settings={"feddg": settings}, **SEGMENTING_OPTIONS)
    values = {}

    def train(site, round_, network):
        network.train()
        others, batches = bank_of(run, site), run.batches[site, round_]
        for (x, y), draws in zip(batches, batches.draws, strict=True):
            (place, share), seen = draws[1].double(), []
            handle = network[5].register_forward_pre_hook(lambda _, args: seen.append(args[0]))  # noqa: B023
            inner = cross_entropy(network(x), y[:, 0].long())
            statistics = [buffer.clone() for buffer in network.buffers()]
            parameters = dict(network.named_parameters())
            g = torch.autograd.grad(inner, list(parameters.values()), retain_graph=True)
            adapted = {key: p - BETA * one for (key, p), one in zip(parameters.items(), g, strict=True)}
            looks = []
            for i, image in enumerate(x):
                bank = others[int(draws[0][i])]
                looks.append(interpolated(image, bank[int(place[i] * len(bank))], float(share[i])))
            outputs = functional_call(network, adapted, (torch.stack(looks),))
            meta, boundary = cross_entropy(outputs, y[:, 0].long()), boundary_loss(seen, y)
            handle.remove()
            values.setdefault((site, round_), []).append((meta.item(), boundary.item()))
            changes = torch.autograd.grad(inner + meta + GAMMA * boundary, list(parameters.values()))
            with torch.no_grad():
                for p, change in zip(parameters.values(), changes, strict=True):
                    p -= 0.05 * change
                for buffer, value in zip(network.buffers(), statistics, strict=True):
                    buffer.copy_(value)

    assert_models(run, federated_averaging(run, train), atol=2e-6)
    metrics = run.server.rounds[0]["sites"]["B"]
    expected = np.mean(values["B", 1], axis=0)
    assert metrics["feddg/counterparts"] == pytest.approx(expected[0], rel=1e-5)
    assert metrics["feddg/boundary"] == pytest.approx(expected[1], rel=1e-5)


def test_sites_send_the_amplitudes_of_images(federate, pictures):
    options = {"network": "reference_segmenting", "augmentation": "none", "rounds": 1}
    run = federate("feddg", folder=pictures, settings={"feddg": {"band": BAND}}, **options)
    b, c = bank_of(run, "A")
    own = {
        site: amplitudes(images_of(run.batches[site, 1], count)[0]) for site, count in (("B", 4), ("C", 5))
    }
    for sent, images in ((b, own["B"]), (c, own["C"])):
        nearest = (sent.double()[:, None] - images[None]).abs().amax(dim=(2, 3, 4)).min(dim=1)
        assert float(nearest.values.max()) < 1e-6
        assert sorted(nearest.indices.tolist()) == list(range(len(images)))
    size = sum(len(open_site(pictures / site).cases["training"]) for site in "ABC")
    assert run.server.results()["bytes_up_before_training"]["feddg"] == size * 3 * 7 * 4 * 4


def test_images_of_another_size_have_other_low_frequencies(pictures, make_regions):
    make_regions("D", 2, size=64)
    values = [site for site in find_sites(pictures) if site.name in "AD"]
    methods = parse_methods("feddg", {"feddg": {"band": BAND}})
    config = configure(values, methods=methods, rounds=1, **TINY_NETWORK)
    with pytest.raises(RunFailed, match=r"6 low frequencies where site A has 3"):
        run_in_process(config, pictures, "AD", "cpu")


def test_a_site_that_knows_of_no_other_has_no_counterparts():
    network = torch.nn.Conv2d(1, 2, 1)
    site, x = FedDG().at_site(SiteContext("A", network)), torch.rand(2, 1, 8, 8)
    site.apply({"amplitudes/A": torch.rand(3, 1, 1, 1)})
    step = Step(network, x, x, network(x))
    site.after_pass(step)
    assert site.loss(step) is None


def test_a_region_without_a_boundary_has_no_loss():
    z, masks = torch.rand(3, 4, 6, 6), torch.zeros(3, 2, 12, 12)
    masks[0, 0, 3:5, 3:5] = 1
    masks[1] = 1  # everywhere
    at, around, present = boundary_features(z, masks, outside=1)
    assert present.tolist() == [[True, False], [False, False], [False, False]]
    assert torch.isfinite(at).all()
    assert torch.isfinite(around).all()
    resized = torch.nn.functional.interpolate(z, size=(12, 12), mode="bilinear")
    torch.testing.assert_close(at[0, 0], resized[0, :, 3:5, 3:5].mean(dim=(1, 2)))
    h = torch.rand(1, 4, requires_grad=True)
    assert class_contrast(h, torch.tensor([0]), 0.1).item() == 0.0
    assert class_contrast(torch.cat([h, h]), torch.tensor([1, 1]), 0.1).item() == 0.0


def test_feddg_refuses_classification(photo_config):
    with pytest.raises(ConfigError, match="feddg is defined only for segmentation"):
        Composition(photo_config("feddg"))
