"""`inspect_site`: a look at all of a site's data before training, which no odd file ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from medfedaug.data.base import SPLITS, Case, SiteFolder
from medfedaug.data.benchmarks import is_federation, open_federation
from medfedaug.data.checks.duplicates import find_copies
from medfedaug.data.folders import is_site, site_folders
from medfedaug.data.preparation.decoded_cache import keep_decoded
from medfedaug.data.quality.annotation_notes import annotation_notes
from medfedaug.data.quality.case_comparison import (
    CaseMeasures,
    measure_case,
    near_copies,
    odd_cases,
    odd_site,
    row_quantiles,
)
from medfedaug.data.quality.intensity_scales import most_uneven
from medfedaug.data.sites import open_site
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError
from medfedaug.functional import foreground_voxels
from medfedaug.statistics import image_moments

QUANTILES = (np.arange(400) + 0.5) / 400
"""Quantiles of an image's intensities that are kept."""

_VOXELS = 200_000  # of an image, evenly from all, for its quantiles
_EDGES = (0.01, 50.0)  # mm; from a microscope's slide scanner to a scout image
_ONE_CASE = 2**34  # bytes: the files of a case are decoded once, whoever asks for them
_DARK = 0.5  # share of the foreground on voxels without signal from which it is odd


@dataclass(frozen=True)
class Odd:
    """Finding that a user should look at.

    Attributes:
        kind: ``"file"``, ``"label"``, ``"spacing"``, ``"channels"``, ``"intensity"`` or ``"split"``.
        case: the case's name; empty where it is about the whole site.
        reason: what is odd, in one line that may name files.
    """

    kind: str
    case: str
    reason: str


@dataclass
class SiteInspection:
    """Findings at a site.

    Attributes:
        name: the site.
        task: ``"segmentation"`` or ``"classification"``; empty for a site that cannot be opened.
        classes: their names.
        scaling: how `SiteFolder.load_image` scales.
        splits: cases by split.
        patients: how many there are, each case without a name of a patient being one.
        shapes: how many images have which shape.
        edges: how many have which edges of a voxel, mm, rounded; none where the files do not say.
        axes: how many have axes that point where; none where the files do not say.
        channels: how many have how many channels.
        channel_names: the names of their channels in order, where they are named.
        voxels: share of the voxels of each class, mean over the cases that have annotated it; of photographs,
            share of the images.
        present: how many cases have any of each class.
        at_border: cases whose foreground reaches the edge of the image.
        pairs: mean and deviation of each channel of each training image as a run sees it, (N, C, 2); of test
            images where the site does not train.
        stored: quantiles of these images as stored, (N, C, Q).
        seen: the same as a run sees them.
        odd: what a user should look at.
        annotated: the classes that it has annotated for training, where these may not be all.
    """

    name: str
    task: str = ""
    classes: tuple[str, ...] = ()
    scaling: str = ""
    splits: dict[str, int] = field(default_factory=dict)
    patients: int = 0
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    edges: Counter[tuple[float, ...]] = field(default_factory=Counter)
    axes: Counter[str] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)
    channel_names: tuple[str, ...] = ()
    voxels: dict[str, float] = field(default_factory=dict)
    present: dict[str, int] = field(default_factory=dict)
    at_border: int = 0
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 2)))
    stored: np.ndarray = field(default_factory=lambda: np.empty((0, 0, len(QUANTILES))))
    seen: np.ndarray = field(default_factory=lambda: np.empty((0, 0, len(QUANTILES))))
    odd: list[Odd] = field(default_factory=list)
    annotated: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Image:
    """Numbers of an image: (C, 2) and (C, Q) twice."""

    pairs: np.ndarray
    stored: np.ndarray
    seen: np.ndarray


def inspect_sites(
    data: str | Path, limit: int | None = None, intensity: str = "scale"
) -> list[SiteInspection]:
    """Look at all sites below a folder, or at the one whose folder it is.

    Raises:
        DataError: where there is no site. What is wrong with one is in its `SiteInspection.odd`.
    """
    root = Path(data)
    if is_federation(root):
        folders: list[Path | SiteFolder] = list(open_federation(root, limit).values())
    else:
        folders = [root] if root.is_dir() and is_site(root) else list(site_folders(root))
    opened: list[SiteFolder] = []
    found: list[SiteInspection] = []
    for folder in folders:
        try:
            site = folder if isinstance(folder, SiteFolder) else open_site(folder, limit=limit, check=False)
        except DataError as error:
            name = folder.name if isinstance(folder, SiteFolder) else folder.resolve().name
            found.append(SiteInspection(name, odd=[Odd("file", "", str(error))]))
            continue
        opened.append(site)
        found.append(inspect_site(site, intensity))
    for (first, owner, one), (split, site, case) in find_copies(opened, apart=True):
        reason = f"the image of this {split} case is that of the {first} case {one.name} of site {owner.name}"
        next(entry for entry in found if entry.name == site.name).odd.append(Odd("split", case.name, reason))
    if any(site.partial for site in opened):
        for name, reason in annotation_notes(opened):
            next(entry for entry in found if entry.name == name).odd.append(Odd("label", "", reason))
    return found


