"""RandAugment in a federation: operations on training images, and none at test."""

import math

import numpy as np
import pytest
import torch
from monai.utils import CommonKeys as Keys
from reference import UNEVEN, assert_models, assert_tested, descend, federated_averaging, pixels
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.methods import build_methods
from medfedaug.methods.base import SiteContext
from medfedaug.research.methods.randaugment import (
    _FLIPS,
    _GEOMETRIC,
    _INTENSITY,
    RandAugment,
    RandomOperations,
)
from medfedaug.tasks import ClassificationTask, SegmentationTask

EVERYTHING = (*_GEOMETRIC, *_FLIPS, *_INTENSITY)


@pytest.mark.parametrize("number", [1, 2])
def test_training_images_pass_as_many_operations_as_asked_for(federate, number):
    settings = {"randaugment": {"num_ops": number, "operations": ["flip_x", "flip_y"]}}
    run = federate("randaugment", plan=UNEVEN, settings=settings, local_epochs=2)
    result = set()
    for (site, _), batches in run.batches.items():
        images = pixels(run, site) / 255
        once = (images.flip(2), images.flip(3))
        result |= set(batches.assert_images(*(once if number == 1 else (images, images.flip(2, 3)))))
    assert result == {0, 1}

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    for site in "ABC":
        model = rounds[run.server.selected_round - 1].model
        assert_tested(run, site, model, lambda images: images / 255)


@pytest.mark.parametrize("dense", [True, False])
def test_randaugment_moves_labels_where_pixels_have_them(dense):
    task = SegmentationTask(2) if dense else ClassificationTask(["a", "b"], scale=True)
    part = RandAugment(2, 9.0, ["flip_x", "rotate"]).at_site(SiteContext("A", nn.Identity(), task=task))
    assert part.transforms(training=False) == ()
    (transform,) = part.transforms(training=True)
    transform.set_random_state(0)
    label = (torch.rand(1, 8, 8) * 3).to(torch.uint8) if dense else torch.tensor(1)
    out = transform({Keys.IMAGE: torch.rand(1, 8, 8), Keys.LABEL: label})
    assert torch.equal(torch.as_tensor(out[Keys.LABEL]), label) is not dense


def image(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def operations(*args, dense=False):
    return RandomOperations(RandAugment(*args), dense)


def changed(transform, x):
    return transform({Keys.IMAGE: x})[Keys.IMAGE]


def one(name, magnitude=10.0, sign=1.0):
    """A transform that does one operation in one direction."""
    transform = operations(1, magnitude, [name])
    transform.set_random_state(next(s for s in range(99) if direction(s) == sign))
    return transform


def direction(seed):
    transform = operations(1, 10.0, ["rotate"]).set_random_state(seed)
    transform.randomize()
    return transform._drawn[0][1]


def sampled(x, place):
    """The value nearest to where each pixel of the result comes from, zero outside, in float64."""
    height, width = x.shape
    centre = np.array([(height - 1) / 2, (width - 1) / 2])
    out = np.zeros_like(x)
    for i in range(height):
        for j in range(width):
            a, b = np.round(place @ (np.array([i, j]) - centre) + centre).astype(int)
            if 0 <= a < height and 0 <= b < width:
                out[i, j] = x[a, b]
    return out


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", ["rotate", "shear_x", "shear_y", "zoom"])
def test_what_moves_pixels_moves_a_label_map_to_the_nearest(name, sign):
    m, angle = 0.7 * sign, 0.7 * sign * math.pi / 6
    matrix = {
        "rotate": [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]],
        "shear_x": [[1, 0.3 * m], [0, 1]],
        "shear_y": [[1, 0], [0.3 * m, 1]],
        "zoom": np.eye(2) * 1.5**-m,
    }[name]
    label = torch.arange(1, 12 * 9 + 1).reshape(1, 12, 9)
    transform = one(name, 7.0, sign)
    transform.randomize()
    result = transform.label(label)
    assert result.dtype == label.dtype
    expected = sampled(label[0].numpy(), np.asarray(matrix))
    # Rounding at half a pixel goes either way.
    assert float((result[0].numpy() == expected).mean()) > 0.97


@pytest.mark.parametrize("sign", [1, -1])
def test_translations_are_a_share_of_the_size(sign):
    x = image(1, 20, 20)
    for name, axis in (("translate_x", 1), ("translate_y", 2)):
        result = changed(one(name, 10.0, sign), x)
        expected = torch.roll(x, -9 * sign, dims=axis)
        lost = slice(20 - 9, None) if sign > 0 else slice(0, 9)
        expected[(slice(None), lost) if axis == 1 else (..., lost)] = 0
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_operations_on_intensities_are_what_the_table_says(sign):
    x = image(2, 9, 7) * 3 - 1
    low, high = float(x.min()), float(x.max())
    unit = (x.double() - low) / (high - low)
    for name, expected in {
        "identity": unit,
        "gamma": unit ** (2.5 ** (0.8 * sign)),
        "brightness": unit + 0.3 * 0.8 * sign,
        "contrast": ((unit - unit.mean()) * (1 + 0.9 * 0.8 * sign) + unit.mean()).clamp(0, 1),
        "posterize": (unit * 2**5).floor().clamp_max(2**5 - 1) / 2**5,
    }.items():
        result = changed(one(name, 8.0, sign), x).double()
        torch.testing.assert_close((result - low) / (high - low), expected, atol=1e-4, rtol=0, msg=name)


