"""`DicomSeries`: the slices of a series that make one volume, in their order, or why they make none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from medfedaug.data.io.bounds import plausible_edges
from medfedaug.data.io.dicom_headers import APART, SECONDARY_CAPTURES, DicomInstance, DicomSlice
from medfedaug.data.io.dicom_pixels import undecodable
from medfedaug.utils.printable import counted

# Of the usual distance between slices: rounding in the headers is far below, a slice that lacks far above.
_UNEVEN = 0.1
_ONE_PLACE = 0.01  # mm along the normal: slices that are nearer lie in one place
_TILT = 0.5  # degrees
_SKEW = 0.02  # of directions: their lengths and their cosine, beyond rounding


@dataclass(frozen=True, eq=False)
class DicomSeries:
    """The slices of a series that make one volume, in their order.

    Args:
        first: the header of one of its files.
        slices: along the normal of the slices, or by their numbers where they do not say where they lie.
        part: what tells it from other volumes of the series, in words; empty for the only one.
        problem: why it cannot be read, in words; empty where it can.
        remarks: what a user should know about it, a sentence each.
        burned_in: whether a header says that its pixels hold text.
    """

    first: DicomInstance
    slices: tuple[DicomSlice, ...]
    part: str = ""
    problem: str = ""
    remarks: tuple[str, ...] = ()
    burned_in: bool = False

    @property
    def uid(self) -> str:
        """SeriesInstanceUID of the series."""
        return self.first.series

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """The files of its slices, each once, in the order of the slices."""
        return tuple(dict.fromkeys(piece.file for piece in self.slices))

    @cached_property
    def folders(self) -> tuple[Path, ...]:
        """The folders that its files lie in."""
        return tuple(dict.fromkeys(sorted(file.parent for file in self.files)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels along x, y and z."""
        return self.slices[0].columns, self.slices[0].rows, len(self.slices)

    @property
    def channels(self) -> int:
        """Values of one voxel."""
        return self.slices[0].channels

    @cached_property
    def affine(self) -> np.ndarray | None:
        """(4, 4), from voxel indices to millimetres in RAS; ``None`` where the files do not say."""
        first, last = self.slices[0], self.slices[-1]
        if first.position is None or first.orientation is None or first.spacing is None:
            return None
        along_row, along_column = np.reshape(first.orientation, (2, 3))
        if len(self.slices) > 1 and last.position is not None:
            step = np.subtract(last.position, first.position) / (len(self.slices) - 1)
        else:
            step = np.cross(along_row, along_column) * (first.thickness or 1.0)
        affine = np.eye(4)
        affine[:3, 0] = along_row * first.spacing[1]
        affine[:3, 1] = along_column * first.spacing[0]
        affine[:3, 2], affine[:3, 3] = step, first.position
        affine[:2] *= -1
        return affine

    @property
    def gap(self) -> float:
        """The distance between slices along their normal, mm; of a single slice its thickness, or 1."""
        first, last = self.slices[0], self.slices[-1]
        if len(self.slices) < 2 or first.position is None or last.position is None:
            return first.thickness or 1.0
        apart = np.subtract(last.position, first.position) / (len(self.slices) - 1)
        return float(abs(_normal(first) @ apart))

    @property
    def is_secondary_capture(self) -> bool:
        """Return whether its objects are pictures of a screen or of paper, by their class or ImageType."""
        return self.first.sop_class in SECONDARY_CAPTURES or "SCREEN SAVE" in self.first.image_type

    @property
    def is_localiser(self) -> bool:
        """Return whether its images were made to plan others, by ImageType."""
        return "LOCALIZER" in self.first.image_type

    @property
    def is_sheared(self) -> bool:
        """Return whether its slices follow each other obliquely to their normal, as under a tilted gantry."""
        if self.affine is None:
            return False
        return _tilt(self.affine[:3, 2], np.cross(self.affine[:3, 0], self.affine[:3, 1])) > _TILT

    @property
    def searched(self) -> str:
        """The text that `select` looks for a pattern in: number, description, part, modality, identity."""
        named = (self.first.number, self.first.description, self.part, self.first.modality, self.uid)
        return " ".join(filter(None, named))

    @property
    def text(self) -> str:
        """Describe the series for a list to choose from: description, part and number of slices."""
        number = f"series {self.first.number}" if self.first.number else "a series"
        named = [number, self.first.description, self.part, self.first.modality]
        return f"{' '.join(filter(None, named))} ({counted(len(self.slices), 'slice')}, UID {self.uid})"

    @property
    def doubt(self) -> str:
        """Reason why a prediction of a folder leaves the series out; empty for a usual series."""
        if self.is_localiser:
            return "a localiser"
        if self.is_secondary_capture:
            return "a secondary capture in colour" if self.channels > 1 else "a secondary capture"
        return ""