def inspect_site(site: SiteFolder, intensity: str = "scale") -> SiteInspection:
    """Look at every case of a site, one image in memory at a time."""
    found = SiteInspection(
        site.name,
        site.task,
        site.classes,
        site.scaling,
        splits={split: len(site.cases[split]) for split in SPLITS},
        channel_names=site.channel_names,
        annotated=site.annotated("training") if site.partial else None,
    )
    cases = [(split, case) for split in SPLITS for case in site.cases[split]]
    named = {case.patient for _, case in cases if case.patient}
    found.patients = len(named) + sum(not case.patient for _, case in cases)
    _check_splits(site, found)
    measured: list[tuple[str, _Image]] = []
    shares: list[np.ndarray] = []
    measures: list[tuple[str, Case, CaseMeasures]] = []
    of_statistics = "training" if site.trains else "test"
    for split, case in cases:
        try:
            with keep_decoded(_ONE_CASE):
                image, share, compared = _look(site, case, found)
                if split == of_statistics:
                    measured.append((case.name, _measure(site, case, image, intensity)))
        except DataError as error:
            found.odd.append(Odd("file", case.name, str(error)))
            continue
        shares.append(share)
        if compared is not None:
            measures.append((split, case, compared))
    _sum_up(found, measured, shares)
    _check_channel_names(found)
    _compare_cases(found, measures)
    if site.scaling != "fixed" and len(found.stored):
        _check_scales(found, [name for name, image in measured if len(image.pairs) == found.pairs.shape[1]])
    return found


def _compare_cases(found: SiteInspection, measures: Sequence[tuple[str, Case, CaseMeasures]]) -> None:
    """Name what is odd beside the other cases of the site, of those with the usual channels."""
    usual = Counter(len(one.contrast) for *_, one in measures).most_common(1)
    alike = [entry for entry in measures if len(entry[2].contrast) == usual[0][0]]
    compared = [one for *_, one in alike]
    of_set: dict[tuple[str, ...] | None, list[int]] = {}
    for index, (_, case, _) in enumerate(alike):  # outlines of other structures lie elsewhere
        of_set.setdefault(case.annotated, []).append(index)
    for chosen in of_set.values():
        some = [compared[index] for index in chosen]
        for index, kind, reason in odd_cases(some):
            found.odd.append(Odd(kind, alike[chosen[index]][1].name, reason))
        found.odd += [Odd("label", "", reason) for reason in odd_site(some)]
    named = {(odd.case, odd.kind) for odd in found.odd}
    for one, other in near_copies([each.picture for each in compared]):
        (first, case, _), (second, copy, _) = alike[one], alike[other]
        of_one_patient = bool(case.patient) and case.patient == copy.patient
        if (copy.name, "split") not in named and (first != second or not of_one_patient):
            reason = f"its image looks like that of the {first} case {case.name}, but for its scale"
            found.odd.append(Odd("split", copy.name, reason))


def _check_channel_names(found: SiteInspection) -> None:
    """The list of channels and the images must have as many."""
    named = len(found.channel_names)
    if named and (other := {number: count for number, count in found.channels.items() if number != named}):
        others = ", ".join(f"{count} with {number}" for number, count in sorted(other.items()))
        reason = (
            f"dataset.json names {named} channels ({', '.join(found.channel_names)}), and images are {others}"
        )
        found.odd.append(Odd("channels", "", reason))


def _check_scales(found: SiteInspection, names: Sequence[str]) -> None:
    """The volumes of a site should lie on one scale of intensity."""
    low, high = (np.searchsorted(QUANTILES, share) for share in (0.01, 0.99))
    ranges = found.stored[..., high] - found.stored[..., low]
    if (uneven := most_uneven(found.name, names, ranges.tolist())) is not None:
        reason = f"its volumes lie on wildly different scales of intensity ({uneven}): use --intensity scale"
        found.odd.append(Odd("intensity", "", reason))


def _check_splits(site: SiteFolder, found: SiteInspection) -> None:
    try:
        site.check_splits()
    except DataError as error:
        found.odd.append(Odd("split", "", str(error)))
    for (first, _, one), (split, _, case) in find_copies([site], apart=False):
        reason = f"the image of this {split} case is that of the {first} case {one.name}"
        found.odd.append(Odd("split", case.name, reason))


