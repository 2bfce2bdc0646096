"""`choose_outlines`: choose the label objects and segments that become the label map of a study.

A label map has one author for each class. Predictions are no ground truth; among several outlines of one
class one is chosen, or none; and a structure without a class is background only where the settings say so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from medfedaug.errors import ReaderError
from medfedaug.hospital.pacs.import_settings import BACKGROUND, NEWEST, ImportSettings
from medfedaug.hospital.pacs.label_objects import LabelObject, Segment, class_of
from medfedaug.utils.printable import counted


class LabelRefused(ReaderError):
    """The label objects of a study do not determine its label map.

    Args:
        text: the reason, with the choices; it has no name that a person typed.
        segments: names of the segments in question, for the site's list.
    """

    def __init__(self, text: str, segments: Sequence[str] = ()) -> None:
        self.segments = [*segments]
        super().__init__(text)


@dataclass(frozen=True, eq=False)
class Outline:
    """Chosen label object, with the classes of its chosen segments by number."""

    source: LabelObject
    classes: Mapping[int, str]


def possible_outlines(objects: Sequence[LabelObject], settings: ImportSettings) -> list[LabelObject]:
    """Return the objects that are no predictions; all, where the settings accept predictions."""
    return [item for item in objects if settings.automatic_labels or not (item.own or item.automatic)]


def choose_outlines(
    objects: Sequence[LabelObject], settings: ImportSettings
) -> tuple[list[Outline], list[str]]:
    """Choose among the label objects that refer to an image; also return the decisions, without names.

    Raises:
        LabelRefused: where no object is left, or the choice is open.
    """
    notes: list[str] = []
    candidates = _by_persons(objects, settings, notes)
    outlines = _newest(candidates, settings, notes)
    _check_background(candidates, outlines, settings, notes)
    half = sum(segment.algorithm == "SEMIAUTOMATIC" for segment in _chosen_segments(outlines))
    if half:
        notes.append(f"{counted(half, 'segment')} of the type SEMIAUTOMATIC taken")
    return outlines, notes


@dataclass(frozen=True)
class _Candidate:
    """Object of a person: its segments with their classes, and its omitted automatic segments."""

    source: LabelObject
    segments: Sequence[tuple[Segment, str | None]]
    automatic: Sequence[tuple[Segment, str | None]]

    @property
    def classes(self) -> dict[int, str]:
        return {segment.number: name for segment, name in self.segments if name and name != BACKGROUND}


def _by_persons(
    objects: Sequence[LabelObject], settings: ImportSettings, notes: list[str]
) -> list[_Candidate]:
    """Leave out predictions: objects of this software, and segments of programs alone."""
    candidates = [_candidate(item, settings) for item in possible_outlines(objects, settings)]
    own = sum(item.own for item in objects)
    automatic = sum(item.automatic for item in objects if not item.own)
    decision = "taken" if settings.automatic_labels else "left out"
    if own:
        notes.append(f"{counted(own, 'prediction')} of medfedaug {decision}")
    if automatic:
        notes.append(f"{counted(automatic, 'automatic label object')} {decision}")
    if count := sum(len(candidate.automatic) for candidate in candidates):
        notes.append(f"{counted(count, 'automatic segment')} left out")
    if not candidates:
        raise LabelRefused(
            f"its label maps are predictions ({own} of medfedaug, {automatic} of other programs, by their "
            "algorithm type); --automatic-labels takes them"
        )
    return candidates


def _candidate(source: LabelObject, settings: ImportSettings) -> _Candidate:
    by_hand: list[tuple[Segment, str | None]] = []
    automatic: list[tuple[Segment, str | None]] = []
    for segment in source.segments:
        name = class_of(segment.name, settings.segments) if settings.segments else settings.classes[1]
        omitted = segment.automatic and not settings.automatic_labels
        (automatic if omitted else by_hand).append((segment, name))
    if not settings.segments and len(by_hand) > 1:
        raise LabelRefused(
            "holds several segments; name their classes with --segments 'NAME=CLASS'",
            [segment.name for segment, _ in by_hand],
        )
    return _Candidate(source, by_hand, automatic)


def _newest(candidates: Sequence[_Candidate], settings: ImportSettings, notes: list[str]) -> list[Outline]:
    """Keep one object for each class: of several the newest, where the settings say so."""
    outlines = [Outline(candidate.source, candidate.classes) for candidate in candidates if candidate.classes]
    if not outlines:
        raise LabelRefused(
            "none of its segments has a name that --segments gives",
            [segment.name for candidate in candidates for segment, _ in candidate.segments],
        )
    rivals = [one for one in outlines if any(other is not one and _shared(one, other) for other in outlines)]
    if not rivals:
        return outlines
    pairs = combinations(rivals, 2)
    classes = ", ".join(sorted({name for one, other in pairs for name in _shared(one, other)}))
    text = f"{len(rivals)} outlines, in {len({one.source.series for one in rivals})} series, of {classes}"
    names = [segment.name for segment in _chosen_segments(rivals)]
    if NEWEST not in settings.label_series:
        raise LabelRefused(f"has {text}; choose with --label-series UID, REGEX or newest", names)
    dates = [one.source.date for one in rivals]
    if "" in dates or len({*dates}) < len(dates):
        raise LabelRefused(f"has {text}, and their dates do not say which is the newest", names)
    chosen: list[Outline] = []
    for one in sorted(rivals, key=lambda rival: rival.source.date, reverse=True):
        if not any(_shared(one, other) for other in chosen):
            chosen.append(one)
    notes.append(f"the newest of {text}")
    return [one for one in outlines if one not in rivals or one in chosen]


def _shared(one: Outline, other: Outline) -> set[str]:
    return {*one.classes.values()} & {*other.classes.values()}


def _chosen_segments(outlines: Sequence[Outline]) -> list[Segment]:
    return [segment for one in outlines for segment in one.source.segments if segment.number in one.classes]


def _check_background(
    candidates: Sequence[_Candidate], outlines: Sequence[Outline], settings: ImportSettings, notes: list[str]
) -> None:
    """Refuse segments whose voxels would silently be background.

    These are segments without a class, and automatic ones of a class that no person outlined.
    """
    chosen = {id(one.source) for one in outlines}
    outlined = {name for one in outlines for name in one.classes.values()}
    relevant = [
        candidate for candidate in candidates if id(candidate.source) in chosen or not candidate.classes
    ]
    nameless = [
        segment
        for candidate in relevant
        for segment, name in candidate.segments
        if name is None and not segment.empty
    ]
    lost = [
        (segment, name)
        for candidate in relevant
        for segment, name in candidate.automatic
        if name not in outlined and name != BACKGROUND and not segment.empty
    ]
    nameless += [segment for segment, name in lost if name is None]
    automatic = sorted({name for _, name in lost if name is not None})
    reasons = []
    if nameless:
        numbers = ", ".join(str(segment.number) for segment in nameless)
        reasons.append(
            f"{counted(len(nameless), 'segment')} (number {numbers}) without a class in --segments"
        )
    if automatic:
        reasons.append(f"only automatic segments of {', '.join(automatic)}")
    if not reasons:
        return
    text = f"has {' and '.join(reasons)}"
    if settings.unmapped == "refuse":
        remedy = "--automatic-labels takes them" if automatic else "or name them"
        raise LabelRefused(
            f"{text}; --unmapped background makes their voxels background, {remedy}",
            [segment.name for segment in nameless],
        )
    notes.append(f"{text}: background")
