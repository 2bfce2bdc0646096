"""Amplitudes and phases of an image's Fourier transform (HarmoFL)."""

import torch
from torch import Tensor

from medfedaug.functional.passes import working_precision


def amplitude_spectrum(x: Tensor) -> Tensor:
    """The amplitudes of an image's Fourier transform (HarmoFL, "amplitude normalization").

    ::

        A(u, v) = |F(u, v)|,   F(u, v) = Σ_(h,w) x(h, w) e^(−2πi(hu/H+wv/W))

    of each channel. The transform of real numbers is symmetric, so that half of it is enough.

    Args:
        x: an image (C, H, W), or a volume (C, H, W, D) of slices along its last axis.

    Returns:
        (C, H, W // 2 + 1), or (C, H, W // 2 + 1, D).

    Raises:
        ValueError: for another number of dimensions.

    Example:
        >>> amplitude_spectrum(torch.tensor([[[1.0, 2.0, 3.0]]])).shape
        torch.Size([1, 1, 2])
        >>> float(amplitude_spectrum(torch.tensor([[[1.0, 2.0, 3.0]]]))[0, 0, 0])
        6.0
    """
    x = working_precision(x)
    return _spectrum(x).abs().to(x.dtype)


def normalise_amplitude(x: Tensor, amplitude: Tensor) -> Tensor:
    """An image with other amplitudes and its own phases (HarmoFL, "amplitude normalization").

    ::

        Ψ(x) = F⁻¹(Ā e^(iP)),   P = arg F(x)

    Args:
        x: an image (C, H, W), or a volume (C, H, W, D) of slices along its last axis.
        amplitude: Ā as `amplitude_spectrum` gives it for an image, (C, H, W // 2 + 1).

    Returns:
        The image, of the shape of `x`.

    Raises:
        ValueError: when the amplitudes belong to images of another size (names both).

    Deviations:
        A frequency whose amplitude is zero in an image has no phase, and stays zero: with a phase of zero, a
        slice without content would get one bright pixel. Computed in float64, which tells zero from small.

    Example:
        >>> x = torch.tensor([[[1.0, 2.0, 3.0]]])
        >>> [round(v, 4) for v in normalise_amplitude(x, 2 * amplitude_spectrum(x)).flatten().tolist()]
        [2.0, 4.0, 6.0]
    """
    work = working_precision(x)
    expected = (x.shape[0], x.shape[1], x.shape[2] // 2 + 1) if x.dim() in (3, 4) else ()
    if amplitude.shape != expected:
        raise ValueError(
            f"amplitudes of shape {tuple(amplitude.shape)} do not belong to an image of shape "
            f"{tuple(x.shape)}: they are (C, H, W // 2 + 1), and all images must have one size"
        )
    spectrum = _spectrum(work)
    own = spectrum.abs()
    present = own > 1e-12 * own.amax(dim=(1, 2), keepdim=True)
    phase = spectrum / torch.where(present, own, torch.ones_like(own))
    target = amplitude.to(own)[..., None] if x.dim() == 4 else amplitude.to(own)
    replaced = target * torch.where(present, phase, torch.zeros_like(phase))
    size = (x.shape[1], x.shape[2])
    image: Tensor = torch.fft.irfft2(replaced, s=size, dim=(1, 2)).to(x.dtype)
    return image


def _spectrum(x: Tensor) -> Tensor:
    if x.dim() not in (3, 4):
        raise ValueError(f"expected an image (C, H, W) or slices (C, H, W, D), got {list(x.shape)}")
    spectrum: Tensor = torch.fft.rfft2(x.double(), dim=(1, 2))
    return spectrum