def _look(
    site: SiteFolder, case: Case, found: SiteInspection
) -> tuple[torch.Tensor, np.ndarray, CaseMeasures | None]:
    """Read a case: its image, the shares of its classes, values for comparison with others."""
    compared = None
    if isinstance(site, VolumeFolder):
        header = site.check_case(case)
        if header.edges:
            found.edges[tuple(round(edge, 3) for edge in header.edges)] += 1
            found.axes[header.axes] += 1
            wrong = [edge for edge in header.edges if not _EDGES[0] <= edge <= _EDGES[1]]
            if wrong:
                reason = (
                    f"the edge of a voxel is {wrong[0]:.3g} mm; expected {_EDGES[0]:g} to {_EDGES[1]:g} mm"
                )
                found.odd.append(Odd("spacing", case.name, reason))
        image, label = site.load_case(case)
        chosen = site.annotated_set(case, site.classes)
        share = np.where(chosen, 0.0, np.nan)  # what is not annotated may be there
        if case.annotated != ():
            share += _look_at_label(image, label, site.classes, case, found)
            compared = measure_case(image, label)
    else:
        image = site.load_image(case)
        share = np.array([name == case.label for name in site.classes], np.float64)
    return _counted(site, case, image, found), share, compared


def _counted(site: SiteFolder, case: Case, image: torch.Tensor, found: SiteInspection) -> torch.Tensor:
    found.shapes[tuple(image.shape[1:])] += 1
    found.channels[image.shape[0]] += 1
    low, high = torch.aminmax(image.flatten(1), dim=1)
    if bool((low == high).all()):
        raise site.error(f"is constant: every pixel is {low[0]:g}", case.image)
    return image


def _look_at_label(
    image: torch.Tensor, label: torch.Tensor, classes: Sequence[str], case: Case, found: SiteInspection
) -> np.ndarray:
    counts = torch.bincount(label.flatten().long(), minlength=len(classes)).double().numpy()
    foreground = label[0] > 0
    if not bool(foreground.any()):
        found.odd.append(Odd("label", case.name, "the label map is empty: no voxel has a class"))
        return counts / counts.sum()
    share = float((~foreground_voxels(image))[foreground].double().mean())
    if share > _DARK:
        reason = f"{share:.0%} of the labelled voxels have no signal: does the label map belong to the image?"
        found.odd.append(Odd("label", case.name, reason))
    axes = [axis for axis, length in enumerate(foreground.shape) if length > 1]
    found.at_border += any(bool(foreground.select(axis, end).any()) for axis in axes for end in (0, -1))
    return counts / counts.sum()


def _measure(site: SiteFolder, case: Case, image: torch.Tensor, intensity: str) -> _Image:
    voxels = image.flatten(1)
    low, high = (edge.double().numpy() for edge in torch.aminmax(voxels, dim=1))
    slope, offset = np.ones_like(low), np.zeros_like(low)
    if intensity == "scale":  # a straight line for each channel, whoever scales it
        scaled = site.load_image(case, "scale").flatten(1)
        bottom, top = (edge.double().numpy() for edge in torch.aminmax(scaled, dim=1))
        slope = np.divide(top - bottom, high - low, out=np.zeros_like(low), where=high > low)
        offset = bottom - slope * low
    moments = image_moments(image)
    some = voxels[:, :: max(1, voxels.shape[1] // _VOXELS)]
    stored = row_quantiles(some.numpy(), QUANTILES)
    mean, std = moments["mean"].numpy(), moments["std"].numpy()
    pairs = np.stack([mean * slope + offset, std * slope], axis=1)
    return _Image(pairs, stored, stored * slope[:, None] + offset[:, None])


def _sum_up(
    found: SiteInspection, measured: Sequence[tuple[str, _Image]], shares: Sequence[np.ndarray]
) -> None:
    if shares:
        for name, column in zip(found.classes, np.stack(shares).T, strict=True):
            if len(known := column[~np.isnan(column)]):
                found.voxels[name] = float(known.mean())
                found.present[name] = int((known > 0).sum())
    if not measured:
        return
    usual = found.channels.most_common(1)[0][0]
    for name, image in measured:
        if len(image.pairs) != usual:
            reason = f"{len(image.pairs)} channels, while most images have {usual}"
            found.odd.append(Odd("channels", name, reason))
    kept = [image for _, image in measured if len(image.pairs) == usual]
    if kept:
        found.pairs = np.stack([image.pairs for image in kept])
        found.stored = np.stack([image.stored for image in kept])
        found.seen = np.stack([image.seen for image in kept])
        low, high = found.stored.min(axis=(0, 2)), found.stored.max(axis=(0, 2))
        for channel in np.flatnonzero(low == high):
            reason = (
                f"channel {channel} is {low[channel]:g} in every image: nothing can be learnt from it here"
            )
            found.odd.append(Odd("channels", "", reason))
