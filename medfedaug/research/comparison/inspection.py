"""`inspect_sites`: inspect all data of sites before training; no file ends the inspection."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

from medfedaug.data.base import SPLITS, Case, SiteFolder, by_patient, plain_name
from medfedaug.data.checks import find_copies
from medfedaug.data.dataset_json import LABELLED, named_classes, unseen_note
from medfedaug.data.io.formats import is_photograph
from medfedaug.data.preparation.cache import keep_decoded
from medfedaug.data.preparation.preparation import foreground_voxels
from medfedaug.data.sites import is_federation, is_site, open_site, site_folders
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError
from medfedaug.research.comparison.case_comparison import CaseMeasures, measure_case, odd_cases, odd_site
from medfedaug.research.datasets.benchmarks import open_federation
from medfedaug.runs.prediction.prediction_image import windowed
from medfedaug.statistics import image_moments

QUANTILES = (np.arange(400) + 0.5) / 400  # shares of the quantiles of an image's intensities

_VOXELS = 200_000  # of an image, evenly from all, for its quantiles
_EDGES = (0.01, 50.0)  # mm; from a microscope's slide scanner to a scout image
_ONE_CASE = 2**34  # bytes of memory, so that the files of a case are decoded once
_THUMBNAIL = 96  # pixels of the longer side of a small picture
_DARK = 0.5  # share of the foreground without signal from which it is odd


@dataclass(frozen=True)
class Finding:
    """Problem for a user to look at."""

    kind: str  # "file", "label", "spacing", "channels", "intensity" or "split"
    case: str  # name of the case; empty for the whole site
    reason: str  # one line, which may name files


@dataclass
class SiteInspection:
    """Findings at a site."""

    name: str
    task: str = ""  # "segmentation" or "classification"; empty for a site that cannot be opened
    classes: tuple[str, ...] = ()
    scaling: str = ""
    splits: dict[str, int] = field(default_factory=dict)  # number of cases by split
    patients: int = 0  # number of patients; a case without a patient's name stands for one
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)  # number of images by shape
    # Number of images by voxel size, mm, rounded; empty without geometry.
    edges: Counter[tuple[float, ...]] = field(default_factory=Counter)
    # Number of images by directions of the axes; empty without geometry.
    axes: Counter[str] = field(default_factory=Counter)
    channels: Counter[int] = field(default_factory=Counter)  # number of images by number of channels
    channel_names: tuple[str, ...] = ()
    # Share of the voxels of each class, mean over the cases that have annotated it; of photographs, share of
    # the images.
    voxels: dict[str, float] = field(default_factory=dict)
    present: dict[str, int] = field(default_factory=dict)  # number of cases with each class
    # Mean and standard deviation of each channel of each training image as a run sees it, (N, C, 2); of test
    # images for an unseen site.
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 2)))
    # Quantiles of these images as stored, (N, C, Q).
    stored: np.ndarray = field(default_factory=lambda: np.empty((0, 0, len(QUANTILES))))
    owners: list[Hashable] = field(default_factory=list)  # patient of each of these images
    labelled: list[Hashable] = field(default_factory=list)  # patient of each case with a label map
    # Share of the voxels of each class in these cases, (M, K); NaN without annotation.
    shares: np.ndarray = field(default_factory=lambda: np.empty((0, 0)))
    # Mean of each class but the background minus mean of the background's voxels with signal, in standard
    # deviations of the image, (M, C, K - 1); NaN in a case without the class.
    contrasts: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0)))
    odd: list[Finding] = field(default_factory=list)
    # The classes that the site has annotated for training; `None` for all.
    annotated: tuple[str, ...] | None = None
    # A small picture of each readable case, (H, W) or (H, W, 3), uint8: of a volume the slice with most
    # foreground.
    thumbnails: dict[str, np.ndarray] = field(default_factory=dict)


def inspect_sites(
    data: str | Path, limit: int | None = None, intensity: str = "scale"
) -> list[SiteInspection]:
    """Inspect all sites below a folder, or the site of the folder.

    Raises:
        DataError: where no site can be opened; problems of one are in `SiteInspection.odd`.
    """
    root = Path(data)
    if is_federation(root):
        folders: list[Path | SiteFolder] = list(open_federation(root, limit).values())
    else:
        folders = [root] if root.is_dir() and is_site(root) else list(site_folders(root))
    opened: list[SiteFolder] = []
    inspections: list[SiteInspection] = []
    for folder in folders:
        try:
            site = folder if isinstance(folder, SiteFolder) else open_site(folder, limit=limit, check=False)
        except DataError as error:
            if len(inspections) + 1 == len(folders) and not opened:
                raise
            name = folder.name if isinstance(folder, SiteFolder) else folder.resolve().name
            inspections.append(SiteInspection(name, odd=[Finding("file", "", str(error))]))
            continue
        opened.append(site)
        inspections.append(inspect_site(site, intensity))
    by_name = {inspection.name: inspection for inspection in inspections}
    for (first, owner, original), (split, site, case) in find_copies(opened, apart=True):
        whose = f"that of the {first} case {original.name} of site {owner.name}"
        reason = f"the image of this {split} case is {whose}"
        by_name[site.name].odd.append(Finding("split", case.name, reason))
    for name, reason in annotation_notes(opened):
        by_name[name].odd.append(Finding("label", "", reason))
    return inspections


def inspect_site(site: SiteFolder, intensity: str = "scale") -> SiteInspection:
    """Inspect every case of a site, one image in memory at a time."""
    inspection = SiteInspection(
        site.name,
        site.task,
        site.classes,
        site.scaling,
        splits={split: len(site.cases[split]) for split in SPLITS},
        patients=len(by_patient(site.listed_cases)),
        channel_names=site.channel_names,
        annotated=site.annotated("training") if site.partial else None,
    )
    cases = [(split, case) for split in SPLITS for case in site.cases[split]]
    _check_splits(site, inspection)
    measured: list[tuple[Case, np.ndarray, np.ndarray]] = []
    shares: list[np.ndarray] = []
    labelled: list[tuple[Case, np.ndarray, np.ndarray]] = []
    measures: list[tuple[Case, CaseMeasures]] = []
    measured_split = "training" if site.trains else "test"
    for split, case in cases:
        try:
            with keep_decoded(_ONE_CASE):
                image, share, contrast, measure = _read_case(site, case, inspection)
                if split == measured_split:
                    measured.append((case, *_measure(site, case, image, intensity)))
        except DataError as error:
            inspection.odd.append(Finding("file", case.name, str(error)))
            continue
        shares.append(share)
        if contrast is not None:
            labelled.append((case, share, contrast))
        if measure is not None:
            measures.append((case, measure))
    _summarise(inspection, measured, shares)
    usual = max(inspection.channels, key=inspection.channels.__getitem__, default=0)
    if labelled := [entry for entry in labelled if len(entry[2]) == usual]:
        inspection.labelled = [case.owner for case, *_ in labelled]
        inspection.shares = np.stack([share for _, share, _ in labelled])
        inspection.contrasts = np.stack([contrast for *_, contrast in labelled])
    unseen = [name for name in site.annotated() if not inspection.present.get(name)]
    if unseen and shares and isinstance(site, VolumeFolder):
        inspection.odd.append(Finding("label", "", unseen_note(unseen, f"none of {len(shares)} cases")))
    _check_channel_names(inspection)
    _compare_cases(inspection, [entry for entry in measures if len(entry[1].contrast) == usual])
    return inspection


def _compare_cases(inspection: SiteInspection, measures: Sequence[tuple[Case, CaseMeasures]]) -> None:
    """Compare cases with the same number of channels, and add those that stand out."""
    by_classes: dict[tuple[str, ...] | None, list[tuple[Case, CaseMeasures]]] = defaultdict(list)
    for case, measure in measures:  # outlines of other structures lie elsewhere
        by_classes[case.annotated].append((case, measure))
    for entries in by_classes.values():
        compared = [measure for _, measure in entries]
        for index, kind, reason in odd_cases(compared):
            inspection.odd.append(Finding(kind, entries[index][0].name, reason))
        inspection.odd += [Finding("label", "", reason) for reason in odd_site(compared)]


def _check_channel_names(inspection: SiteInspection) -> None:
    number, names = len(inspection.channel_names), ", ".join(inspection.channel_names)
    others = [f"{count} with {n}" for n, count in sorted(inspection.channels.items()) if n != number]
    if number and others:
        reason = f"dataset.json names {number} channels ({names}), and images are {', '.join(others)}"
        inspection.odd.append(Finding("channels", "", reason))


def _check_splits(site: SiteFolder, inspection: SiteInspection) -> None:
    try:
        site.check_splits()
    except DataError as error:
        inspection.odd.append(Finding("split", "", str(error)))
    for (first, _, original), (split, _, case) in find_copies([site], apart=False):
        reason = f"the image of this {split} case is that of the {first} case {original.name}"
        inspection.odd.append(Finding("split", case.name, reason))


def _read_case(
    site: SiteFolder, case: Case, inspection: SiteInspection
) -> tuple[torch.Tensor, np.ndarray, np.ndarray | None, CaseMeasures | None]:
    """Return image, share and contrast of each class, and values for comparison with other cases."""
    measure = contrast = label = None
    if isinstance(site, VolumeFolder):
        header = site.check_case(case)
        if header.edges:
            inspection.edges[tuple(round(edge, 3) for edge in header.edges)] += 1
            inspection.axes[header.axes] += 1
            least, most = _EDGES
            if wrong := [edge for edge in header.edges if not least <= edge <= most]:
                reason = f"the edge of a voxel is {wrong[0]:.3g} mm; expected {least:g} to {most:g} mm"
                inspection.odd.append(Finding("spacing", case.name, reason))
        image, label = site.load_case(case)
        # A class that is not annotated may be present.
        share = np.where(site.annotated_set(case, site.classes), 0.0, np.nan)
        if case.annotated != ():
            share += _check_label(image, label, site.classes, case, inspection)
            measure, contrast = measure_case(image, label), _contrasts(image, label, len(site.classes))
    else:
        image = site.load_image(case)
        share = np.array([name == case.label for name in site.classes], np.float64)
    inspection.shapes[tuple(image.shape[1:])] += 1
    inspection.channels[image.shape[0]] += 1
    low, high = torch.aminmax(image.flatten(1), dim=1)
    if bool((low == high).all()):
        raise site.error(f"is constant: every pixel is {low[0]:g}", case.image)
    inspection.thumbnails[case.name] = _thumbnail(image, label, photograph=is_photograph(case.image))
    return image, share, contrast, measure


def _thumbnail(image: torch.Tensor, label: torch.Tensor | None, *, photograph: bool) -> np.ndarray:
    """Draw a small picture of an image, (C, H, W) or (C, X, Y, Z), upright."""
    plane = image
    if image.ndim == 4:
        foreground = None if label is None else (label > 0).sum(dim=(0, 1, 2))
        middle = image.shape[3] // 2
        plane = image[..., middle if foreground is None or not foreground.any() else int(foreground.argmax())]
        plane = plane.transpose(1, 2)
    step = -(-max(plane.shape[1:]) // _THUMBNAIL)
    colours = 3 if photograph and len(plane) == 3 else 1
    pixels = windowed(plane[:colours, ::step, ::step].permute(1, 2, 0).float().numpy())
    upright = pixels if photograph else pixels[::-1]
    return np.asarray((255 * upright).astype(np.uint8).squeeze())


def _contrasts(image: torch.Tensor, label: torch.Tensor, classes: int) -> np.ndarray:
    """Return the contrast of each class with the background, as in `SiteInspection.contrasts`."""
    voxels, numbers = image.flatten(1).double(), label.flatten()
    background = (numbers == 0) & foreground_voxels(image).flatten()
    nothing = torch.full((len(voxels),), torch.nan, dtype=torch.float64)
    means = [
        voxels[:, mask].mean(dim=1) if bool(mask.any()) else nothing
        for mask in (background, *(numbers == index for index in range(1, classes)))
    ]
    spread = voxels.std(dim=1, correction=0).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.stack([(mean - means[0]) / spread for mean in means[1:]], dim=1).numpy()


def _check_label(
    image: torch.Tensor, label: torch.Tensor, classes: Sequence[str], case: Case, inspection: SiteInspection
) -> np.ndarray:
    """Check the foreground of a label map, and return the share of each class."""
    counts = torch.bincount(label.flatten().long(), minlength=len(classes)).double().numpy()
    foreground = label[0] > 0
    if not bool(foreground.any()):
        inspection.odd.append(Finding("label", case.name, "the label map is empty: no voxel has a class"))
        return counts / counts.sum()
    share = float((~foreground_voxels(image))[foreground].double().mean())
    if share > _DARK:
        reason = f"{share:.0%} of the labelled voxels have no signal: does the label map belong to the image?"
        inspection.odd.append(Finding("label", case.name, reason))
    return counts / counts.sum()


def _measure(
    site: SiteFolder, case: Case, image: torch.Tensor, intensity: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return ``pairs`` and ``stored`` of an image, as in `SiteInspection`."""
    voxels = image.flatten(1)
    low, high = (edge.double().numpy() for edge in torch.aminmax(voxels, dim=1))
    slope, offset = np.ones_like(low), np.zeros_like(low)
    if intensity == "scale":  # every scaling is a straight line for each channel
        scaled = site.load_image(case, "scale").flatten(1)
        bottom, top = (edge.double().numpy() for edge in torch.aminmax(scaled, dim=1))
        slope = np.divide(top - bottom, high - low, out=np.zeros_like(low), where=high > low)
        offset = bottom - slope * low
    stored = np.quantile(voxels[:, :: max(1, voxels.shape[1] // _VOXELS)].numpy(), QUANTILES, axis=1).T
    mean, std = (value.numpy() for value in image_moments(image).values())
    return np.stack([mean * slope + offset, std * slope], axis=1), stored


def _summarise(
    inspection: SiteInspection,
    measured: Sequence[tuple[Case, np.ndarray, np.ndarray]],
    shares: Sequence[np.ndarray],
) -> None:
    if shares:
        for name, column in zip(inspection.classes, np.stack(shares).T, strict=True):
            if len(known := column[~np.isnan(column)]):
                inspection.voxels[name] = float(known.mean())
                inspection.present[name] = int((known > 0).sum())
    if not measured:
        return
    usual = inspection.channels.most_common(1)[0][0]
    for case, pairs, _ in measured:
        if len(pairs) != usual:
            reason = f"{len(pairs)} channels, while most images have {usual}"
            inspection.odd.append(Finding("channels", case.name, reason))
    if alike := [image for image in measured if len(image[1]) == usual]:
        cases, pairs, stored = zip(*alike, strict=True)
        inspection.owners = [case.owner for case in cases]
        inspection.pairs, inspection.stored = np.stack(pairs), np.stack(stored)
        low, high = inspection.stored.min(axis=(0, 2)), inspection.stored.max(axis=(0, 2))
        for channel in np.flatnonzero(low == high):
            value = f"channel {channel} is {low[channel]:g} in every image"
            reason = f"{value}: nothing can be learnt from it here"
            inspection.odd.append(Finding("channels", "", reason))


_ALIKE = 0.75  # ratio of `difflib` from which two names may mean one structure


def annotation_notes(sites: Sequence[SiteFolder]) -> Iterator[tuple[str, str]]:
    """Yield a site and a note for each class that may have two names, or that few sites have annotated.

    Without partial sites, also for each site with other classes than the first.
    """
    sites = [site for site in sites if site.task == "segmentation"]
    named = {site.name: {plain_name(name): name for name in named_classes(site)} for site in sites}
    trained = {site.name: set(map(plain_name, site.annotated("training"))) for site in sites}
    tested = {site.name: set(map(plain_name, site.annotated("test"))) for site in sites}
    first: dict[str, str] = {}
    for site, names in named.items():
        for plain in names:
            first.setdefault(plain, site)
    for plain, other in combinations(first, 2):
        owner, site = first[plain], first[other]
        together = any(plain in names and other in names for names in named.values())
        if not together and _similar(plain, other):
            name = named[owner][plain]
            yield (
                site,
                f"its class {named[site][other]!r} may be the {name!r} of site {owner}, and names decide: "
                f"where both are one structure, write {name!r} in labels and labelled",
            )
    if not any(site.partial for site in sites):
        yield from _different_lists(named)
        return
    for plain, site in first.items():
        name = named[site][plain]
        trainers, testers = ([s for s, names in part.items() if plain in names] for part in (trained, tested))
        if not trainers:
            yield (
                site,
                f"no site has outlined {name!r}: nothing is learned of it, and the model never finds it; "
                "outline it at one site, or take it out of labels",
            )
        elif len(trainers) == 1 and len(sites) > 1:
            scored = f"it is scored at {', '.join(testers) or 'no site'}"
            unknown = ", and its score at other sites is not known" if len(testers) < len(sites) else ""
            yield trainers[0], f"no other site has outlined {name!r} for training: {scored}{unknown}"


def _different_lists(named: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield a site and a note where it names other classes than the first site; both name some."""
    lists = {site: names for site, names in named.items() if names}
    for site, names in [*lists.items()][1:]:
        owner, others = next(iter(lists.items()))
        if {*names} != {*others}:
            yield (
                site,
                f"its classes are {', '.join(names.values())}, and those of site {owner} are "
                f"{', '.join(others.values())}: where a site has not outlined a structure, list what it has "
                f"outlined under {LABELLED!r} in its dataset.json",
            )


def _similar(name: str, other: str) -> bool:
    """Return whether one name has all words of the other, or they differ by few letters."""
    words, others = set(name.split()), set(other.split())
    return words <= others or others <= words or SequenceMatcher(None, name, other).ratio() >= _ALIKE
