"""`plan_import`: which series of a study are its image, its channels and its label maps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from medfedaug.data.io.dicom_identity import is_own_series
from medfedaug.data.io.dicom_series import compile_series
from medfedaug.data.pacs.archive import Archive, ArchiveError, FoundSeries, FoundStudy, Wanted
from medfedaug.data.pacs.import_settings import LABELS, NEWEST, ImportSettings
from medfedaug.data.pacs.patience import Patience

NO_STUDY = "the archive has no such study"
"""Problem of a study that was looked for and not found."""

_IMAGES = ("CT", "MR", "PT", "NM")
_BURNED_IN = ("US", "SC", "OT", "XC", "ES")
_LOCALISER = re.compile(r"locali[sz]er|scout|survey|topogram", re.IGNORECASE)


@dataclass(frozen=True)
class SeriesRow:
    """Series of a study in the table of an import, with the decision about it in words."""

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

    ``pseudonym`` is of a name and its kind (``case``, ``patient``), with the site's key; ``on_event`` is
    called with ``{"event": "found", "number": ..., "of": ...}`` after each search.

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
        else:
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
    rules = [rule for rule in settings.label_series if rule != NEWEST]
    if rules and not any(_fits(one, rule) for rule in rules):
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
