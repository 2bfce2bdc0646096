"""Fingerprint of a site's volumes for a plan: summaries over its patients, no image."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import nibabel
import numpy as np
import torch
from torch import Tensor

from medfedaug.config.plan import Plan
from medfedaug.data.base import Case, SiteFolder, drawn_over_patients, weights_by_patient
from medfedaug.data.preparation.preparation import Preparation
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError, PrivacyRefused, UpdateRefused
from medfedaug.federation.job_folder import LEVELS, SPACING
from medfedaug.federation.messages.privacy_guard import PrivacyGuard
from medfedaug.methods.base import Payload, Shapes, SiteExchange

__all__ = [
    "PLAN",
    "FingerprintExchange",
    "SpacingExchange",
    "accepted_spacing",
    "check_fingerprint",
    "edges_in_ras",
    "fingerprint",
    "fingerprint_shapes",
    "is_ct",
    "site_spacing",
]

PLAN = "plan"
"""The name under which a fingerprint travels."""

QUANTILES = (0.1, 0.5, 0.9)
"""The `LEVELS` of a spacing."""

_AXES = ("x", "y", "z")
_DIGITS = 2  # of the edges that leave in every job: enough to notice another protocol, and not one image
_LOOKED_AT = 50  # cases of a site, about so many, drawn over its patients
_CT = "ct"
_CT_QUANTILES = (0.005, 0.995)
_VOXELS = 10_000  # of the foreground of a patient's cases, evenly spread over each, for these
_LARGEST_INTENSITY = 1e6
_NOT_TOLD = -1.0
_LARGEST_SIZE, _SMALLEST_EDGE, _LARGEST_EDGE = 1e5, 1e-3, 1e3


def is_ct(channel: str) -> bool:
    """Return whether a channel's name says that it is a computed tomogram, whose units compare.

    Example:
        >>> is_ct("CT"), is_ct("CTA"), is_ct("T1")
        (True, False, False)
    """
    return channel.casefold() == _CT


def fingerprint(site: SiteFolder, classes: Sequence[str], chosen: Sequence[Case] | None = None) -> Payload:
    """Summaries of a site's training volumes, turned to RAS where their files say how they lie.

    Every patient has the same weight, however many images each has.

    Args:
        site: the site.
        classes: the federation's, background first.
        chosen: the training cases that are looked at; by default about 50, drawn over the patients.

    Returns:
        ``extent`` (3, 3): the 10 %, 50 % and 90 % quantiles of the volumes' extents along x, y and z, of each
        patient the median; each of one case's voxels times their own edge in mm, in voxels where some file
        does not say of what size;
        ``spacing`` (3, 3): the same of the edges of a voxel in mm, 0 where some file does not say;
        ``foreground`` (K - 1,): the mean share of the voxels of each class but the background, -1 of a class
        that some of these cases do not show in full;
        ``intensity`` (C, 2): the mean over patients of mean and deviation of each channel as stored;
        ``ct`` (C, 4): of the foreground's voxels of all patients, in each channel that is named CT, the
        0.5 % and 99.5 % quantiles, mean and deviation; 0 for other channels, and where nothing is foreground;
        ``cases`` (1,): how many cases the site trains with.

    Raises:
        DataError: when the site has no volumes, or a case cannot be read.
    """
    if not isinstance(site, VolumeFolder):
        raise DataError("has no volumes, for which a plan could be made", site=site.name, path=site.path)
    if chosen is None:
        chosen = drawn_over_patients(site.cases["training"], _LOOKED_AT)
    images = Counter(case.owner for case in chosen)
    rows = [_case(site, case, len(classes), _VOXELS // images[case.owner]) for case in chosen]
    *columns, inside = zip(*rows, strict=True)
    sizes, edges, shares, intensities = map(torch.stack, columns)
    if bool((edges == 0).any()):
        edges = torch.zeros_like(edges)
    weights = torch.tensor(weights_by_patient(chosen), dtype=torch.float64)
    shown = site.annotated("training", in_all=True) if site.partial else classes[1:]
    told = torch.tensor([name in shown for name in classes[1:]])
    return {
        "extent": _quantiles(chosen, sizes * edges.where(edges > 0, 1.0)).float(),
        "spacing": _quantiles(chosen, edges).float(),
        "foreground": torch.tensordot(weights, shares, 1).float().where(told, _NOT_TOLD),
        "intensity": torch.tensordot(weights, intensities, 1).float(),
        "ct": _of_foreground(site, torch.cat(inside, dim=1)).float(),
        "cases": torch.tensor([float(len(site.cases["training"]))]),
    }


def fingerprint_shapes(num_classes: int, channels: int) -> Shapes:
    """The shapes of a fingerprint's entries."""
    quantiles = (len(QUANTILES), 3)
    return {
        "extent": quantiles,
        "spacing": quantiles,
        "foreground": (num_classes - 1,),
        "intensity": (channels, 2),
        "ct": (channels, len(_CT_QUANTILES) + 2),
        "cases": (1,),
    }


