"""Fingerprint of a site's volumes for a plan: summaries over its patients."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import nibabel
import numpy as np
import torch
from torch import Tensor

from medfedaug.config.plan import Plan
from medfedaug.data.base import Case, SiteFolder, by_patient, spread
from medfedaug.data.preparation.preparation import Preparation
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError, PrivacyRefused, UpdateRefused
from medfedaug.federation.job_folder import LEVELS, SPACING
from medfedaug.methods.base import Payload, Shapes, SiteExchange
from medfedaug.methods.census import Census, Contributors
from medfedaug.utils.validation import is_number

PLAN = "plan"
"""The prefix of a fingerprint's entries in a message."""

QUANTILES = (0.1, 0.5, 0.9)
"""The `LEVELS` of a spacing."""

_AXES = ("x", "y", "z")
_DIGITS = 2  # of the edges in every job: enough to recognise another protocol, but no single image
_SAMPLED = 50  # the approximate number of sampled cases of a site, drawn over its patients
_CT = "ct"
_CT_QUANTILES = (0.005, 0.995)
_VOXELS = 10_000  # sampled foreground voxels of a patient, evenly spread over each case
_LARGEST_INTENSITY = 1e6
_INCOMPLETE = -1.0
_LARGEST_SIZE, _SMALLEST_EDGE, _LARGEST_EDGE = 1e5, 1e-3, 1e3
_MOST_CASES = 2**31


def is_ct(channel: str) -> bool:
    """Return whether a channel's name says that it is a computed tomogram, whose units compare.

    Example:
        >>> is_ct("CT"), is_ct("CTA"), is_ct("T1")
        (True, False, False)
    """
    return channel.casefold() == _CT