def volumes_of(instances: Sequence[DicomInstance]) -> list[DicomSeries]:
    """The volumes that the files of one series make."""
    first = instances[0]
    burned_in = any(instance.burned_in for instance in instances)
    if wrong := _wrong_header(instances):
        # It may stand for another place or another kind of image, so no part of the series is sure.
        slices = [piece for instance in instances for piece in instance.slices]
        return [DicomSeries(first, tuple(slices), problem=wrong, burned_in=burned_in)]
    by_path = {instance.path: instance for instance in instances}
    parts: list[tuple[str, list[DicomSlice]]] = []
    turned = _by_orientation([piece for instance in instances for piece in instance.slices])
    for slices in turned:
        name = _orientation_name(slices[0]) if len(turned) > 1 else ""
        parts += [(", ".join(filter(None, (name, part))), group) for part, group in _apart(slices, [*APART])]
    found = []
    for part, slices in parts:
        ordered, problem, remarks = _ordered(slices)
        own = [by_path[path] for path in dict.fromkeys(piece.file for piece in ordered)]
        problem = next(filter(None, map(undecodable, own)), "") or _mixed(own, ordered) or problem
        if any(instance.photometric == "MONOCHROME1" for instance in own):
            remarks.append("its lowest values are white (MONOCHROME1), and are read as the highest")
        found.append(
            DicomSeries(
                own[0] if own else first,
                tuple(ordered),
                part,
                problem,
                tuple(remarks),
                burned_in=any(instance.burned_in for instance in own),
            )
        )
    return found


def _wrong_header(instances: Sequence[DicomInstance]) -> str:
    """The first header of a series that cannot be right, and why."""
    wrong = next((piece for one in instances for piece in one.slices if piece.problem), None)
    if wrong is not None:
        image = f" (image {wrong.number})" if wrong.number is not None else ""
        return f"{wrong.problem}{image}: fetch or export it again; look at {_place_name(wrong)}"
    if len({one.person for one in instances}) > 1:
        return "its files name different patients: fetch or export it again"
    return ""


def _mixed(instances: Sequence[DicomInstance], slices: Sequence[DicomSlice]) -> str:
    """Return the reason why slices are no one volume, however they lie."""
    kinds = Counter(piece.pixels for piece in slices)
    if len(kinds) > 1:
        listed = "; ".join(f"{count} of {kind}" for kind, count in kinds.most_common())
        rare = next(piece for piece in slices if piece.pixels == kinds.most_common()[-1][0])
        return f"its slices differ in their pixels: {listed}; look at {_place_name(rare)}"
    if len({one.frame_of_reference for one in instances}) > 1:
        return "its slices lie in different frames of reference, so their places are not comparable"
    return ""


def _by_orientation(slices: Sequence[DicomSlice]) -> list[list[DicomSlice]]:
    """Slices by their orientation and their channels, the largest group first."""
    groups: list[list[DicomSlice]] = []
    for piece in slices:
        for group in groups:
            if piece.channels == group[0].channels and _alike(piece.orientation, group[0].orientation, 1e-3):
                group.append(piece)
                break
        else:
            groups.append([piece])
    return sorted(groups, key=len, reverse=True)


def _alike(one: Sequence[float] | None, other: Sequence[float] | None, tolerance: float) -> bool:
    if one is None or other is None or one == other:
        return one == other
    return bool(np.allclose(one, other, rtol=tolerance, atol=tolerance))


def _orientation_name(piece: DicomSlice) -> str:
    if piece.orientation is None:
        return "of no stated orientation"
    axis = int(np.abs(_normal(piece)).argmax())
    return ("sagittal", "coronal", "axial")[axis] + (" in colour" if piece.channels > 1 else "")


def _normal(piece: DicomSlice) -> np.ndarray:
    return np.cross(*np.reshape(piece.orientation or (1, 0, 0, 0, 1, 0), (2, 3)))


def _places(slices: Sequence[DicomSlice]) -> list[int]:
    """Return the places of slices along their normal; slices in one place get one number."""
    normal = _normal(slices[0])
    along = [float(normal @ np.asarray(piece.position)) for piece in slices]
    order = np.argsort(along)
    steps = np.diff(np.asarray(along)[order]) > _ONE_PLACE
    places = np.empty(len(slices), int)
    places[order] = np.concatenate([[0], np.cumsum(steps)])
    return places.tolist()


def _apart(slices: list[DicomSlice], tags: Sequence[tuple[str, str]]) -> list[tuple[str, list[DicomSlice]]]:
    """Slices of one orientation as volumes, where several lie in one place and a header says why."""
    if any(piece.position is None for piece in slices):
        return [("", slices)]
    most = max(Counter(_places(slices)).values())
    if most == 1:
        return [("", slices)]
    for index, (name, words) in enumerate(tags):
        groups: dict[str, list[DicomSlice]] = defaultdict(list)
        for piece in slices:
            groups[dict(piece.tags).get(name, "")].append(piece)
        # A time that each slice has of its own would make volumes of one slice.
        if not 1 < len(groups) <= most:
            continue
        if max(max(Counter(_places(group)).values()) for group in groups.values()) == most:
            continue
        found = []
        for value, group in sorted(groups.items(), key=lambda item: _numeric(item[0])):
            own = words.format(_short(value)) if value else f"without {name}"
            found += [
                (", ".join(filter(None, (own, more))), part)
                for more, part in _apart(group, tags[index + 1 :])
            ]
        return found
    return [("", slices)]


