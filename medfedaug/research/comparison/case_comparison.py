"""Compare each case with the others of its site: label maps that do not fit, foreign images, near copies.

Every rule uses a median and a median absolute deviation over the site's cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from scipy.ndimage import affine_transform, gaussian_filter1d
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

FEWEST = 8
"""Smallest number of cases to compare."""

_FAR = 5.0  # robust deviations from the median; all limits here were chosen on the phantom
_LOW = 0.4  # of the usual contrast, below which a label map does not fit
_STEADY = 2.0  # ratio of the usual contrast to its deviation, below which labels do not stand out
_GAIN = 0.1  # of the usual contrast, by which a flipped label map fits better
_MOVED = 0.6  # voxels between an outline and the edges in the image
_STAYS = 0.5  # of a move, below which one side of an outline has not moved
_LOST = 0.1  # of the usual edge at one side of an outline, lost by a move that the other side asks for
_WHOLE = 0.95  # share of the image from which a label map covers everything
_ALIKE = 0.7  # correlation of two moved small pictures from which they are copies
_CURVE = np.linspace(0.02, 0.98, 25)
_SAMPLE = 50_000  # voxels of an image for its quantiles
_PICTURE = (4, 64, 64)  # slices, rows and columns
_DETAIL = 9  # pixels of the window that normalises a small picture's brightness and contrast
_FAINT = 0.02  # of an image's deviation, below which details are suppressed
_MOVE = 2  # pixels by which a copy may be moved
_NEAR = 0.4  # correlation of two small pictures from which other sizes are tried
_SIZES = (0.98, 1, 1.02)  # of a copy
_RING = 5  # voxels around a label, to which its contrast is measured
_STEPS = np.arange(-4, 5)  # voxels by which a label map is moved
_SHORTEST = 8  # voxels along an axis for a flip or a move
_AXES = "xyz"


@dataclass(frozen=True)
class CaseMeasures:
    """Numbers of a case for comparison with other cases; rows are channels.

    Attributes:
        contrast: mean of the labelled voxels minus the mean of a ring around them, in deviations of the
            image, (C,).
        flipped: contrast after the label map is flipped along x, y and z, (C, 3); NaN along a short axis.
        edges: mean of -∇²I under the label map, moved by -4 to 4 voxels along x and y, (C, 2, 9), or NaN. It
            is largest where the outline lies on the edges, since Σ ∇L·∇I = -Σ L ∇²I.
        sides: the same for the lower and the upper side of the outline along the axis of the move,
            (C, 2, 2, 9): the mean of ∂I along the axis at the lower side, and of its opposite at the upper.
        share: share of the image that is labelled.
        place: centre of the labelled voxels along x, y and z, as a share of the image, (3,).
        curve: quantiles of the image, scaled to [0, 1], (C, Q).
        picture: details of the image in few voxels (`small_picture`).
    """

    contrast: np.ndarray
    flipped: np.ndarray
    edges: np.ndarray
    sides: np.ndarray
    share: float
    place: np.ndarray
    curve: np.ndarray
    picture: np.ndarray


def measure_case(image: Tensor, label: Tensor) -> CaseMeasures | None:
    """Measure a case, image (C, X, Y) or (C, X, Y, Z) and label map alike; ``None`` without foreground.

    All classes but the background count as one.
    """
    voxels = image.float().reshape(*image.shape[:3], -1).numpy()
    whole = (label.reshape(*label.shape[1:3], -1) > 0).numpy()
    if not whole.any():
        return None
    counts = [np.count_nonzero(whole, axis=tuple({0, 1, 2} - {axis})) for axis in range(3)]
    used = [np.flatnonzero(count)[[0, -1]].tolist() for count in counts]
    box = tuple(
        slice(max(low - around, 0), high + around + 1)
        for (low, high), around in zip(used, (_RING, _RING, 0), strict=True)
    )
    inside = np.ascontiguousarray(whole[box])
    around_label = (slice(None), *box)
    ring = _widened(inside, _RING) & ~inside
    flat = voxels.reshape(len(voxels), -1)
    spread = np.maximum(flat.std(axis=1).astype(np.float64), 1e-12)
    means = np.stack([inside.ravel(), ring.ravel()], axis=1).astype(np.float32)
    means /= np.maximum(means.sum(axis=0, dtype=np.float64), 1).astype(np.float32)

    def contrast(axis: int | None = None) -> np.ndarray:
        image = voxels if axis is None else np.flip(voxels, axis + 1)
        labelled, around = (image[around_label].reshape(len(voxels), -1) @ means).T
        return (labelled - around) / spread

    long = [axis for axis, size in enumerate(whole.shape) if size >= _SHORTEST]
    flipped = np.full((len(voxels), 3), np.nan)
    for axis in long if ring.any() else ():
        flipped[:, axis] = contrast(axis)
    curve = row_quantiles(flat[:, :: max(1, flat.shape[1] // _SAMPLE)], _CURVE)
    width = np.maximum(curve[:, -1:] - curve[:, :1], 1e-12)
    centre = [np.average(np.arange(len(count)) + 0.5, weights=count) / len(count) for count in counts]
    return CaseMeasures(
        contrast=contrast() if ring.any() else np.zeros(len(voxels)),
        flipped=flipped,
        edges=_edges(voxels[around_label], inside, long),
        sides=_sides(voxels[around_label], inside, long),
        share=float(counts[0].sum() / whole.size),
        place=np.array(centre),
        curve=(curve - curve[:, :1]) / width,
        picture=small_picture(image),
    )


def row_quantiles(rows: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Compute the quantiles of each row, (C, Q) float64, like `numpy.quantile` and twice as fast.

    Example:
        >>> row_quantiles(np.array([[3.0, 1.0, 2.0]]), np.array([0.25, 1.0])).tolist()
        [[1.5, 3.0]]
    """
    places = np.arange(rows.shape[1])
    return np.stack([np.interp(shares * places[-1], places, row) for row in np.sort(rows, axis=1)])