def fingerprint(
    site: SiteFolder,
    classes: Sequence[str],
    chosen: Sequence[Case] | None = None,
    least: int = 1,
    on_read: Callable[[int, int], None] = lambda number, of: None,
) -> Payload:
    """Summarise a site's training volumes, turned to RAS if their files have an orientation.

    Every patient has the same weight, independent of the number of images.

    Args:
        chosen: the sampled training cases; by default about 50, drawn over the patients.
        least: the number of patients over which a quantile is the mean of the values about it, and the fewest
            whose foreground is in ``ct``.
        on_read: called after each case, with its number and the number of sampled cases.

    Returns:
        ``extent`` (3, 3): the 10 %, 50 % and 90 % quantiles over patients of the volumes' extents along x, y
        and z, with the median of each patient; in mm, or in voxels if some file lacks their size;
        ``spacing`` (3, 3): the same quantiles of the voxel size in mm, 0 if some file lacks them;
        ``foreground`` (K - 1,): the mean share of the voxels of each class but the background, -1 of a class
        that some of these cases do not show in full;
        ``intensity`` (C, 2): the mean over patients of mean and standard deviation of each channel as stored;
        ``ct`` (C, 4): in each channel named CT, of the foreground voxels the means over patients of the
        0.5 % and 99.5 % quantiles, and mean and standard deviation of all; 0 for other channels, and without
        enough patients who have foreground;
        ``cases`` (1,): the number of training cases.

    Raises:
        DataError: when the site has no volumes, or a case cannot be read.
    """
    if not isinstance(site, VolumeFolder):
        raise DataError("has no volumes, for which a plan could be made", site=site.name, path=site.path)
    if chosen is None:
        chosen = _drawn_over_patients(site.cases["training"], _SAMPLED)
    images = Counter(case.owner for case in chosen)
    rows = []
    for number, case in enumerate(chosen, start=1):
        rows.append(_case(site, case, len(classes), _VOXELS // images[case.owner]))
        on_read(number, len(chosen))
    *columns, inside = zip(*rows, strict=True)
    sizes, edges, shares, intensities = map(torch.stack, columns)
    if bool((edges == 0).any()):
        edges = torch.zeros_like(edges)
    numbers = Counter(case.owner for case in chosen)  # all patients have one weight
    each = [1 / (len(numbers) * numbers[case.owner]) for case in chosen]
    weights = torch.tensor(each, dtype=torch.float64)
    annotated = site.annotated("training", in_all=True) if site.partial else classes[1:]
    complete = torch.tensor([name in annotated for name in classes[1:]])
    voxels: dict[tuple[str, str], list[Tensor]] = {}
    for case, sample in zip(chosen, inside, strict=True):
        voxels.setdefault(case.owner, []).append(sample)
    foreground = [torch.cat(samples, dim=1) for samples in voxels.values()]
    if not Contributors(torch.tensor([[values.shape[1] for values in foreground]])).enough(least):
        foreground = []
    return {
        "extent": _quantiles(chosen, sizes * edges.where(edges > 0, 1.0), least).float(),
        "spacing": _quantiles(chosen, edges, least).float(),
        "foreground": torch.tensordot(weights, shares, 1).float().where(complete, _INCOMPLETE),
        "intensity": torch.tensordot(weights, intensities, 1).float(),
        "ct": _of_foreground(site, len(intensities[0]), foreground).float(),
        "cases": torch.tensor([float(len(site.cases["training"]))]),
    }


def fingerprint_shapes(num_classes: int, channels: int) -> Shapes:
    """Return the shapes of a fingerprint's entries."""
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
    """Check the values of a fingerprint with correct shapes and finite numbers."""

    def check(key: str, valid: Tensor, expected: str) -> None:
        if not bool(valid.all()):
            raise UpdateRefused(site, f"{PLAN}/{key}", expected=expected, got="other numbers")

    shares, cases, ct, edges = (payload[key] for key in ("foreground", "cases", "ct", "spacing"))
    check("foreground", (shares == _INCOMPLETE) | ((shares >= 0) & (shares <= 1)), "0 to 1")
    check("cases", (cases >= 1) & (cases <= _MOST_CASES), f"1 to {_MOST_CASES:g}")
    # Metal may move mean and deviation beyond the quantiles.
    sound = (ct[:, 0] <= ct[:, 1]) & (ct[:, 3] >= 0) & (ct.abs() <= _LARGEST_INTENSITY).all(dim=1)
    check("ct", sound, f"ordered quantiles and a standard deviation, at most {_LARGEST_INTENSITY:g}")
    known = (edges >= _SMALLEST_EDGE) & (edges <= _LARGEST_EDGE)
    check("spacing", known if edges.any() else edges == 0, f"{_SMALLEST_EDGE:g} to {_LARGEST_EDGE:g} mm")
    voxels = payload["extent"] / edges.where(edges > 0, 1.0)
    sound = (voxels > 0.99) & (voxels <= _LARGEST_SIZE)
    check("extent", sound, f"1 to {_LARGEST_SIZE:g} voxels of the site's spacing")


def outlines_differ(sites: Sequence[Payload]) -> bool:
    """Return whether some site does not show every class in full."""
    return any(bool((payload["foreground"] == _INCOMPLETE).any()) for payload in sites)


class FingerprintExchange(SiteExchange):
    """Exchange of the fingerprint: a summary of a sample of the training cases.

    Noise cannot be added to it: a site with noise needs a given plan.
    """

    def __init__(self, site: SiteFolder, classes: Sequence[str], census: Census) -> None:
        self.site, self.classes, self.census = site, classes, census
        self.chosen = _drawn_over_patients(site.cases["training"], _SAMPLED, census.least)

    def collect(self) -> Payload:
        """See `fingerprint`."""
        training = self.site.cases["training"]
        sampled = [training.index(case) for case in self.chosen]
        entries = fingerprint(self.site, self.classes, self.chosen, self.census.least)
        return {key: self.census.over_sample(value, sampled) for key, value in entries.items()}

    def apply(self, payload: Payload) -> None:
        """Do nothing: the plan arrives in the next request."""


class SpacingExchange(SiteExchange):
    """Exchange of the sizes of all training voxels, without a form for noise."""

    def __init__(self, site: VolumeFolder, least: int) -> None:
        self.site, self.least = site, least

    def collect(self) -> Payload:
        """Return ``spacing`` (3, 3): quantiles as in `fingerprint`, with two digits, or nothing."""
        affines = [self.site.affine(case) for case in self.site.cases["training"]]
        if not affines or any(affine is None for affine in affines):
            return {}
        edges = torch.tensor(np.array([edges_in_ras(affine) for affine in affines]))
        quantiles = _quantiles(self.site.cases["training"], edges, self.least)
        quantiles.apply_(lambda edge: float(f"{edge:.{_DIGITS}g}"))
        return {SPACING: quantiles}

    def apply(self, payload: Payload) -> None:
        """Do nothing: the server sends no result."""


def site_spacing(
    site: SiteFolder, least: int, collect: Callable[[str, SiteExchange], Payload]
) -> dict[str, float]:
    """Return the spacing of the training images, which a site sends in every job.

    Returns:
        ``{"low_x": mm, ..., "median_x": mm, ..., "high_z": mm}`` along the axes of RAS; empty if the files
        lack it, there are no volumes, or the site's policy does not allow it.
    """
    if not isinstance(site, VolumeFolder):
        return {}
    try:
        payload = collect(SPACING, SpacingExchange(site, least))
    except PrivacyRefused:  # the job goes on without it
        return {}
    rows = payload[SPACING].tolist() if payload else []
    return {
        f"{level}_{axis}": edge
        for level, row in zip(LEVELS, rows, strict=False)
        for axis, edge in zip(_AXES, row, strict=True)
    }


def accepted_spacing(values: Any) -> dict[str, list[float]]:
    """Return a site's `site_spacing` for ``results.json``: edges along x, y and z by level.

    Empty if it is missing or impossible: the job continues.
    """
    if not isinstance(values, Mapping):
        return {}
    rows: list[list[Any]] = [[values.get(f"{level}_{axis}") for axis in _AXES] for level in LEVELS]
    if not all(is_number(edge) and _SMALLEST_EDGE <= edge <= _LARGEST_EDGE for row in rows for edge in row):
        return {}
    ordered = all(low <= middle <= high for low, middle, high in zip(*rows, strict=True))
    return dict(zip(LEVELS, rows, strict=True)) if ordered else {}


def edges_in_ras(affine: Any) -> np.ndarray:
    """Return the voxel size in mm, each along the nearest axis of RAS.

    Example:
        >>> edges_in_ras([[0, 0, -3, 0], [2, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]).tolist()
        [3.0, 2.0, 1.0]
    """
    matrix = np.asarray(affine, dtype=float)
    turned = np.empty(3)
    turned[nibabel.io_orientation(matrix)[:, 0].astype(int)] = np.linalg.norm(matrix[:3, :3], axis=0)
    return turned


def _quantiles(cases: Sequence[Case], rows: Tensor, least: int) -> Tensor:
    """Return quantiles, (Q, n), over patients' medians of rows of cases, (cases, n).

    Each is the mean of ``least`` medians about it: a quantile itself is the number of one patient.
    """
    of_patient: dict[tuple[str, str], list[int]] = {}
    for index, case in enumerate(cases):
        of_patient.setdefault(case.owner, []).append(index)
    medians = torch.stack([rows[indices].median(dim=0).values for indices in of_patient.values()])
    ordered = medians.double().sort(dim=0).values
    last = max(len(ordered) - least, 0)
    starts = (round(level * (len(ordered) - 1)) - least // 2 for level in QUANTILES)
    return torch.stack([ordered[min(max(s, 0), last) :][:least].mean(dim=0) for s in starts])


def _of_foreground(site: VolumeFolder, channels: int, foreground: Sequence[Tensor]) -> Tensor:
    """Summarise the foreground's voxels of each patient, (C, n), in channels named CT.

    Quantiles are means over patients: that of all voxels together is the intensity of one voxel.
    """
    summary = torch.zeros(channels, len(_CT_QUANTILES) + 2, dtype=torch.float64)
    levels = torch.tensor(_CT_QUANTILES, dtype=torch.float64)
    for index, name in enumerate(site.federation_channels or site.channel_names):
        known = [values[index] for values in foreground if values.shape[1]]
        if is_ct(name) and known:
            quantiles = torch.stack([values.quantile(levels) for values in known]).mean(dim=0)
            values = torch.cat(known)
            summary[index] = torch.stack([*quantiles, values.mean(), values.std(correction=0)])
    return summary


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
    sample = inside[:, :: max(1, -(-inside.shape[1] // max(1, voxels)))]
    size = torch.tensor(image.shape[1:], dtype=torch.float64)
    return size, edges, counts / label.numel(), moments, sample


def _drawn_over_patients(cases: Sequence[Case], limit: int | None, least: int = 1) -> tuple[Case, ...]:
    """Choose about ``limit`` cases of as many patients as possible, equally many of each.

    The patients are spread evenly over the list. A case without a patient's name stands for one. Either no
    patient has an image left out, or at least ``least`` have: other releases are about all cases, and the
    difference is about the patients with images left out. Where neither is possible, all cases are chosen.
    """
    if limit is None or len(cases) <= limit:
        return tuple(cases)
    everybody = by_patient(cases)
    patients = spread(everybody, max(limit, least))
    each = max(1, limit // len(patients))
    whole = sum(len(images) <= each for images in patients)
    if 0 < len(everybody) - whole < least:
        return tuple(cases)
    return tuple(case for images in patients for case in spread(images, each))
