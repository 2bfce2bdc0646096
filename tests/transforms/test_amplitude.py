"""Amplitude normalisation: the equation, and MONAI's conventions."""

import json
import pickle

import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from monai.data import MetaTensor, set_track_meta

from medfedaug import functional as F
from medfedaug.transforms import NormalizeAmplitude, NormalizeAmplituded, NormalizeAmplitudeDict


def images(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def harmonised(x, others):
    """HarmoFL's amplitude normalisation with whole transforms in float64, a channel at a time."""
    out = np.empty_like(x)
    for c in range(len(x)):
        average = np.mean([np.abs(np.fft.fft2(other[c])) for other in others], axis=0)
        own = np.fft.fft2(x[c])
        out[c] = np.real(np.fft.ifft2(average * np.exp(1j * np.angle(own))))
    return out


@pytest.mark.parametrize("size", [(8, 6), (7, 5), (5, 8), (1, 4), (1, 1)])
def test_it_is_the_equation(size):
    x, others = images(2, *size), images(3, 2, *size, seed=1)
    mean = torch.stack([F.amplitude_spectrum(other) for other in others]).mean(0)
    assert mean.shape == (2, size[0], size[1] // 2 + 1)
    expected = harmonised(x.numpy(), others.numpy())
    np.testing.assert_allclose(F.normalise_amplitude(x, mean).numpy(), expected, atol=1e-12)
    transform = NormalizeAmplitude(mean)
    np.testing.assert_allclose(transform(x.float()).numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_volume_is_its_slices():
    volume, mean = images(2, 6, 5, 3), F.amplitude_spectrum(images(2, 6, 5, seed=1))
    result = F.normalise_amplitude(volume, mean)
    amplitudes = F.amplitude_spectrum(volume)
    for i in range(3):
        torch.testing.assert_close(result[..., i], F.normalise_amplitude(volume[..., i], mean))
        torch.testing.assert_close(amplitudes[..., i], F.amplitude_spectrum(volume[..., i]))


def test_an_image_with_its_own_amplitudes_is_itself():
    for x in (images(2, 6, 5), images(1, 9, 9)):
        torch.testing.assert_close(F.normalise_amplitude(x, F.amplitude_spectrum(x)), x)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_a_slice_without_content_stays_without(value):
    mean = F.amplitude_spectrum(images(1, 6, 5))
    result = F.normalise_amplitude(torch.full((1, 6, 5), value), mean)
    expected = float(mean[0, 0, 0]) / 30 if value else 0.0
    torch.testing.assert_close(result, torch.full((1, 6, 5), expected))


def test_the_size_must_be_that_of_the_amplitudes():
    transform = NormalizeAmplitude(F.amplitude_spectrum(images(2, 6, 5)))
    for shape in ((2, 6, 7), (2, 5, 6), (1, 6, 5), (6, 5)):
        with pytest.raises(ValueError, match=r"do not belong to an image of shape \("):
            transform(torch.ones(shape))
    for wrong, match in (
        ([[1.0]], "got shape"),
        ([[[-1.0]]], "from 0 on"),
        ([[[float("nan")]]], "from 0 on"),
    ):
        with pytest.raises(ValueError, match=match):
            NormalizeAmplitude(wrong)


def test_monais_conventions():
    x, mean = images(1, 4, 4).float(), F.amplitude_spectrum(images(1, 4, 4, seed=1))
    before = x.clone()
    image = MetaTensor(x, meta={"filename_or_obj": "1.nii.gz"})
    configured = {"_target_": "medfedaug.transforms.NormalizeAmplituded", "keys": "image"}
    configured["amplitude"] = mean.tolist()
    for transform in (
        NormalizeAmplituded("image", mean.tolist()),
        pickle.loads(pickle.dumps(NormalizeAmplitudeDict("image", mean.numpy()))),
        ConfigParser({"t": json.loads(json.dumps(configured))}).get_parsed_content("t"),
    ):
        out = transform({"image": image, "label": 1})
        assert isinstance(out["image"], MetaTensor)
        assert out["image"].meta["filename_or_obj"] == "1.nii.gz"
        assert out["image"].dtype == torch.float32
        np.testing.assert_allclose(
            out["image"].numpy(), harmonised(x.double().numpy(), [images(1, 4, 4, seed=1).numpy()]), atol=1e-6
        )
        assert torch.equal(x, before)
    with pytest.raises(KeyError):
        transform({"label": 1})
    assert NormalizeAmplituded("image", mean, allow_missing_keys=True)({"label": 1}) == {"label": 1}
    numbers = NormalizeAmplitude(mean)((x.numpy() * 255).astype(np.uint8))
    assert numbers.dtype == torch.float32
    try:
        set_track_meta(False)
        assert type(NormalizeAmplitude(mean)(x)) is torch.Tensor
    finally:
        set_track_meta(True)
