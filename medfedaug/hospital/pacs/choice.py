"""`plan_import`: choose the series of a study that are its image, its channels and its label maps."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from medfedaug.hospital.dicom.identity import is_own_series
from medfedaug.hospital.dicom.series import compile_series
from medfedaug.hospital.pacs.archive import (
    Archive,
    ArchiveError,
    ArchiveSeries,
    ArchiveStudy,
    Patience,
    StudyQuery,
)
from medfedaug.hospital.pacs.settings import LABELS, NEWEST, ImportSettings

NO_STUDY = "the archive has no such study"  # problem of a query without a result
_IMAGES = ("CT", "MR", "PT", "NM")
_BURNED_IN = ("US", "SC", "OT", "XC", "ES")
_LOCALISER = re.compile(r"locali[sz]er|scout|survey|topogram", re.IGNORECASE)


@dataclass(frozen=True)
class SeriesRow:
    """Series of a study in the table of an import, with the decision about it."""

    modality: str
    number: str
    objects: int | None
    decision: str


@dataclass
class StudyPlan:
    """Series of a study, and the decisions about them, under pseudonyms of study (``case``) and patient.

    ``images`` are the image; or the channels in order; or possible images, of which label objects refer to
    one.
    """

    case: str
    patient: str
    study: ArchiveStudy | None = None  # where the search succeeded
    images: list[ArchiveSeries] = field(default_factory=list)
    labels: list[ArchiveSeries] = field(default_factory=list)
    rows: list[SeriesRow] = field(default_factory=list)
    problem: str = ""  # reason why the study is not imported

    @property
    def objects(self) -> int:
        """Number of objects to fetch, as far as the archive says."""
        return sum(series.instances or 0 for series in (*self.images, *self.labels))


def plan_import(
    archive: Archive,
    queries: Sequence[StudyQuery],
    pseudonym: Callable[[str, str], str],
    settings: ImportSettings,
    on_event: Callable[[dict[str, object]], object] = lambda event: None,
) -> list[StudyPlan]:
    """Find studies, and choose their series, without fetching.

    A refused search costs one study.

    ``pseudonym`` takes a name and its kind (``case``, ``patient``), and uses the site's key; ``on_event`` is
    called with ``{"event": "found", "number": ..., "of": ...}`` after each search.
    """
    plans: dict[str, StudyPlan] = {}
    patience = Patience()
    for number, query in enumerate(queries, 1):
        case = pseudonym(query.value, "case")
        try:
            studies = archive.find_studies(query)
            patience.heard()
            for study in studies:
                plans[study.uid] = _plan(study, archive.find_series(study), pseudonym, settings)
        except ArchiveError as error:
            plans[case] = StudyPlan(case, "", problem=patience.problem(error))
        else:
            if not studies:
                plans[case] = StudyPlan(case, "", problem=NO_STUDY)
        on_event({"event": "found", "number": number, "of": len(queries)})
    return [*plans.values()]


def _plan(
    study: ArchiveStudy,
    series: Sequence[ArchiveSeries],
    pseudonym: Callable[[str, str], str],
    settings: ImportSettings,
) -> StudyPlan:
    plan = StudyPlan(pseudonym(study.uid, "case"), pseudonym(study.person, "patient"), study)
    by_channel: dict[str, list[ArchiveSeries]] = {name: [] for name in settings.channels or [""]}
    left_out = 0
    for one in series:
        if one.modality == LABELS.get(settings.labels):
            fetched, decision = _label_decision(one, settings)
            plan.labels += [one] if fetched else []
            left_out += not fetched
        else:
            channel, decision = _decision(one, settings)
            if channel is not None:
                by_channel[channel].append(one)
        plan.rows.append(SeriesRow(one.modality, one.number, one.instances, decision))
    plan.images = [one for images in by_channel.values() for one in images]
    plan.problem = _problem(by_channel, plan.labels, left_out, settings)
    return plan


def _label_decision(series: ArchiveSeries, settings: ImportSettings) -> tuple[bool, str]:
    """Decide whether to fetch a series of label objects; also return the text of the decision."""
    rules = [rule for rule in settings.label_series if rule != NEWEST]
    if rules and not any(_fits(series, rule) for rule in rules):
        return False, "left out: not what --label-series names"
    if is_own_series(series.number, series.description) and not settings.automatic_labels:
        return False, "left out: a prediction of medfedaug; --automatic-labels takes it"
    return True, "label map" if settings.automatic_labels else "label map, unless it is automatic"


def _decision(series: ArchiveSeries, settings: ImportSettings) -> tuple[str | None, str]:
    """Return the channel of a series, empty for an image without channels, and the text of the decision."""
    if series.modality in _BURNED_IN and not settings.allow_burned_in:
        return None, "left out: may hold text in its pixels; --allow-burned-in takes it"
    if settings.channels:
        name = next((name for name, rule in settings.channels.items() if _fits(series, rule)), None)
        return name, "left out: no --channel names it" if name is None else f"channel {name}"
    if settings.series is not None:
        fits = _fits(series, settings.series)
        return ("", "image") if fits else (None, "left out: not what --series names")
    if series.modality not in _IMAGES:
        return None, "left out: no image, or none of CT, MR, PT, NM"
    if series.localiser or _LOCALISER.search(series.description):
        return None, "left out: a localiser"
    return "", "image"


def _fits(series: ArchiveSeries, rule: str) -> bool:
    pattern = compile_series(rule)
    text = f"{series.number} {series.description} {series.modality}"
    return series.uid == rule or (pattern is not None and pattern.search(text) is not None)


def _problem(
    by_channel: Mapping[str, Sequence[ArchiveSeries]],
    labels: Sequence[ArchiveSeries],
    left_out: int,
    settings: ImportSettings,
) -> str:
    for name, series in by_channel.items():
        kind = f"channel {name}" if name else "possible image"
        hint = "choose with --channel" if name else "choose with --series"
        if not series:
            return f"no series is a {kind}; {hint}"
        # Among several images without a rule, label objects refer to one.
        if len(series) > 1 and (name or settings.series is not None or not labels):
            return f"{len(series)} series are a {kind}, expected one; {hint}"
    if settings.outlined and not labels:
        exception = f" but {left_out} series that were left out" if left_out else ""
        return f"it has no {LABELS[settings.labels]}{exception}"
    return ""
