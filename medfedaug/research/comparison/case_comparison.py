"""Compare each case with the others of its site: label maps that do not fit, foreign images.

Every rule uses a median and a median absolute deviation over the site's cases.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import maximum_filter
from torch import Tensor

FEWEST = 8  # smallest number of cases to compare

_FAR = 5.0  # robust deviations from the median; all limits here were chosen on the phantom
_LOW = 0.4  # of the usual contrast, below which a label map does not fit
_STEADY = 2.0  # ratio of the usual contrast to its deviation, below which labels do not stand out
_GAIN = 0.1  # of the usual contrast, by which a flipped label map fits better
_WHOLE = 0.95  # share of the image from which a label map covers everything
_CURVE = np.linspace(0.02, 0.98, 25)
_SAMPLE = 50_000  # voxels of an image for its quantiles
_RING = 5  # voxels around a label, to which its contrast is measured
_SHORTEST = 8  # voxels along an axis for a flip
_AXES = "xyz"


@dataclass(frozen=True)
class CaseMeasures:
    """Numbers of a case for comparison with other cases; rows are channels."""

    # Mean of the labelled voxels minus the mean of a ring around them, in standard deviations of the image,
    # (C,).
    contrast: np.ndarray
    # Contrast after the label map is flipped along x, y and z, (C, 3); NaN along a short axis.
    flipped: np.ndarray
    share: float  # share of the image that is labelled
    place: np.ndarray  # centre of the labelled voxels along x, y and z, as a share of the image, (3,)
    curve: np.ndarray  # quantiles of the image, scaled to [0, 1], (C, Q)


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
    ring = maximum_filter(inside, (2 * _RING + 1, 2 * _RING + 1, 1), mode="constant") & ~inside
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
    curve = np.quantile(flat[:, :: max(1, flat.shape[1] // _SAMPLE)], _CURVE, axis=1).T
    width = np.maximum(curve[:, -1:] - curve[:, :1], 1e-12)
    centre = [np.average(np.arange(len(count)) + 0.5, weights=count) / len(count) for count in counts]
    return CaseMeasures(
        contrast=contrast() if ring.any() else np.zeros(len(voxels)),
        flipped=flipped,
        share=float(counts[0].sum() / whole.size),
        place=np.array(centre),
        curve=(curve - curve[:, :1]) / width,
    )


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
        text = (
            f"labelled voxels differ from those around by {contrast[index]:.2g} standard deviations, in "
            f"other cases by {usual:.2g}: another patient's label map, or an inverted image?"
        )
        yield int(index), "label", text
    for axis, name in enumerate(_AXES):
        better = np.array([sign * case.flipped[channel, axis] for case in cases]) - contrast
        for index in np.flatnonzero(stands_out & (better > _GAIN * usual)):
            yield int(index), "label", f"the label map fits the image better, flipped along {name}"
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
    """Find an error of most label maps of a site: a flip."""
    if len(cases) < FEWEST:
        return
    channel, _, usual, contrast = _contrasts(cases)
    for axis, name in enumerate(_AXES):
        better = np.array([abs(case.flipped[channel, axis]) for case in cases]) - contrast
        if np.isfinite(better).all() and np.median(better) > max(_GAIN * usual, _FAR * _error(better)):
            yield f"most label maps fit their images better, flipped along {name}"


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
