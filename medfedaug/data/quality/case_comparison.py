"""Compare each case with the others of its site: label maps that do not fit, foreign images, near copies.

Every rule is a median and a median absolute deviation over the site's cases. `benchmarks/planted_errors.py`
plants errors and counts them, and the false alarms on data without any.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor
from torch.nn.functional import interpolate, max_pool2d

__all__ = ["FEWEST", "CaseMeasures", "measure_case", "near_copies", "odd_cases", "odd_site", "small_picture"]

FEWEST = 8
"""Cases of a site from which on they are compared."""

_FAR = 5.0  # robust deviations from the median; chosen on the phantom, as all limits here
_LOW = 0.4  # of the usual contrast, from which a label map does not fit
_STEADY = 2.0  # the usual contrast over its deviation; below it labels do not stand out
_GAIN = 0.1  # of the usual contrast, by which a flipped label map fits better
_MOVED = 0.6  # voxels between an outline and the edges in the image
_WHOLE = 0.95  # share of the image from which a label map covers everything
_ALIKE = 0.8  # correlation of two small pictures, less the site's mean, from which they are copies
_CURVE = np.linspace(0.02, 0.98, 25)
_SAMPLE = 50_000  # voxels of an image for its quantiles
_PICTURE = (24, 24, 12)
_RING = 5  # voxels around a label, of which its contrast is
_STEPS = np.arange(-4, 5)  # voxels by which a label map is moved
_SHORTEST = 8  # voxels along an axis in which something is flipped or moved
_AXES = "xyz"


@dataclass(frozen=True)
class CaseMeasures:
    """Numbers of a case that are compared with those of others; rows are channels.

    Attributes:
        contrast: mean of the labelled voxels above that of a ring around them, in deviations of all, (C,).
        flipped: the same after the label map is flipped along x, y and z, (C, 3); NaN along a short axis.
        edges: mean of -∇²I under the label map, moved by -4 to 4 voxels along x and y, (C, 2, 9), or NaN. It
            is largest where the outline lies on the edges, since Σ ∇L·∇I = -Σ L ∇²I.
        share: share of the image that is labelled.
        place: centre of the labelled voxels along x, y and z, as a share of the image, (3,).
        curve: quantiles of the image, of which the middle is 0 and the range 1, (C, Q).
        picture: the image in few voxels, of mean 0 and norm 1, (P,).
    """

    contrast: np.ndarray
    flipped: np.ndarray
    edges: np.ndarray
    share: float
    place: np.ndarray
    curve: np.ndarray
    picture: np.ndarray


def measure_case(image: Tensor, label: Tensor) -> CaseMeasures | None:
    """Measure a case; ``None`` where nothing is labelled.

    Args:
        image: (C, X, Y) or (C, X, Y, Z).
        label: (1, X, Y) or (1, X, Y, Z), integer; all classes but the background count as one.
    """
    voxels = image.float().reshape(*image.shape[:3], -1)
    inside = label.reshape(*label.shape[1:3], -1) > 0
    places = inside.nonzero()
    if not len(places):
        return None
    low = (places.amin(dim=0) - torch.tensor([_RING, _RING, 0])).clamp_min(0)
    high = torch.minimum(
        places.amax(dim=0) + torch.tensor([_RING + 1, _RING + 1, 1]), torch.tensor(inside.shape)
    )
    box = tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))
    planes = inside[box].permute(2, 0, 1)[:, None].float()
    wide = max_pool2d(planes, 2 * _RING + 1, stride=1, padding=_RING)[:, 0].permute(1, 2, 0) > 0
    ring = (wide & ~inside[box]).nonzero() + low
    flat = voxels.flatten(1)
    spread = flat.std(dim=1, correction=0).clamp_min(1e-12)

    def contrast(axis: int | None = None) -> np.ndarray:
        means = []
        for where in (places, ring):
            x, y, z = (inside.shape[a] - 1 - where[:, a] if a == axis else where[:, a] for a in range(3))
            means.append(voxels[:, x, y, z].mean(dim=1))
        return ((means[0] - means[1]) / spread).double().numpy()

    long = [axis for axis, size in enumerate(inside.shape) if size >= _SHORTEST]
    flipped = np.full((len(voxels), 3), np.nan)
    for axis in long if len(ring) else ():
        flipped[:, axis] = contrast(axis)
    sample = flat[:, :: max(1, flat.shape[1] // _SAMPLE)].double().numpy()
    curve = np.quantile(sample, _CURVE, axis=1).T
    width = np.maximum(curve[:, -1:] - curve[:, :1], 1e-12)
    return CaseMeasures(
        contrast=contrast() if len(ring) else np.zeros(len(voxels)),
        flipped=flipped,
        edges=_edges(voxels[:, box[0], box[1], box[2]].numpy(), (places - low).numpy(), long),
        share=len(places) / inside.numel(),
        place=((places.double().mean(dim=0) + 0.5) / torch.tensor(inside.shape)).numpy(),
        curve=(curve - curve[:, :1]) / width,
        picture=small_picture(image),
    )


def _edges(voxels: np.ndarray, rows: np.ndarray, long: Sequence[int]) -> np.ndarray:
    found = np.full((len(voxels), 2, len(_STEPS)), np.nan)
    for channel, image in enumerate(voxels):
        # In the plane: slices are thicker than pixels, and further apart than edges reach.
        twice = [gaussian_filter(image, (1.0, 1.0, 0.0), order=order) for order in ((2, 0, 0), (0, 2, 0))]
        curved = -twice[0] - twice[1]
        for axis in set(long) & {0, 1}:
            for index, step in enumerate(_STEPS):
                moved = np.clip(rows[:, axis] + step, 0, image.shape[axis] - 1)
                x, y = (moved if a == axis else rows[:, a] for a in range(2))
                found[channel, axis, index] = curved[x, y, rows[:, 2]].mean()
    return found


def _offset(case: CaseMeasures, channel: int, axis: int, sign: float) -> float:
    """Voxels by which the label map is to be moved to the edges; NaN where they show no peak."""
    if axis > 1:
        return np.nan
    sums = sign * case.edges[channel, axis]
    peak = int(np.argmax(sums))
    if not np.isfinite(sums).all() or sums[peak] <= 0 or not 0 < peak < len(sums) - 1:
        return np.nan
    below, here, above = sums[peak - 1 : peak + 2]
    bend = below - 2 * here + above
    return float(_STEPS[peak] + (0.5 * (below - above) / bend if bend else 0.0))


def small_picture(image: Tensor) -> np.ndarray:
    """Return an image in few voxels, of mean 0 and norm 1.

    Args:
        image: (C, X, Y) or (C, X, Y, Z).
    """
    voxels = image.float().reshape(*image.shape[:3], -1)
    size = tuple(min(n, most) for n, most in zip(voxels.shape[1:], _PICTURE, strict=True))
    small = interpolate(voxels.mean(dim=0)[None, None], size=size, mode="area")
    full = interpolate(small, size=_PICTURE, mode="nearest").flatten().double().numpy()
    centred = full - full.mean()
    return centred / max(float(np.linalg.norm(centred)), 1e-12)


def odd_cases(cases: Sequence[CaseMeasures]) -> Iterator[tuple[int, str, str]]:
    """Find the cases that are unlike the others of a site.

    Args:
        cases: of one site, all with the same channels; none is found in fewer than `FEWEST`.

    Yields:
        The case's index, ``"label"`` or ``"intensity"``, and the reason.
    """
    for number, case in enumerate(cases):
        if case.share >= _WHOLE:
            yield number, "label", f"{case.share:.0%} of the image are labelled"
    if len(cases) < FEWEST:
        return
    channel, sign, usual, contrast = _contrasts(cases)
    stands_out = usual > _STEADY * _spread(contrast)
    for index in np.flatnonzero(stands_out & (contrast < _LOW * usual)):
        told = f"labelled voxels differ from those around by {contrast[index]:.2g} deviations, in others by"
        yield int(index), "label", f"{told} {usual:.2g}: another one's label map, or an inverted image?"
    for axis, name in enumerate(_AXES):
        better = np.array([sign * case.flipped[channel, axis] for case in cases]) - contrast
        for index in np.flatnonzero(stands_out & (better > _GAIN * usual)):
            yield int(index), "label", f"the label map fits the image better, flipped along {name}"
        offset = np.array([_offset(case, channel, axis, sign) for case in cases])
        moved = offset - (np.nanmedian(offset) if np.isfinite(offset).any() else 0.0)
        for index in np.flatnonzero((np.abs(moved) > _MOVED) & (np.abs(_far(offset)) > _FAR)):
            told = f"the label map fits the edges better, moved by {moved[index]:+.1f} voxels along {name}"
            yield int(index), "label", told
        place = np.array([case.place[axis] for case in cases])
        for index in np.flatnonzero(np.abs(_far(place)) > _FAR):
            yield int(index), "label", f"the label map lies elsewhere along {name} than those of other cases"
    size = np.log([case.share for case in cases])
    for index in np.flatnonzero(np.abs(_far(size)) > _FAR):
        share, others = cases[int(index)].share, np.exp(np.median(size))
        told = f"{share:.2g} of the image are labelled, in others {others:.2g}"
        yield int(index), "label", told
    curves = np.stack([case.curve for case in cases])
    apart = np.abs(curves - np.median(curves, axis=0)).mean(axis=(1, 2))
    for index in np.flatnonzero(_far(apart) > _FAR):
        yield (
            int(index),
            "intensity",
            "its intensities are spread unlike those of other cases: another modality?",
        )


def odd_site(cases: Sequence[CaseMeasures]) -> Iterator[str]:
    """Find that all label maps of a site are flipped or moved, by most of its cases."""
    if len(cases) < FEWEST:
        return
    channel, sign, usual, contrast = _contrasts(cases)
    for axis, name in enumerate(_AXES):
        better = np.array([abs(case.flipped[channel, axis]) for case in cases]) - contrast
        if np.isfinite(better).all() and np.median(better) > max(_GAIN * usual, _FAR * _error(better)):
            yield f"most label maps fit their images better, flipped along {name}"
        offset = np.array([_offset(case, channel, axis, sign) for case in cases])
        offset = offset[np.isfinite(offset)]
        if len(offset) >= FEWEST and abs(middle := np.median(offset)) > max(_MOVED, _FAR * _error(offset)):
            yield f"most label maps fit the edges better, moved by {middle:+.1f} voxels along {name}"


def near_copies(pictures: Sequence[np.ndarray]) -> Iterator[tuple[int, int]]:
    """Find pairs of images of a site that are the same but for a little scaling, of size or of intensity.

    Args:
        pictures: `small_picture` of each; none is found in fewer than `FEWEST`.
    """
    if len(pictures) < FEWEST:
        return
    own = np.stack(pictures) - np.mean(pictures, axis=0)
    own /= np.maximum(np.linalg.norm(own, axis=1, keepdims=True), 1e-12)
    for one, other in zip(*np.nonzero(np.triu(own @ own.T > _ALIKE, k=1)), strict=True):
        yield int(one), int(other)


def _contrasts(cases: Sequence[CaseMeasures]) -> tuple[int, float, float, np.ndarray]:
    """The channel in which labels stand out most steadily, the sign of it, the usual contrast, and each."""
    found = np.stack([case.contrast for case in cases])
    middle = np.median(found, axis=0)
    channel = int(np.argmax(np.abs(middle) / _spread(found)))
    sign = 1.0 if middle[channel] >= 0 else -1.0
    return channel, sign, abs(float(middle[channel])), sign * found[:, channel]


def _spread(values: np.ndarray) -> np.ndarray:
    """The deviation of normal values that have this median absolute one."""
    apart = np.abs(values - np.nanmedian(values, axis=0))
    return np.maximum(1.4826 * np.nanmedian(apart, axis=0), 1e-6)


def _far(values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).any():
        return np.zeros_like(values)
    return (values - np.nanmedian(values)) / _spread(values)


def _error(values: np.ndarray) -> float:
    """The standard error of a median."""
    return float(1.2533 * _spread(values) / np.sqrt(len(values)))
