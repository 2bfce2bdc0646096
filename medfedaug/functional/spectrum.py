"""Amplitudes and phases of an image's Fourier transform (HarmoFL, FedDG)."""

import math

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


def low_amplitudes(x: Tensor, band: float) -> Tensor:
    """The amplitudes of the low frequencies of images (FedDG, "continuous frequency space interpolation").

    ::

        A(u, v) = |F(u, v)| / (HW),   −r ≤ u ≤ r, 0 ≤ v ≤ r,   r = ⌊band · min(H, W)⌋

    with F as in `amplitude_spectrum`; the other half follows by symmetry. The factor makes the first, u = v =
    0, the mean of the image, whatever its size.

    Args:
        x: images (B, C, H, W).
        band: from 0, the mean alone, to below 0.5, nearly everything.

    Returns:
        (B, C, 2r + 1, r + 1), float64; u from -r on.

    Example:
        >>> low_amplitudes(torch.tensor([[[[1.0, 2.0, 3.0]]]]), 0)
        tensor([[[[2.]]]], dtype=torch.float64)
    """
    rows, columns = _low(x, band)
    spectrum = torch.fft.rfft2(working_precision(x).double(), norm="forward")
    amplitudes: Tensor = spectrum[:, :, rows[:, None], columns].abs()
    return amplitudes


def mix_low_amplitudes(x: Tensor, amplitudes: Tensor, share: Tensor, band: float) -> Tensor:
    """Images whose low frequencies are between their own and other amplitudes (FedDG).

    ::

        x′ = F⁻¹(((1 − λ) A + λ A′) e^(iP)),   A = |F(x)|, P = arg F(x)

    at the frequencies of `low_amplitudes`; the others stay as they are.

    Args:
        x: images (B, C, H, W).
        amplitudes: A' of each, as `low_amplitudes` gives them, (B, C, 2r + 1, r + 1).
        share: λ of each image, (B,).
        band: as for `low_amplitudes`.

    Returns:
        The images, of the shape of `x`.

    Raises:
        ValueError: when the amplitudes have another number of frequencies (names both).

    Deviations:
        A frequency whose amplitude is zero in an image has no phase, and stays zero.

    Example:
        >>> x, other = torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[4.0]]]])
        >>> mix_low_amplitudes(x, other, torch.tensor([0.5]), 0)
        tensor([[[[2., 3., 4.]]]])
    """
    rows, columns = _low(x, band)
    expected = (*x.shape[:2], len(rows), len(columns))
    if amplitudes.shape != expected:
        raise ValueError(
            f"amplitudes of shape {tuple(amplitudes.shape)} where {expected} are needed: images of other "
            "sizes have other low frequencies"
        )
    spectrum = torch.fft.rfft2(working_precision(x).double(), norm="forward")
    low = spectrum[:, :, rows[:, None], columns]
    own = low.abs()
    present = own > 1e-12 * spectrum.abs().amax(dim=(2, 3), keepdim=True)
    share = share.to(own).reshape(-1, 1, 1, 1)
    target = (1 - share) * own + share * amplitudes.to(own)
    scale = torch.where(present, target / torch.where(present, own, torch.ones_like(own)), 0.0)
    spectrum = spectrum.clone()
    spectrum[:, :, rows[:, None], columns] = low * scale
    mixed: Tensor = torch.fft.irfft2(spectrum, s=x.shape[2:], norm="forward").to(x.dtype)
    return mixed


def _low(x: Tensor, band: float) -> tuple[Tensor, Tensor]:
    """Indices of rows and columns of the low frequencies."""
    height, width = x.shape[2:]
    reach = math.floor(band * min(height, width))
    rows = torch.arange(-reach, reach + 1, device=x.device) % height
    return rows, torch.arange(reach + 1, device=x.device)


def _spectrum(x: Tensor) -> Tensor:
    if x.dim() not in (3, 4):
        raise ValueError(f"expected an image (C, H, W) or slices (C, H, W, D), got {list(x.shape)}")
    spectrum: Tensor = torch.fft.rfft2(x.double(), dim=(1, 2))
    return spectrum
