"""Measures of an image against images whose measures are known."""

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from medfedaug.runs.prediction.input_drift import image_measures


def noise(*shape):
    return torch.as_tensor(np.random.default_rng(0).normal(size=shape), dtype=torch.float32)


def test_quantiles_are_those_of_the_image():
    measures = image_measures(torch.arange(101.0).reshape(1, 1, 101))
    assert [measures[f"intensity {level}%"] for level in (5, 50, 95)] == [5, 50, 95]


def test_white_noise_has_the_noise_of_its_contrast():
    assert image_measures(noise(1, 200, 200))["noise"] == pytest.approx(1, rel=0.05)


def test_a_smooth_image_has_no_noise():
    ramp = torch.linspace(0, 1, 64)
    assert image_measures((ramp[:, None] * ramp)[None])["noise"] < 1e-3


def test_blur_lowers_the_sharpness():
    image = noise(1, 64, 64)
    blurred = torch.as_tensor(gaussian_filter(image.numpy(), (0, 1, 1)))
    assert image_measures(blurred)["sharpness"] < 0.7 * image_measures(image)["sharpness"]


@pytest.mark.parametrize("name", ["noise", "sharpness"])
def test_another_unit_changes_neither_noise_nor_sharpness(name):
    image = noise(1, 32, 32, 3)
    assert image_measures(1000 * image + 50)[name] == pytest.approx(image_measures(image)[name], rel=1e-3)


def test_extents_are_along_the_axes_of_the_patient():
    affine = [[0, 0, -3, 0], [2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
    measures = image_measures(noise(1, 10, 20, 5), affine)
    extents = [measures[f"field of view, {axis}"] for axis in ("left-right", "front-back", "head-foot")]
    assert extents == [15, 20, 20]


def test_without_an_affine_extents_are_pixels():
    assert image_measures(noise(1, 10, 20))["pixels, axis 2"] == 20


def test_channels_have_measures_of_their_own():
    assert "FLAIR: noise" in image_measures(noise(2, 8, 8, 2), None, ("T1", "FLAIR"))


def test_an_image_of_two_pixels_can_be_measured():
    assert image_measures(noise(1, 1, 2))["noise"] == 0
