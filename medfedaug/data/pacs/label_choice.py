"""`choose_outlines`: which label objects of a study, and which of their segments, become its label map.

A label map has one author for each class. Predictions are no ground truth; of several outlines of one class
one is chosen, or none; and a structure without a class is background only where somebody says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from medfedaug.data.pacs.import_settings import BACKGROUND, NEWEST, ImportSettings
from medfedaug.data.pacs.label_objects import LabelObject, Segment, class_of
from medfedaug.errors import ReaderError
from medfedaug.utils.printable import counted


class LabelRefused(ReaderError):
    """The label objects of a study leave open what its label map is.

    Args:
        text: the reason, with the choices; it has no name that somebody typed.
        segments: names of the segments that it is about, for the site's own list.
    """

    def __init__(self, text: str, segments: Sequence[str] = ()) -> None:
        self.segments = [*segments]
        super().__init__(text)


@dataclass(frozen=True, eq=False)
class Outline:
    """Label object that counts, with the class of each segment that counts, by its number."""

    source: LabelObject
    classes: Mapping[int, str]


def possible_outlines(objects: Sequence[LabelObject], settings: ImportSettings) -> list[LabelObject]:
    """Return the objects that are no predictions, or all where the settings take those, too."""
    return [one for one in objects if settings.automatic_labels or not (one.own or one.automatic)]


def choose_outlines(
    objects: Sequence[LabelObject], settings: ImportSettings
) -> tuple[list[Outline], list[str]]:
    """Choose among the label objects that refer to an image; return decisions too, in words without names.

    Raises:
        LabelRefused: where nothing is left, or the objects leave the choice open.
    """
    notes: list[str] = []
    kept = _by_persons(objects, settings, notes)
    outlines = _newest(kept, settings, notes)
    _check_background(kept, outlines, settings, notes)
    half = sum(one.algorithm == "SEMIAUTOMATIC" for one in _counting(outlines))
    if half:
        notes.append(f"{counted(half, 'segment')} of the type SEMIAUTOMATIC taken")
    return outlines, notes


@dataclass(frozen=True)
class _Kept:
    """Object of a person: its segments with their classes, and those that are left out as automatic."""

    source: LabelObject
    segments: Sequence[tuple[Segment, str | None]]
    automatic: Sequence[tuple[Segment, str | None]]

    @property
    def classes(self) -> dict[int, str]:
        return {one.number: name for one, name in self.segments if name and name != BACKGROUND}


def _by_persons(objects: Sequence[LabelObject], settings: ImportSettings, notes: list[str]) -> list[_Kept]:
    """Leave out predictions: objects of this software, and segments that no person had a hand in."""
    kept = [_kept(one, settings) for one in possible_outlines(objects, settings)]
    own = sum(one.own for one in objects)
    automatic = sum(one.automatic for one in objects if not one.own)
    fate = "taken" if settings.automatic_labels else "left out"
    if own:
        notes.append(f"{counted(own, 'prediction')} of medfedaug {fate}")
    if automatic:
        notes.append(f"{counted(automatic, 'automatic label object')} {fate}")
    if count := sum(len(one.automatic) for one in kept):
        notes.append(f"{counted(count, 'automatic segment')} left out")
    if not kept:
        raise LabelRefused(
            f"its label maps are predictions ({own} of medfedaug, {automatic} of other programs, by their "
            "algorithm type); --automatic-labels takes them"
        )
    return kept


def _kept(source: LabelObject, settings: ImportSettings) -> _Kept:
    by_hand = [one for one in source.segments if settings.automatic_labels or not one.automatic]
    if not settings.segments and len(by_hand) > 1:
        raise LabelRefused(
            "holds several segments; name their classes with --segments 'NAME=CLASS'",
            [one.name for one in by_hand],
        )

    def named(one: Segment) -> str | None:
        return class_of(one.name, settings.segments) if settings.segments else settings.classes[1]

    left = [one for one in source.segments if one not in by_hand]
    return _Kept(source, [(one, named(one)) for one in by_hand], [(one, named(one)) for one in left])


def _newest(kept: Sequence[_Kept], settings: ImportSettings, notes: list[str]) -> list[Outline]:
    """Keep one object for each class: of several the newest, where the settings say so."""
    outlines = [Outline(one.source, one.classes) for one in kept if one.classes]
    if not outlines:
        raise LabelRefused(
            "none of its segments has a name that --segments gives",
            [part.name for one in kept for part, _ in one.segments],
        )
    rivals = [one for one in outlines if any(other is not one and _shared(one, other) for other in outlines)]
    if not rivals:
        return outlines
    pairs = combinations(rivals, 2)
    names = ", ".join(sorted({name for one, other in pairs for name in _shared(one, other)}))
    what = f"{len(rivals)} outlines, in {len({one.source.series for one in rivals})} series, of {names}"
    typed = [part.name for part in _counting(rivals)]
    if NEWEST not in settings.label_series:
        raise LabelRefused(
            f"has {what}; choose with --label-series UID, REGEX or newest",
            typed,
        )
    dates = [one.source.date for one in rivals]
    if "" in dates or len({*dates}) < len(dates):
        raise LabelRefused(
            f"has {what}, and their dates do not say which is the newest",
            typed,
        )
    chosen: list[Outline] = []
    for one in sorted(rivals, key=lambda rival: rival.source.date, reverse=True):
        if not any(_shared(one, other) for other in chosen):
            chosen.append(one)
    notes.append(f"the newest of {what}")
    return [one for one in outlines if one not in rivals or one in chosen]


def _shared(one: Outline, other: Outline) -> set[str]:
    return {*one.classes.values()} & {*other.classes.values()}


def _counting(outlines: Sequence[Outline]) -> list[Segment]:
    return [part for one in outlines for part in one.source.segments if part.number in one.classes]


def _check_background(
    kept: Sequence[_Kept], outlines: Sequence[Outline], settings: ImportSettings, notes: list[str]
) -> None:
    """Refuse segments whose voxels would be background without a word.

    These are segments without a class, and automatic ones of a class that nobody else outlined.
    """
    chosen = {id(one.source) for one in outlines}
    drawn = {name for one in outlines for name in one.classes.values()}
    looked_at = [one for one in kept if id(one.source) in chosen or not one.classes]
    nameless = [part for one in looked_at for part, name in one.segments if name is None and not part.empty]
    lost = [
        (part, name)
        for one in looked_at
        for part, name in one.automatic
        if name not in drawn and name != BACKGROUND and not part.empty
    ]
    nameless += [part for part, name in lost if name is None]
    automatic = sorted({name for _, name in lost if name is not None})
    reasons = []
    if nameless:
        numbers = ", ".join(str(part.number) for part in nameless)
        reasons.append(
            f"{counted(len(nameless), 'segment')} (number {numbers}) without a class in --segments"
        )
    if automatic:
        reasons.append(f"only automatic segments of {', '.join(automatic)}")
    if not reasons:
        return
    text = f"has {' and '.join(reasons)}"
    if settings.unmapped == "refuse":
        more = ", --automatic-labels takes them" if automatic else ", or name them"
        raise LabelRefused(
            f"{text}; --unmapped background makes their voxels background{more}",
            [part.name for part in nameless],
        )
    notes.append(f"{text}: background")
