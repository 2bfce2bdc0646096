"""`DicomSeries`: the slices of a series in the order of their volume, or the reason why they make none."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from medfedaug.data.io.base import plausible_edges
from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom.checks import require
from medfedaug.hospital.dicom.headers import SECONDARY_CAPTURES, VOLUME_TAGS, DicomInstance, DicomSlice
from medfedaug.hospital.dicom.pixels import undecodable
from medfedaug.utils.printable import counted

_UNEVEN = 0.1  # share of the usual gap: rounding in headers is far below, a missing slice far above
_ONE_PLACE = 0.01  # mm along the normal: nearer slices lie in one place
_TILT = 0.5  # degrees
_SKEW = 0.02  # deviation of lengths and cosine of directions, beyond rounding


@dataclass(frozen=True, eq=False)
class DicomSeries:
    """Slices of a series that make one volume, in their order."""

    first: DicomInstance  # header of one of its files
    slices: tuple[DicomSlice, ...]  # along their normal, or by InstanceNumber without positions
    part: str = ""  # text that distinguishes it from other volumes of the series
    problem: str = ""  # reason why it cannot be read
    remarks: tuple[str, ...] = ()  # sentences for the user
    burned_in: bool = False  # a header says that the pixels hold text

    @property
    def uid(self) -> str:
        """SeriesInstanceUID of the series."""
        return self.first.series

    @cached_property
    def files(self) -> tuple[Path, ...]:
        """Files of its slices, each once, in the order of the slices."""
        return tuple(dict.fromkeys(piece.file for piece in self.slices))

    @cached_property
    def folders(self) -> tuple[Path, ...]:
        """Folders of its files."""
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
    def stated_affine(self) -> np.ndarray:
        """The affine; `ReaderError` where the files do not say it."""
        if self.affine is None:
            raise ReaderError("its slices do not say where they lie")
        return self.affine

    @property
    def gap(self) -> float:
        """Distance between slices along their normal, mm; for a single slice its thickness, or 1."""
        first, last = self.slices[0], self.slices[-1]
        if len(self.slices) < 2 or first.position is None or last.position is None:
            return first.thickness or 1.0
        step = np.subtract(last.position, first.position) / (len(self.slices) - 1)
        return float(abs(_normal(first) @ step))

    @property
    def is_secondary_capture(self) -> bool:
        """Return whether its images show a screen or paper, by their class or ImageType."""
        return self.first.sop_class in SECONDARY_CAPTURES or "SCREEN SAVE" in self.first.image_type

    @property
    def is_localiser(self) -> bool:
        """Return whether its images were made to plan others, by ImageType."""
        return "LOCALIZER" in self.first.image_type

    @property
    def is_sheared(self) -> bool:
        """Return whether its slices are shifted along their planes, as by a tilted gantry."""
        if self.affine is None:
            return False
        return _tilt(self.affine[:3, 2], np.cross(self.affine[:3, 0], self.affine[:3, 1])) > _TILT

    @property
    def searched(self) -> str:
        """Text in which `select` searches for a pattern: number, description, part, modality, UID."""
        words = (self.first.number, self.first.description, self.part, self.first.modality, self.uid)
        return " ".join(filter(None, words))

    @property
    def text(self) -> str:
        """Describe the series for a list of choices: description, part and number of slices."""
        number = f"series {self.first.number}" if self.first.number else "a series"
        words = (number, self.first.description, self.part, self.first.modality)
        return f"{' '.join(filter(None, words))} ({counted(len(self.slices), 'slice')}, UID {self.uid})"

    @property
    def doubt(self) -> str:
        """Reason why a prediction of a folder leaves the series out; empty for a usual series."""
        if self.is_localiser:
            return "a localiser"
        if self.is_secondary_capture:
            return "a secondary capture in colour" if self.channels > 1 else "a secondary capture"
        return ""


def volumes_of(instances: Sequence[DicomInstance]) -> list[DicomSeries]:
    """Return the volumes that the files of one series make."""
    all_slices = [piece for instance in instances for piece in instance.slices]
    if problem := _wrong_header(instances):
        # A wrong header may belong to another place or kind of image: no part of the series is sure.
        burned_in = any(instance.burned_in for instance in instances)
        return [DicomSeries(instances[0], tuple(all_slices), problem=problem, burned_in=burned_in)]
    by_path = {instance.path: instance for instance in instances}
    parts: list[tuple[str, list[DicomSlice]]] = []
    orientations = _by_orientation(all_slices)
    for slices in orientations:
        name = _orientation_name(slices[0]) if len(orientations) > 1 else ""
        parts += [(_joined(name, part), group) for part, group in _separated(slices, VOLUME_TAGS)]
    volumes = []
    for part, slices in parts:
        members = [by_path[path] for path in dict.fromkeys(piece.file for piece in slices)]
        ordered, remarks, problem = slices, list[str](), ""
        try:
            _check_alike(members, slices)
            ordered, remarks = _ordered(slices)
        except ReaderError as error:
            problem = str(error)
        if any(instance.inverted for instance in members):
            remarks.append("its lowest values are white (MONOCHROME1), and are read as the highest")
        burned_in = any(instance.burned_in for instance in members)
        volumes.append(
            DicomSeries(members[0], tuple(ordered), part, problem, tuple(remarks), burned_in=burned_in)
        )
    return volumes


def _joined(*texts: str) -> str:
    return ", ".join(filter(None, texts))


def _wrong_header(instances: Sequence[DicomInstance]) -> str:
    """Return the fault of the first wrong header of a series; empty without one."""
    wrong = next((piece for one in instances for piece in one.slices if piece.problem), None)
    if wrong is not None:
        image = f" (image {wrong.number})" if wrong.number is not None else ""
        return f"{wrong.problem}{image}: fetch or export it again; look at {_place_name(wrong)}"
    if len({one.person for one in instances}) > 1:
        return "its files name different patients: fetch or export it again"
    return ""


def _check_alike(instances: Sequence[DicomInstance], slices: Sequence[DicomSlice]) -> None:
    """Refuse slices that make no volume in any geometry."""
    fault = next(filter(None, map(undecodable, instances)), "")
    require(not fault, fault)
    kinds = Counter(piece.pixels for piece in slices)
    listed = "; ".join(f"{count} of {kind}" for kind, count in kinds.most_common())
    rare = next(piece for piece in slices if piece.pixels == kinds.most_common()[-1][0])
    require(len(kinds) == 1, f"its slices differ in their pixels: {listed}; look at {_place_name(rare)}")
    require(
        len({one.frame_of_reference for one in instances}) == 1,
        "its slices lie in different frames of reference, so their places are not comparable",
    )


def _by_orientation(slices: Sequence[DicomSlice]) -> list[list[DicomSlice]]:
    """Group slices by orientation and channels, the largest group first."""
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
    """Number the places of slices along their normal; slices in one place share a number."""
    normal = _normal(slices[0])
    along = [float(normal @ np.asarray(piece.position)) for piece in slices]
    order = np.argsort(along)
    steps = np.diff(np.asarray(along)[order]) > _ONE_PLACE
    places = np.empty(len(slices), int)
    places[order] = np.concatenate([[0], np.cumsum(steps)])
    return places.tolist()


def _most_in_one_place(slices: Sequence[DicomSlice]) -> int:
    return max(Counter(_places(slices)).values())


def _separated(
    slices: list[DicomSlice], tags: Sequence[tuple[str, str]]
) -> list[tuple[str, list[DicomSlice]]]:
    """Separate volumes of one orientation by tags, where several slices lie in one place."""
    if any(piece.position is None for piece in slices):
        return [("", slices)]
    most = _most_in_one_place(slices)
    for index, (name, words) in enumerate(tags if most > 1 else ()):
        groups: dict[str, list[DicomSlice]] = defaultdict(list)
        for piece in slices:
            groups[piece.tags.get(name, "")].append(piece)
        # More groups than slices in one place: a time that differs by slice would make volumes of one slice.
        if not 1 < len(groups) <= most or max(map(_most_in_one_place, groups.values())) == most:
            continue
        parts = []
        for value, group in sorted(groups.items(), key=lambda item: _numeric(item[0])):
            number = _numeric(value)[0]
            short = f"{number:g}" if np.isfinite(number) else value
            text = words.format(short) if value else f"without {name}"
            parts += [(_joined(text, rest), part) for rest, part in _separated(group, tags[index + 1 :])]
        return parts
    return [("", slices)]


def _numeric(text: str) -> tuple[float, str]:
    with suppress(ValueError):
        return float(text), text
    return np.inf, text


def _ordered(slices: list[DicomSlice]) -> tuple[list[DicomSlice], list[str]]:
    """Return slices in the order of their volume, and remarks; `ReaderError` where they make none."""
    first = slices[0]
    sizes = Counter((piece.columns, piece.rows) for piece in slices)
    require(len(sizes) == 1, f"its slices differ in size: {_listed(sizes)}")
    edges = Counter(piece.spacing or ("none",) for piece in slices)
    alike = all(_alike(piece.spacing, first.spacing, 1e-3) for piece in slices)
    require(alike, f"its slices differ in pixel spacing: {_listed(edges)}")
    placed = {piece.position is not None for piece in slices}
    require(len(placed) == 1, "some of its slices do not say where they lie")
    if first.position is None or first.orientation is None:
        return _by_number(slices)
    normal = _normal(first)
    directions = np.reshape(first.orientation, (2, 3))
    require(
        np.abs(directions @ directions.T - np.eye(2)).max() <= _SKEW,
        "the directions of its rows and columns are not unit vectors at right angles",
    )
    along = (np.array([piece.position for piece in slices]) @ normal).tolist()
    order = sorted(range(len(slices)), key=lambda index: (along[index], slices[index].number or 0, index))
    ordered = [slices[index] for index in order]
    if len(ordered) == 1:
        return ordered, []
    gaps = np.diff([along[index] for index in order])
    usual = float(np.median(gaps))
    apart = gaps.max() > _ONE_PLACE
    require(apart, f"its {len(ordered)} slices lie in one place: a time series is not a volume")
    require(plausible_edges((usual,)), f"its slices are {usual:.4g} mm apart")
    odd = int(np.abs(gaps - usual).argmax())
    pair = " and ".join(dict.fromkeys(_place_name(piece) for piece in ordered[odd : odd + 2]))
    require(
        np.abs(gaps - usual).max() <= _UNEVEN * abs(usual),
        f"slices are missing, double or uneven: {len(ordered)} slices, {np.abs(gaps).min():.4g} to "
        f"{np.abs(gaps).max():.4g} mm apart; look at {pair}",
    )
    return ordered, _remarks(ordered, normal / float(np.linalg.norm(normal)))


def _by_number(slices: list[DicomSlice]) -> tuple[list[DicomSlice], list[str]]:
    if len(slices) == 1:
        return slices, []
    files = {piece.file for piece in slices}
    require(len(files) == len(slices), "all its slices are in one file, which does not say where each lies")
    numbers = {piece.number for piece in slices} - {None}
    known = len(numbers) == len(slices)
    require(known, "its slices say neither where they lie nor in which order they follow")
    remark = "its slices do not say where they lie, and follow each other by their numbers"
    return sorted(slices, key=lambda piece: piece.number or 0), [remark]


def _remarks(ordered: list[DicomSlice], normal: np.ndarray) -> list[str]:
    """Check that slices lie on a line, and return a remark where it leaves their normal."""
    positions = np.array([piece.position for piece in ordered])
    step = (positions[-1] - positions[0]) / (len(ordered) - 1)
    off = positions - positions[0] - np.arange(len(ordered))[:, None] * step
    across = np.linalg.norm(off - np.outer(off @ normal, normal), axis=1).max()
    straight = across <= 0.5 * min(ordered[0].spacing or (1.0,))
    require(straight, f"its slices are shifted against each other by up to {across:.3g} mm")
    tilt = _tilt(step, normal)
    sheared = (
        f"its slices are sheared by {tilt:.3g} degrees (a tilted gantry): the affine says so, and "
        "the network sees them sheared"
    )
    return [sheared] if tilt > _TILT else []


def _tilt(step: np.ndarray, normal: np.ndarray) -> float:
    """Return the angle between the step from slice to slice and the normal of the slices, degrees."""
    lengths = float(np.linalg.norm(step) * np.linalg.norm(normal))
    return float(np.rad2deg(np.arccos(min(1.0, abs(step @ normal) / lengths))))


def _place_name(piece: DicomSlice) -> str:
    return piece.file.name if not piece.frame else f"{piece.file.name}, frame {piece.frame + 1}"


def _listed(counts: Counter[Any]) -> str:
    return ", ".join(
        f"{count} of {' x '.join(f'{n:g}' if n != 'none' else 'no spacing' for n in value)}"
        for value, count in counts.most_common()
    )