def check_fingerprint(site: str, payload: Payload) -> None:
    """Check values that a plan is made of; their shapes are right, and they are finite.

    Raises:
        UpdateRefused: naming the site and the entry.
    """
    ranges: dict[str, tuple[float, float]] = {
        "foreground": (0, 1),
        "cases": (1, 2**31),
    }
    for key, (low, high) in ranges.items():
        told = payload[key][payload[key] != _NOT_TOLD] if key == "foreground" else payload[key]
        if bool(((told < low) | (told > high)).any()):
            raise UpdateRefused(site, f"{PLAN}/{key}", expected=f"{low:g} to {high:g}", got="another number")
    ct = payload["ct"]  # metal may bring mean and deviation beyond the quantiles
    sound = (ct[:, 0] <= ct[:, 1]) & (ct[:, 3] >= 0)
    if not bool(sound.all() and (ct.abs() <= _LARGEST_INTENSITY).all()):
        wanted = f"ordered quantiles and a deviation, at most {_LARGEST_INTENSITY:g}"
        raise UpdateRefused(site, f"{PLAN}/ct", expected=wanted, got="other numbers")
    edges = payload["spacing"]
    known = (edges >= _SMALLEST_EDGE) & (edges <= _LARGEST_EDGE)
    if not bool(known.all() or (edges == 0).all()):
        wanted = f"{_SMALLEST_EDGE:g} to {_LARGEST_EDGE:g} mm"
        raise UpdateRefused(site, f"{PLAN}/spacing", expected=wanted, got="another number")
    voxels = payload["extent"] / edges.where(edges > 0, 1.0)  # at no level less than one, as in each case
    if not bool(((voxels > 0.99) & (voxels <= _LARGEST_SIZE)).all()):
        wanted = f"1 to {_LARGEST_SIZE:g} voxels of the site's spacing"
        raise UpdateRefused(site, f"{PLAN}/extent", expected=wanted, got="another number")


def outlines_differ(sites: Sequence[Payload]) -> bool:
    """Return whether some site does not show every class in full, by the fingerprints."""
    return any(bool((found["foreground"] == _NOT_TOLD).any()) for found in sites)


class FingerprintExchange(SiteExchange):
    """The fingerprint as the site's guard sees it: a summary of a sample of the training cases.

    There is no form of it to which noise could be added: a site that adds noise takes part with a plan that
    is given.

    Args:
        site: the site's folder.
        classes: the federation's, background first.
        least: the fewest patients that a value may be about.
    """

    def __init__(self, site: SiteFolder, classes: Sequence[str], least: int) -> None:
        self.site, self.classes = site, classes
        self.chosen = drawn_over_patients(site.cases["training"], _LOOKED_AT, least)

    def sample(self) -> Sequence[Case]:
        """Return the cases that are looked at."""
        return self.chosen

    def collect(self) -> Payload:
        """See `fingerprint`."""
        return fingerprint(self.site, self.classes, self.chosen)

    def apply(self, payload: Payload) -> None:
        """Do nothing: the plan comes back by another way."""


class SpacingExchange(SiteExchange):
    """The edges of the training images' voxels as the site's guard sees them: a summary of all of them.

    As of the fingerprint, there is no form of it with noise.
    """

    def __init__(self, site: VolumeFolder) -> None:
        self.site = site

    def collect(self) -> Payload:
        """``spacing`` (3, 3): quantiles as in `fingerprint`, of two digits; empty where a file has none."""
        affines = [self.site.affine(case) for case in self.site.cases["training"]]
        if not affines or any(affine is None for affine in affines):
            return {}
        edges = torch.tensor(np.array([edges_in_ras(affine) for affine in affines]))
        found = _quantiles(self.site.cases["training"], edges)
        found.apply_(lambda edge: float(f"{edge:.{_DIGITS}g}"))
        return {SPACING: found}

    def apply(self, payload: Payload) -> None:
        """Nothing comes back."""


