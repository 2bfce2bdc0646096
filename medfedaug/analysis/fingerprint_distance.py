"""`distances` of each site's fingerprint from the others', by kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import fmean

import numpy as np

from medfedaug.data.quality.image_fingerprint import QUANTITIES, ImageFingerprint
from medfedaug.errors import ConfigError

_LEAST_SPREAD = 0.01
"""Least deviation within a site, as a share of the range of intensities."""


@dataclass(frozen=True)
class Kind:
    """A kind of difference between sites.

    Attributes:
        group: ``"appearance"``, ``"structure"`` or ``"labels"``.
        unit: of the distance.
        text: its meaning.
    """

    group: str
    unit: str
    text: str


KINDS: Mapping[str, Kind] = {
    "intensity": Kind("appearance", "deviations", "mean intensity of an image"),
    "contrast": Kind("appearance", "deviations", "deviation of the intensities of an image"),
    "polarity": Kind(
        "appearance", "deviations", "distance of each other's images from 0, in both directions"
    ),
    "noise": Kind("appearance", "octaves", "noise of an image"),
    "sharpness": Kind("appearance", "of 1", "roughness of the images on their grid"),
    "resolution": Kind("appearance", "octaves", "edges of a voxel"),
    "field_of_view": Kind("appearance", "octaves", "extent of the images in the plane"),
    "pieces": Kind("structure", "octaves", "number of pieces of a class"),
    "size": Kind("labels", "octaves", "volume of a class in a case that has it: lesions, or their outlines"),
    "prevalence": Kind("labels", "of 1", "share of the cases with a class, or of the images of a class"),
}
"""Kinds of differences. An octave is a factor of 2."""


def check_together(sites: Sequence[ImageFingerprint]) -> None:
    """Check that fingerprints can be compared."""
    if len(sites) < 2:
        raise ConfigError(f"a prospect needs two sites or more, found {len(sites)}")
    first = sites[0]
    for other in sites[1:]:
        for name in ("task", "classes", "channels"):
            ours, theirs = getattr(first, name), getattr(other, name)
            if ours != theirs:
                raise ConfigError(
                    f"site {other.site} has {name} {theirs}, and site {first.site} has {ours}: "
                    "make them alike (docs/data.md)"
                )


def distances(sites: Sequence[ImageFingerprint]) -> dict[str, dict[str, float]]:
    """Return the mean distance of each site from the others, by site and kind (`KINDS`).

    Intensity and contrast are as in `medfedaug.analysis.shift.site_shift`: with p̄ the means
    of a site's means, or deviations, and s the root mean square of the deviations within the sites, ::

        Dⱼₖ = √((1/C) Σ_c (p̄_jc − p̄_kc)² / s_c²)

    Polarity is the largest ``min(|zₖⱼ|, |zⱼₖ|)`` of a channel
    (`medfedaug.statistics.foreign_pairs`). Ratios are in octaves, ``|log₂(a / b)|``.

    Deviations:
        s is at least 0.01 of the range of intensities: images that are all alike, or a deviation below 0 from
        a policy's noise, would make it 0.
    """
    check_together(sites)
    within = {}
    for name in ("mean", "std"):
        squares = np.mean([site.spread(name) ** 2 for site in sites], axis=0)
        within[name] = np.maximum(np.sqrt(squares), _LEAST_SPREAD)
    apart: dict[str, dict[str, list[float]]] = {site.site: {kind: [] for kind in KINDS} for site in sites}
    for one, other in permutations(sites, 2):
        for kind, distance in _pair(one, other, within).items():
            apart[one.site][kind].append(distance)
    return {site: {kind: fmean(values) for kind, values in kinds.items()} for site, kinds in apart.items()}


def appearance(kinds: Mapping[str, float]) -> float:
    """Combine intensity and contrast to the distance of `medfedaug inspect`."""
    return math.sqrt((kinds["intensity"] ** 2 + kinds["contrast"] ** 2) / 2)


def _pair(
    one: ImageFingerprint, other: ImageFingerprint, within: Mapping[str, np.ndarray]
) -> dict[str, float]:
    distances = dict.fromkeys(KINDS, 0.0)
    for kind, name in (("intensity", "mean"), ("contrast", "std")):
        apart = (one.value(name) - other.value(name)) / within[name]
        distances[kind] = float(np.sqrt(np.mean(apart**2)))
    means = np.abs(one.value("mean") - other.value("mean"))
    widest = np.maximum(np.maximum(one.value("std"), other.value("std")), _LEAST_SPREAD)
    distances["polarity"] = float((means / widest).max())
    distances["noise"] = _octaves(one, other, "noise")
    distances["sharpness"] = float(np.abs(one.value("roughness") - other.value("roughness")).mean())
    if one.knows_geometry and other.knows_geometry:
        distances["resolution"] = fmean(_octaves(one, other, name) for name in ("edge", "thickness"))
        distances["field_of_view"] = _octaves(one, other, "extent")
    if one.task == "segmentation":
        # Only classes that both outline in full: a missing outline is no difference of the patients.
        annotated = one.annotated_mask & other.annotated_mask
        both = (one.value("present") > 0) & (other.value("present") > 0) & annotated
        if both.any():
            distances["size"], distances["pieces"] = (
                _octaves(one, other, name, both) for name in ("size", "pieces")
            )
        apart = np.abs(one.value("present") - other.value("present")) * annotated
        distances["prevalence"] = float(apart.max())
    else:
        distances["prevalence"] = float((one.entries["shares"] - other.entries["shares"]).abs().max())
    return distances


def _octaves(
    one: ImageFingerprint, other: ImageFingerprint, name: str, among: np.ndarray | None = None
) -> float:
    quantity = QUANTITIES[name]
    apart = np.abs(one.scaled(name) - other.scaled(name)) * math.log2(quantity.high / quantity.low)
    return float(apart.mean() if among is None else apart[among].mean())