def _widened(inside: np.ndarray, by: int) -> np.ndarray:
    """Dilate a mask by a square in the plane, by windows of doubled length."""
    for axis in (0, 1):
        margin = [(by, by) if other == axis else (0, 0) for other in range(inside.ndim)]
        wide, span = np.moveaxis(np.pad(inside, margin), axis, 0), 1
        while span < 2 * by + 1:
            step = min(span, 2 * by + 1 - span)
            wide, span = wide[:-step] | wide[step:], span + step
        inside = np.moveaxis(wide, 0, axis)
    return inside


def _edges(voxels: np.ndarray, inside: np.ndarray, long: Sequence[int]) -> np.ndarray:
    """Compute `CaseMeasures.edges`."""
    sums = np.full((len(voxels), 2, len(_STEPS)), np.nan)
    reach = int(_STEPS[-1])
    margin = ((reach, reach), (reach, reach), (0, 0))
    labelled = np.pad(inside, margin)
    strides = [stride // labelled.itemsize for stride in labelled.strides[:2]]
    far = reach * max(strides)
    mean = labelled.ravel()[far:-far] / np.float32(np.count_nonzero(inside))
    for channel, image in enumerate(voxels):
        curved = np.pad(np.ascontiguousarray(_curvature(image)), margin, mode="edge").ravel()
        for axis in set(long) & {0, 1}:
            for index, step in enumerate(far + _STEPS * strides[axis]):
                sums[channel, axis, index] = mean @ curved[step : step + len(mean)]
    return sums


def _sides(voxels: np.ndarray, inside: np.ndarray, long: Sequence[int]) -> np.ndarray:
    """Compute `CaseMeasures.sides`."""
    sums = np.full((len(voxels), 2, 2, len(_STEPS)), np.nan)
    reach = int(_STEPS[-1])
    for axis in set(long) & {0, 1}:
        ends = [(1, 1) if other == axis else (0, 0) for other in range(3)]
        steps = np.diff(np.pad(inside, ends).astype(np.int8), axis=axis)  # between two voxels
        around = [(reach, reach) if other == axis else (0, 0) for other in range(3)]
        for channel, image in enumerate(voxels):
            smooth = gaussian_filter1d(image, 1.0, axis=1 - axis)
            slope = np.pad(gaussian_filter1d(smooth, 1.0, axis=axis, order=1), around, mode="edge")
            slope = np.moveaxis(slope, axis, 0)
            slope = (slope[1:] + slope[:-1]) / 2
            for side, sign in enumerate((1, -1)):
                places = np.nonzero(np.moveaxis(steps == sign, axis, 0))
                for index, step in enumerate(reach - 1 + _STEPS):
                    at = np.clip(places[0] + step, 0, len(slope) - 1)
                    sums[channel, axis, side, index] = sign * slope[at, places[1], places[2]].mean()
    return sums


def _curvature(image: np.ndarray) -> np.ndarray:
    """Compute -∇²I of an image that is smoothed, in the plane alone, since slices lie far apart."""
    planes = np.ascontiguousarray(np.moveaxis(image, 2, 0))
    turned = [np.ascontiguousarray(np.swapaxes(_along(planes, order), 1, 2)) for order in (0, 2)]
    return -(_along(turned[0], 2) + _along(turned[1], 0)).T


def _along(values: np.ndarray, order: int) -> np.ndarray:
    """Compute a smoothed derivative along the last axis, where it is several times faster."""
    return gaussian_filter1d(values, 1.0, axis=-1, order=order)


def _offset(case: CaseMeasures, channel: int, axis: int, sign: float) -> float:
    """Return the voxels from the label map to the edges; NaN without a peak."""
    return np.nan if axis > 1 else _peak(sign * case.edges[channel, axis])


def _side_stays(
    cases: Sequence[CaseMeasures], channel: int, axis: int, sign: float, moved: np.ndarray
) -> np.ndarray:
    """Return for each case whether a side of its outline lies on an edge that a move would lose.

    A bright organ without a label that touches an outline draws the sum of all edges to its own, and the
    other side then stays where it is. A side without an edge says nothing.
    """
    sides = sign * np.stack([case.sides[channel, axis] for case in cases])
    here = sides[..., len(_STEPS) // 2]
    there = [[np.interp(by, _STEPS, sums) for sums in case] for case, by in zip(sides, moved, strict=True)]
    lost = here - there > _LOST * np.abs(np.nanmedian(here, axis=0))
    peaks = np.array([[_peak(sums) for sums in case] for case in sides])
    usual = [np.median(side[np.isfinite(side)]) if np.isfinite(side).any() else np.nan for side in peaks.T]
    stays = np.abs(peaks - usual) < _STAYS * np.abs(moved)[:, None]
    return np.asarray((lost & stays).any(axis=1))


def _peak(sums: np.ndarray) -> float:
    """Return the place of the largest sum, between two steps; NaN without one inside of the range."""
    peak = int(np.argmax(sums))
    if not np.isfinite(sums).all() or sums[peak] <= 0 or not 0 < peak < len(sums) - 1:
        return np.nan
    below, here, above = sums[peak - 1 : peak + 2]
    bend = below - 2 * here + above
    return float(_STEPS[peak] + (0.5 * (below - above) / bend if bend else 0.0))


def small_picture(image: Tensor) -> np.ndarray:
    """Return the details of an image, (Z, X, Y) of a fixed size, normalised by their surroundings.

    Z is 1 for photographs.
    """
    slices = image.float().reshape(*image.shape[:3], -1).mean(dim=0).permute(2, 0, 1)
    size = (_PICTURE[0] if len(slices) > 1 else 1, *_PICTURE[1:])
    small = interpolate(slices[None, None], size=size, mode="area")[0]

    def around(values: Tensor) -> Tensor:
        return avg_pool2d(values, _DETAIL, stride=1, padding=_DETAIL // 2, count_include_pad=False)

    details = small - around(small)
    contrast = around(details.square()).sqrt() + _FAINT * small.std() + 1e-12
    return np.asarray((details / contrast)[0].numpy())


def odd_cases(cases: Sequence[CaseMeasures]) -> Iterator[tuple[int, str, str]]:
    """Find the outliers among at least `FEWEST` cases of a site with the same channels.

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
        text = f"labelled voxels differ from those around by {contrast[index]:.2g} deviations, in others by"
        yield int(index), "label", f"{text} {usual:.2g}: another one's label map, or an inverted image?"
    for axis, name in enumerate(_AXES):
        better = np.array([sign * case.flipped[channel, axis] for case in cases]) - contrast
        for index in np.flatnonzero(stands_out & (better > _GAIN * usual)):
            yield int(index), "label", f"the label map fits the image better, flipped along {name}"
        offset = np.array([_offset(case, channel, axis, sign) for case in cases])
        moved = offset - (np.nanmedian(offset) if np.isfinite(offset).any() else 0.0)
        far = (np.abs(moved) > _MOVED) & (np.abs(_robust_score(offset)) > _FAR)
        if far.any():
            far &= ~_side_stays(cases, channel, axis, sign, moved)
        for index in np.flatnonzero(far):
            text = f"the label map fits the edges better, moved by {moved[index]:+.1f} voxels along {name}"
            yield int(index), "label", text
        place = np.array([case.place[axis] for case in cases])
        for index in np.flatnonzero(np.abs(_robust_score(place)) > _FAR):
            yield int(index), "label", f"the label map lies elsewhere along {name} than those of other cases"
    size = np.log([case.share for case in cases])
    for index in np.flatnonzero(np.abs(_robust_score(size)) > _FAR):
        share, others = cases[int(index)].share, np.exp(np.median(size))
        yield int(index), "label", f"{share:.2g} of the image are labelled, in others {others:.2g}"
    curves = np.stack([case.curve for case in cases])
    apart = np.abs(curves - np.median(curves, axis=0)).mean(axis=(1, 2))
    for index in np.flatnonzero(_robust_score(apart) > _FAR):
        text = "its intensities are spread unlike those of other cases: another modality?"
        yield int(index), "intensity", text


def odd_site(cases: Sequence[CaseMeasures]) -> Iterator[str]:
    """Find an error of most label maps of a site: flipped or moved."""
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
    """Find pairs of images that differ by intensities, noise, small moves and small changes of size alone.

    Pairs are compared by the correlation of their details, at the best of small moves. Details that many of
    the site's images share, such as the rim of a camera's field of view, have low weights.
    """
    if len(pictures) < FEWEST:
        return
    depth = max(map(len, pictures))
    whole = np.stack([np.broadcast_to(picture, (depth, *_PICTURE[1:])) for picture in pictures])
    shared = whole.mean(axis=0) ** 2 / np.maximum((whole**2).mean(axis=0), 1e-12)
    rows = (whole * (1 - shared)).reshape(len(whole), -1)
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    for index, picture in enumerate(rows.reshape(whole.shape)):
        others = rows[index + 1 :]
        near = np.flatnonzero(_correlation(picture, others) > _NEAR)
        if len(near):
            alike = np.max([_correlation(_scaled(picture, size), others[near]) for size in _SIZES], axis=0)
            for other in near[alike > _ALIKE]:
                yield index, index + 1 + int(other)


def _correlation(picture: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the correlation of a picture with each row, at the best of small moves."""
    wide = np.pad(picture, [(0, 0), (_MOVE, _MOVE), (_MOVE, _MOVE)], mode="wrap")
    moved = sliding_window_view(wide, picture.shape[1:], axis=(1, 2))
    products = rows @ np.moveaxis(moved, 0, 2).reshape(-1, rows.shape[1]).T
    return np.asarray(products.max(axis=1))


def _scaled(picture: np.ndarray, size: float) -> np.ndarray:
    """Enlarge a picture about its centre, to norm 1."""
    if size == 1:
        return picture
    middle = (np.array(picture.shape) - 1) / 2
    shrunk = np.array([1, 1 / size, 1 / size])
    enlarged = affine_transform(picture, shrunk, middle * (1 - shrunk), order=1)
    return np.asarray(enlarged / max(float(np.linalg.norm(enlarged)), 1e-12))


def _contrasts(cases: Sequence[CaseMeasures]) -> tuple[int, float, float, np.ndarray]:
    """Return the channel with the steadiest contrast, its sign, the usual contrast, and each case's."""
    contrasts = np.stack([case.contrast for case in cases])
    middle = np.median(contrasts, axis=0)
    channel = int(np.argmax(np.abs(middle) / _spread(contrasts)))
    sign = 1.0 if middle[channel] >= 0 else -1.0
    return channel, sign, abs(float(middle[channel])), sign * contrasts[:, channel]


def _spread(values: np.ndarray) -> np.ndarray:
    """Estimate the standard deviation of normal values from the median absolute deviation."""
    apart = np.abs(values - np.nanmedian(values, axis=0))
    return np.maximum(1.4826 * np.nanmedian(apart, axis=0), 1e-6)


def _robust_score(values: np.ndarray) -> np.ndarray:
    if not np.isfinite(values).any():
        return np.zeros_like(values)
    return (values - np.nanmedian(values)) / _spread(values)


def _error(values: np.ndarray) -> float:
    """Return the standard error of a median."""
    return float(1.2533 * _spread(values) / np.sqrt(len(values)))