def site_spacing(site: SiteFolder, guard: PrivacyGuard) -> dict[str, float]:
    """Return the spacing of the training images that a site sends in every job, through its guard.

    Returns:
        ``{"low_x": mm, ..., "median_x": mm, ..., "high_z": mm}`` along the axes of RAS; empty where the files
        do not say, there are no volumes, or the site's policy does not allow it.
    """
    if not isinstance(site, VolumeFolder):
        return {}
    try:
        payload = guard.collect(SPACING, SpacingExchange(site))
    except PrivacyRefused:  # the job goes on without it
        return {}
    rows = payload[SPACING].tolist() if payload else []
    return {
        f"{level}_{axis}": edge
        for level, row in zip(LEVELS, rows, strict=False)
        for axis, edge in zip(_AXES, row, strict=True)
    }


def accepted_spacing(values: Any) -> dict[str, list[float]]:
    """Check a site's `site_spacing` for ``results.json``: edges along x, y and z by level.

    Empty where it said nothing, or what no voxel can be: the job goes on.
    """
    if not isinstance(values, Mapping):
        return {}
    rows: list[list[Any]] = [[values.get(f"{level}_{axis}") for axis in _AXES] for level in LEVELS]
    if not all(_is_edge(edge) for row in rows for edge in row):
        return {}
    if any(low > middle or middle > high for low, middle, high in zip(*rows, strict=True)):
        return {}
    return dict(zip(LEVELS, rows, strict=True))


def _is_edge(value: Any) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and _SMALLEST_EDGE <= value <= _LARGEST_EDGE


def edges_in_ras(affine: Any) -> np.ndarray:
    """The edges of a voxel in mm, each along the axis of RAS that it is nearest to.

    Example:
        >>> edges_in_ras([[0, 0, -3, 0], [2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]).tolist()
        [3.0, 2.0, 1.0]
    """
    matrix = np.asarray(affine, dtype=float)
    turned = np.empty(3)
    turned[nibabel.io_orientation(matrix)[:, 0].astype(int)] = np.linalg.norm(matrix[:3, :3], axis=0)
    return turned


def _quantiles(cases: Sequence[Case], rows: Tensor) -> Tensor:
    """Quantiles over patients, (Q, n), of rows of cases, (cases, n); a patient has the median of its rows."""
    own: dict[tuple[str, str], list[int]] = {}
    for index, case in enumerate(cases):
        own.setdefault(case.owner, []).append(index)
    medians = torch.stack([rows[indices].median(dim=0).values for indices in own.values()])
    levels = torch.tensor(QUANTILES, dtype=torch.float64)
    return medians.quantile(levels, dim=0, interpolation="nearest")


def _of_foreground(site: VolumeFolder, inside: Tensor) -> Tensor:
    """Quantiles, mean and deviation of the foreground's voxels, (C, n), in the channels that are named CT."""
    found = torch.zeros(len(inside), len(_CT_QUANTILES) + 2, dtype=torch.float64)
    for index, name in enumerate(site.federation_channels or site.channel_names):
        if is_ct(name) and inside.shape[1]:
            values = inside[index]
            levels = torch.tensor(_CT_QUANTILES, dtype=torch.float64)
            found[index] = torch.stack([*values.quantile(levels), values.mean(), values.std(correction=0)])
    return found


def _case(
    site: VolumeFolder, case: Case, classes: int, voxels: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    image, label = site.load_case(case)
    affine = site.affine(case)
    edges = torch.zeros(3, dtype=torch.float64)
    if affine is not None:
        place = site.placement(case, image, Preparation(Plan(orientation="RAS")))
        assert place is not None
        image, label = place.turned(image), place.turned(label)
        edges = affine[:3, :3].double().norm(dim=0)[list(place.axes)]
    counts = torch.bincount(label.flatten().long(), minlength=classes)[1:classes].double()
    values: Any = image.flatten(1).double()
    moments = torch.stack([values.mean(dim=1), values.std(dim=1, correction=0)], dim=1)
    inside = values[:, (label.flatten() > 0).nonzero().flatten()]
    some = inside[:, :: max(1, -(-inside.shape[1] // max(1, voxels)))]
    size = torch.tensor(image.shape[1:], dtype=torch.float64)
    return size, edges, counts / label.numel(), moments, some
