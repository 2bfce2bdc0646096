"""`plan_import`: which series of a study are its image, its channels and its label maps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from medfedaug.data.io.dicom_identity import is_own_series
from medfedaug.data.io.dicom_series import compile_series
from medfedaug.data.pacs.archive import Archive, ArchiveError, FoundSeries, FoundStudy, Wanted
from medfedaug.data.pacs.patience import Patience
from medfedaug.errors import ConfigError

BACKGROUND = "background"
"""Name of the class of voxels that no segment takes."""

NO_STUDY = "the archive has no such study"
"""Problem of a study that was looked for and not found."""

LABELS = {"seg": "SEG", "rtstruct": "RTSTRUCT"}
"""Kinds of label objects, each with its modality."""

_IMAGES = ("CT", "MR", "PT", "NM")
_BURNED_IN = ("US", "SC", "OT", "XC", "ES")
_LOCALISER = re.compile(r"locali[sz]er|scout|survey|topogram", re.IGNORECASE)
_NEWEST = "newest"
_CHANNEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]*")
_CHOICES = {
    "overlap": ("refuse", "priority"),
    "unmapped": ("refuse", BACKGROUND),
    "crossing": ("refuse", "union"),
}


@dataclass(frozen=True)
class ImportSettings:
    """Choices of an import.

    Args:
        series: UID of a series, or regular expression for number, description and modality.
        channels: in place of ``series``, one such rule for each channel, by the channel's name.
        labels: ``seg``, ``rtstruct`` or ``none``.
        segments: patterns of segment names, each with its class; ``background`` is one, too.
        classes: names of the federation's classes in their order, background first; by default those of
            ``segments``, in the order in which it names them first.
        label_series: rules of which a series of label objects has to fit one: a UID, or a regular expression
            as ``series``; and ``newest``, which takes the newest of several outlines of one class. Without
            any, several are refused.
        automatic_labels: whether predictions are label maps: objects and segments of the algorithm type
            AUTOMATIC, and those that this software wrote.
        unmapped: ``refuse`` segments without a class, or leave their voxels to the ``background``.
        crossing: ``refuse`` contours of one region that cross in a slice, or take their ``union``.
        threshold: share of its maximum from which a voxel of a fractional SEG counts.
        overlap: ``refuse`` segments of different classes that overlap, or give the voxels to the class that
            ``segments`` names first (``priority``).
        anonymise: whether the objects are kept, too, without identity.
        allow_burned_in: whether images may hold text in their pixels.
        parallel: series that are fetched at a time, and studies that are converted.
        refresh: whether studies are taken again of which the archive has other objects now.
        keep_versions: earlier versions of a case that are kept; ``None`` for as many as the import before.

    Raises:
        ConfigError: for a value that is none of these.
    """

    series: str | None = None
    channels: Mapping[str, str] = field(default_factory=dict)
    labels: str = "none"
    segments: Mapping[str, str] = field(default_factory=dict)
    classes: Sequence[str] = ()
    label_series: Sequence[str] = ()
    automatic_labels: bool = False
    unmapped: str = "refuse"
    crossing: str = "refuse"
    threshold: float = 0.5
    overlap: str = "refuse"
    anonymise: bool = False
    allow_burned_in: bool = False
    parallel: int = 2
    refresh: bool = False
    keep_versions: int | None = None

    def __post_init__(self) -> None:
        compile_series(self.series)
        for name, rule in self.channels.items():
            if not _CHANNEL.fullmatch(name):
                raise ConfigError(f"--channel {name!r}: a name has letters, digits, _, + and - alone")
            compile_series(rule, "--channel")
        if self.series is not None and self.channels:
            raise ConfigError("give one of --series and --channel")
        if self.labels not in (*LABELS, "none"):
            raise ConfigError(f"--labels {self.labels}: one of seg, rtstruct, none")
        for rule in self.label_series:
            compile_series(rule, "--label-series")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"--{name} {value}: one of {', '.join(choices)}")
        object.__setattr__(self, "classes", self._classes())
        if self.keep_versions is not None and self.keep_versions < 0:
            raise ConfigError("--keep-versions is at least 0")
        if not 0 < self.threshold <= 1 or self.parallel < 1:
            raise ConfigError("--threshold is above 0 and at most 1, --parallel at least 1")

    def _classes(self) -> tuple[str, ...]:
        named = [*dict.fromkeys(name for name in self.segments.values() if name != BACKGROUND)]
        if not self.classes:
            return (BACKGROUND, *(named or ["foreground"]))
        if self.classes[0] != BACKGROUND or len({*self.classes}) != max(2, len(self.classes)):
            raise ConfigError(
                f"--classes names each class of the federation once, {BACKGROUND} first: "
                f"--classes {BACKGROUND},tumour,edema"
            )
        for name in named:
            if name not in self.classes:
                raise ConfigError(
                    f"--segments gives the class {name!r}, and --classes has {', '.join(self.classes)}"
                )
        return tuple(self.classes)

    @property
    def priority(self) -> list[str]:
        """Names of the classes in the order in which overlapping voxels are given to them."""
        return [*dict.fromkeys([*self.segments.values(), *self.classes[1:]])]

    @property
    def newest_labels(self) -> bool:
        """Return whether the newest of several outlines of one class is taken."""
        return _NEWEST in self.label_series

    def takes_label_series(self, one: FoundSeries) -> bool:
        """Return whether a series of label objects fits one of the rules."""
        rules = [rule for rule in self.label_series if rule != _NEWEST]
        return not rules or any(_fits(one, rule) for rule in rules)

    @property
    def labelled(self) -> bool:
        """Return whether cases have label maps."""
        return self.labels != "none"


@dataclass(frozen=True)
class SeriesRow:
    """Series of a study in the table of an import.

    Args:
        modality: as the standard abbreviates it.
        number: SeriesNumber.
        objects: the number of its objects; ``None`` where the archive does not say.
        decision: what becomes of it, in words.
    """

    modality: str
    number: str
    objects: int | None
    decision: str


@dataclass
class Planned:
    """Series of a study, and what becomes of them.

    Args:
        case: pseudonym of the study.
        patient: pseudonym of the patient.
        study: as found; ``None`` where nothing was found.
        images: the image; or each channel in its order; or possible images, of which label objects refer to
            one.
        labels: series of label objects.
        rows: the table.
        problem: why nothing is imported; empty where something is.
    """

    case: str
    patient: str
    study: FoundStudy | None = None
    images: list[FoundSeries] = field(default_factory=list)
    labels: list[FoundSeries] = field(default_factory=list)
    rows: list[SeriesRow] = field(default_factory=list)
    problem: str = ""

    @property
    def objects(self) -> int:
        """Number of objects to fetch, as far as the archive says."""
        return sum(one.instances or 0 for one in (*self.images, *self.labels))


def plan_import(
    archive: Archive,
    wanted: Sequence[Wanted],
    pseudonym: Callable[[str, str], str],
    settings: ImportSettings,
    on_event: Callable[[dict[str, object]], object] = lambda event: None,
) -> list[Planned]:
    """Find studies, and choose their series; nothing is fetched.

    A search that the archive refuses costs its study.

    Args:
        archive: the archive.
        wanted: the studies.
        pseudonym: of a name and its kind (``case``, ``patient``), with the site's key.
        settings: the choices.
        on_event: called with ``{"event": "found", "number": ..., "of": ...}`` after each search.

    Raises:
        ArchiveError: where the archive cannot be used.
    """
    found: dict[str, Planned] = {}
    patience = Patience(archive.place)
    for number, one in enumerate(wanted, 1):
        lost = pseudonym(one.value, "case")
        try:
            studies = archive.find_studies(one)
            patience.heard()
            for study in studies:
                found[study.uid] = _planned(study, archive.find_series(study), pseudonym, settings)
        except ArchiveError as error:
            found[lost] = Planned(lost, "", problem=patience.problem(error))
        else:
            if not studies:
                found[lost] = Planned(lost, "", problem=NO_STUDY)
        on_event({"event": "found", "number": number, "of": len(wanted)})
    return [*found.values()]


def _planned(
    study: FoundStudy,
    series: Sequence[FoundSeries],
    pseudonym: Callable[[str, str], str],
    settings: ImportSettings,
) -> Planned:
    plan = Planned(pseudonym(study.uid, "case"), pseudonym(study.person, "patient"), study)
    by_channel: dict[str, list[FoundSeries]] = {name: [] for name in settings.channels or [""]}
    for one in series:
        if one.modality == LABELS.get(settings.labels):
            taken, decision = _label_decision(one, settings)
            plan.labels += [one] if taken else []
            plan.rows.append(SeriesRow(one.modality, one.number, one.instances, decision))
            continue
        channel, decision = _decision(one, settings)
        if channel is not None:
            by_channel[channel].append(one)
        plan.rows.append(SeriesRow(one.modality, one.number, one.instances, decision))
    plan.images = [one for found in by_channel.values() for one in found]
    others = sum(one.modality == LABELS.get(settings.labels) for one in series) - len(plan.labels)
    plan.problem = _problem(by_channel, plan.labels, others, settings)
    return plan


def _label_decision(one: FoundSeries, settings: ImportSettings) -> tuple[bool, str]:
    """Decide whether a series of label objects is fetched; return the decision in words too."""
    if not settings.takes_label_series(one):
        return False, "left out: not what --label-series names"
    if is_own_series(one.number, one.description) and not settings.automatic_labels:
        return False, "left out: a prediction of medfedaug; --automatic-labels takes it"
    return True, "label map" if settings.automatic_labels else "label map, unless it is automatic"


def _decision(one: FoundSeries, settings: ImportSettings) -> tuple[str | None, str]:
    """The channel that a series is, empty for an image without channels, and the decision in words."""
    if one.modality in _BURNED_IN and not settings.allow_burned_in:
        return None, "left out: may hold text in its pixels; --allow-burned-in takes it"
    if settings.channels:
        names = [name for name, rule in settings.channels.items() if _fits(one, rule)]
        if not names:
            return None, "left out: no --channel names it"
        return names[0], f"channel {names[0]}"
    if settings.series is not None:
        fits = _fits(one, settings.series)
        return ("", "image") if fits else (None, "left out: not what --series names")
    if one.modality not in _IMAGES:
        return None, "left out: no image, or none of CT, MR, PT, NM"
    if one.localiser or _LOCALISER.search(one.description):
        return None, "left out: a localiser"
    return "", "image"


def _fits(one: FoundSeries, rule: str) -> bool:
    pattern = compile_series(rule)
    searched = f"{one.number} {one.description} {one.modality}"
    return one.uid == rule or (pattern is not None and pattern.search(searched) is not None)


def _problem(
    by_channel: Mapping[str, Sequence[FoundSeries]],
    labels: Sequence[FoundSeries],
    other_labels: int,
    settings: ImportSettings,
) -> str:
    for name, found in by_channel.items():
        what = f"channel {name}" if name else "possible image"
        hint = "choose with --channel" if name else "choose with --series"
        if not found:
            return f"no series is a {what}; {hint}"
        # Of several images without a rule, label objects refer to one.
        if len(found) > 1 and (name or settings.series is not None or not labels):
            return f"{len(found)} series are a {what}, one was expected; {hint}"
    if settings.labelled and not labels:
        beside = f" but {other_labels} series that were left out" if other_labels else ""
        return f"it has no {LABELS[settings.labels]}{beside}"
    return ""