def _short(text: str) -> str:
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def _numeric(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return np.inf, text


def _ordered(slices: list[DicomSlice]) -> tuple[list[DicomSlice], str, list[str]]:
    """Slices in the order in which they make a volume, what is wrong with them, and remarks."""
    first = slices[0]
    sizes = Counter((piece.columns, piece.rows) for piece in slices)
    if len(sizes) > 1:
        return slices, f"its slices differ in size: {_listed(sizes)}", []
    if any(not _alike(piece.spacing, first.spacing, 1e-3) for piece in slices):
        edges = Counter(piece.spacing or ("none",) for piece in slices)
        return slices, f"its slices differ in pixel spacing: {_listed(edges)}", []
    if any((piece.position is None) != (first.position is None) for piece in slices):
        return slices, "some of its slices do not say where they lie", []
    if first.position is None or first.orientation is None:
        return _by_number(slices)
    normal = _normal(first)
    length = float(np.linalg.norm(normal))
    directions = np.reshape(first.orientation, (2, 3))
    if np.abs(directions @ directions.T - np.eye(2)).max() > _SKEW:
        return slices, "the directions of its rows and columns are no unit vectors at right angles", []
    along = (np.array([piece.position for piece in slices]) @ normal).tolist()
    order = sorted(range(len(slices)), key=lambda index: (along[index], slices[index].number or 0, index))
    ordered = [slices[index] for index in order]
    if len(ordered) == 1:
        return ordered, "", []
    gaps = np.diff([along[index] for index in order])
    usual = float(np.median(gaps))
    if gaps.max() > _ONE_PLACE and not plausible_edges((usual,)):
        return ordered, f"its slices are {usual:.4g} mm apart", []
    if gaps.max() <= _ONE_PLACE:
        return ordered, f"its {len(ordered)} slices lie in one place: a series in time is no volume", []
    if np.abs(gaps - usual).max() > _UNEVEN * abs(usual):
        odd = int(np.abs(gaps - usual).argmax())
        pair = " and ".join(dict.fromkeys(_place_name(piece) for piece in ordered[odd : odd + 2]))
        return (
            ordered,
            f"slices are missing, double or uneven: {len(ordered)} slices, {np.abs(gaps).min():.4g} to "
            f"{np.abs(gaps).max():.4g} mm apart; look at {pair}",
            [],
        )
    return _on_a_line(ordered, normal / length)


def _by_number(slices: list[DicomSlice]) -> tuple[list[DicomSlice], str, list[str]]:
    if len(slices) == 1:
        return slices, "", []
    if len({piece.file for piece in slices}) < len(slices):
        return slices, "all its slices are in one file, which does not say where each lies", []
    numbers = [piece.number for piece in slices]
    if None in numbers or len({*numbers}) < len(numbers):
        return slices, "its slices say neither where they lie nor in which order they follow", []
    remark = "its slices do not say where they lie, and follow each other by their numbers"
    return sorted(slices, key=lambda piece: piece.number or 0), "", [remark]


def _on_a_line(ordered: list[DicomSlice], normal: np.ndarray) -> tuple[list[DicomSlice], str, list[str]]:
    positions = np.array([piece.position for piece in ordered])
    step = (positions[-1] - positions[0]) / (len(ordered) - 1)
    off = positions - positions[0] - np.arange(len(ordered))[:, None] * step
    across = np.linalg.norm(off - np.outer(off @ normal, normal), axis=1).max()
    if across > 0.5 * min(ordered[0].spacing or (1.0,)):
        return ordered, f"its slices are shifted against each other by up to {across:.3g} mm", []
    tilt = _tilt(step, normal)
    if tilt > _TILT:
        remark = (
            f"its slices are sheared by {tilt:.3g} degrees (a tilted gantry): the affine says so, and "
            "the network sees them sheared"
        )
        return ordered, "", [remark]
    return ordered, "", []


def _tilt(step: np.ndarray, normal: np.ndarray) -> float:
    """Degrees between the way from slice to slice and the normal of the slices."""
    lengths = float(np.linalg.norm(step) * np.linalg.norm(normal))
    return float(np.rad2deg(np.arccos(min(1.0, abs(step @ normal) / lengths))))


def _place_name(piece: DicomSlice) -> str:
    return piece.file.name if not piece.frame else f"{piece.file.name}, frame {piece.frame + 1}"


def _listed(found: Counter[Any]) -> str:
    return ", ".join(
        f"{number} of {' x '.join(f'{n:g}' if n != 'none' else 'no spacing' for n in value)}"
        for value, number in found.most_common()
    )