def test_noise_and_smoothing_have_the_widths_of_the_table():
    flat = torch.zeros(1, 101, 101)
    flat[0, 0, 0], flat[0, 0, 1] = 0.0, 2.0  # the range
    noise = changed(one("noise", 5.0), flat) - flat
    assert float(noise.std()) == pytest.approx(0.5 * 0.1 * 2.0, rel=0.03)
    point = torch.zeros(1, 41, 41)
    point[0, 20, 20] = 1.0
    smooth = changed(one("smooth", 10.0), point)[0].double()
    offsets = torch.arange(41, dtype=torch.float64) - 20
    # Pixels have a width, which adds the variance of a box.
    assert float((smooth.sum(1) * offsets**2).sum().sqrt()) == pytest.approx(1.5, rel=0.1)
    sharp = changed(one("sharpen", 10.0), point)[0]
    assert float(sharp[20, 20]) > float(sharp[20, 22].abs())
    assert float(sharp[20, 23]) < 0  # an unsharp mask overshoots


def test_equalising_and_histogram_shifts_keep_the_range():
    x = image(1, 40, 40) ** 2 * 5 - 2
    equal = changed(one("equalize"), x)
    assert float(equal.min()) >= float(x.min()) - 1e-4
    assert float(equal.max()) == pytest.approx(float(x.max()), abs=1e-4)
    counts = torch.histc(equal, 4)
    assert float(counts.max()) < 1.3 * 400
    assert float(torch.histc(x, 4).max()) > 1.5 * 400
    shifted = changed(one("histogram_shift"), x)
    assert float(shifted.min()) == pytest.approx(float(x.min()), abs=1e-4)
    order = x.flatten().argsort()
    assert bool((shifted.flatten()[order].diff() >= -1e-5).all())
    assert not torch.allclose(shifted, x)


@pytest.mark.parametrize("name", EVERYTHING)
def test_without_magnitude_nothing_happens_and_constant_images_are_no_trouble(name):
    x = image(3, 8, 6)
    assert torch.equal(changed(operations(3, 0.0, [name]), x), x)
    for constant in (torch.zeros(1, 8, 6), torch.full((1, 8, 6), 4.0)):
        result = changed(operations(2, 9.0, [name]).set_random_state(0), constant)
        assert bool(torch.isfinite(result).all())
    assert torch.equal(changed(operations(0, 9.0, [name]), x), x)


@pytest.mark.parametrize("name", EVERYTHING)
def test_labels_follow_what_moves_pixels_and_nothing_else(name):
    x = image(1, 16, 12)
    label = (image(1, 16, 12, seed=1) * 3).to(torch.uint8)
    before = x.clone(), label.clone()
    transform = operations(1, 6.0, [name], dense=True).set_random_state(3)
    out = transform({"image": x, "label": label})
    assert out["label"].dtype == torch.uint8
    assert set(out["label"].unique().tolist()) <= {0, 1, 2}
    if name in _INTENSITY:
        assert torch.equal(out["label"], label)
    else:
        assert torch.equal(out["label"], transform.label(label))
        assert not torch.equal(out["label"], label)
        # A label map as an image lands, up to the interpolation, where the label map itself does.
        as_image = transform.image(label.float())
        near = (as_image - out["label"]).abs() <= 1
        assert float(near.float().mean()) > 0.8
    assert torch.equal(x, before[0])
    assert torch.equal(label, before[1])


def test_draws_come_from_the_random_state():
    x = image(1, 12, 12)
    transform = operations(3).set_random_state(5)
    state = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = [changed(transform, x) for _ in range(5)]
    assert torch.equal(transform.image(x), first[-1])  # noise included
    transform.set_random_state(5)
    assert all(torch.equal(changed(transform, x), y) for y in first)
    assert torch.equal(state[0], torch.get_rng_state())
    assert np.array_equal(state[1], np.random.get_state()[1])
    assert set(RandAugment().operations) == set(EVERYTHING) - set(_FLIPS)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"operations": ["blur"]}, "randaugment: operation 'blur' is not known; choose from rotate"),
        ({"operations": []}, "operations .* at least 1 item"),
        ({"operations": "rotate"}, "operations"),
        ({"num_ops": -1}, "num_ops"),
        ({"magnitude": 11}, "magnitude"),
    ],
)
def test_arguments_out_of_range_are_refused(wrong, says):
    with pytest.raises(ConfigError, match=says):
        build_methods([{"name": "randaugment", "args": wrong}])
