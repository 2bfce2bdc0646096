"""Checks across files and sites: class names, axes, and copies of an image in two splits."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from medfedaug.data.base import SPLITS, Case, SiteFolder, plain_name
from medfedaug.data.io.formats import format_of, image_suffix
from medfedaug.data.io.voxel_files import voxel_files
from medfedaug.errors import DataError, own, warn
from medfedaug.utils.files import real_paths

__all__ = [
    "check_classes",
    "check_copies",
    "check_files_alone",
    "check_folders_of_classes",
    "check_known_classes",
    "check_label_maps",
    "compare_axes",
    "find_copies",
]

_BLOCK, _SAMPLE = 2**20, 2**12
_GZIP = ".gz"
Entry = tuple[str, SiteFolder, Case]  # a case and its split and site
_PLANES = {"L": "sagittal", "R": "sagittal", "A": "coronal", "P": "coronal", "S": "axial", "I": "axial"}


def check_copies(sites: Sequence[SiteFolder]) -> None:
    """Check that no image of a split is also in another one, as a link or a copy, within and across sites.

    Files are compared by their length first, so that few of them are read. A compressed NIfTI file ends with
    the length and the checksum of its content: it is the same volume however it was packed. Volumes are
    refused; of photographs, whose published data sets have such copies, the first is told in a warning.

    Raises:
        DataError: naming site and file, and the other one.
    """
    # What a site has twice itself was found when it was looked at alone.
    leaks = find_copies(sites, apart=len(sites) > 1)
    for (first, owner, one), (split, site, case) in leaks:
        other = own(one.image) if owner is site else f"{own(one.image)} of site {owner.name}"
        told = f"the image of a {split} case is that of a {first} case, {other}"
        if site.task == "segmentation":
            hint = "A patient belongs to one split only, or the test is not one: take one of them out."
            raise DataError(told, site=site.name, path=case.image, hint=hint)
        if len(leaks) > 1:
            told += f", and {len(leaks) - 1} more are in two splits"
        hint = "The test is not one for these: take them out of one split."
        warn(told, site=site.name, path=case.image, hint=hint)
        return


def check_label_maps(site: SiteFolder) -> None:
    """Warn where one file is listed as the label map of two images, which a slip in a list may be."""
    first: dict[Path, Case] = {}
    shared: list[tuple[Case, Case]] = []
    # Slices of one file share its label map.
    cases = [case for split in SPLITS for case in site.cases[split] if case.index is None]
    labels = [(case, case.label) for case in cases if isinstance(case.label, Path)]
    places = real_paths(label for _, label in labels)
    for case, label in labels:
        one = first.setdefault(places[label], case)
        if one is not case:
            shared.append((one, case))
    if shared:
        one, case = shared[0]
        told = f"its label map is that of {own(one.image)}, too"
        if len(shared) > 1:
            told += f", and {len(shared) - 1} more share one"
        warn(told, site=site.name, path=case.image, hint="List for each image a label map of its own.")


def find_copies(sites: Sequence[SiteFolder], apart: bool) -> list[tuple[Entry, Entry]]:
    """Images that are in two splits, as a link or a copy: one pair for each image.

    Args:
        sites: the sites.
        apart: only those in splits of different sites.

    Returns:
        Split, site and case of the first and of another.
    """
    listed: dict[Path, list[Entry]] = defaultdict(list)
    # Slices of one file are told apart by their index.
    entries = [
        (split, site, case)
        for site in sites
        for split in SPLITS
        for case in site.cases[split]
        if case.index is None
    ]
    places = real_paths(case.image for *_, case in entries)
    for entry in entries:
        listed[places[entry[2].image]].append(entry)
    linked = list(listed.values())
    copied = [[entry for path in paths for entry in listed[path]] for paths in _equal(list(listed))]
    pairs = [_pair(entries, apart) for entries in (*linked, *copied)]
    return [pair for pair in pairs if pair]


def _pair(entries: Sequence[Entry], apart: bool) -> tuple[Entry, Entry] | None:
    """Two entries of different splits, and where they are to be ``apart``, of different sites."""
    first = entries[0]
    others = [e for e in entries[1:] if e[0] != first[0] and not (apart and e[1] is first[1])]
    return (first, others[0]) if others else None


def _equal(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Groups of files, or folders of files, with the same content."""
    for long in _groups(paths, _length):
        packed = any(map(_compressed, long))  # then compared by the checksums that these have
        for alike in _groups(long, _checksum if packed else _sample):
            yield from _groups(alike, _digest)


def _groups(paths: Sequence[Path], key: Callable[[Path], Hashable]) -> list[list[Path]]:
    found: dict[Hashable, list[Path]] = defaultdict(list)
    for path in paths:
        try:
            found[key(path)].append(path)
        except (OSError, EOFError, struct.error, zlib.error):
            continue  # whoever reads it will say what is wrong with it
    return [group for group in found.values() if len(group) > 1]


def _length(path: Path) -> Hashable:
    """The length of the content, modulo 2^32 as gzip has it."""
    if _compressed(path):
        return _trailer(path)[1]
    return sum(file.stat().st_size for file in voxel_files(path)) % 2**32 or path


def _checksum(path: Path) -> Hashable:
    """The CRC-32 of a file's content, compressed or not; as `_sample` in formats that are not compressed."""
    if _compressed(path):
        return _trailer(path)[0]
    compressible = any(suffix.endswith(_GZIP) for suffix in format_of(path).suffixes)
    return _crc32(path, path.stat().st_mtime_ns) if compressible else _sample(path)


@lru_cache(maxsize=2**14)
def _crc32(path: Path, modified: int) -> int:
    found = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


def _sample(path: Path) -> Hashable:
    """Some bytes from the middle of the files."""
    return frozenset(map(_middle, voxel_files(path)))


def _middle(file: Path) -> bytes:
    with file.open("rb") as stream:
        stream.seek(max(0, (file.stat().st_size - _SAMPLE) // 2))
        return stream.read(_SAMPLE)


def _compressed(path: Path) -> bool:
    return image_suffix(path.name).lower().endswith(_GZIP)


def _trailer(path: Path) -> tuple[int, int]:
    """The checksum and length of a gzip file's content."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        checksum, length = struct.unpack("<II", file.read(8))
        return checksum, length


def _digest(path: Path) -> Hashable:
    status = [file.stat() for file in voxel_files(path)]
    return _known_digest(path, tuple((file.st_mtime_ns, file.st_size) for file in status))


@lru_cache(maxsize=2**14)
def _known_digest(path: Path, status: Hashable) -> Hashable:
    return frozenset(_hashed(file, gzip.open if _compressed(path) else open) for file in voxel_files(path))


def _hashed(file: Path, opened: Callable[..., Any]) -> bytes:
    digest = hashlib.sha256()
    with opened(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.digest()


def compare_axes(site: str, axes: Mapping[str, Path], first: tuple[str, str, Path] | None = None) -> None:
    """Warn where the axes of volumes point in different directions, since slices are cut along the last axis.

    Args:
        site: whose volumes.
        axes: where their axes point to (`medfedaug.data.io.readers.Header.upright_axes`), each with one
            volume.
        first: the same of a volume at another site, before its name.
    """
    if not axes:
        return
    owner, (code, path) = ("", next(iter(axes.items()))) if first is None else (first[0], first[1:])
    other = f"{path.name} of site {owner}" if owner else path.name
    for different, volume in axes.items():
        if different == code:
            continue
        here, there = _PLANES[different[2]], _PLANES[code[2]]
        told = f"its slices are {here}, those of {other} {there}"
        if here == there:
            told = f"its slices are turned against those of {other}"
        warn(
            f"{told} (axes to {different}, there to {code})",
            site=site,
            path=volume,
            hint="Bring the volumes to one orientation, for instance with nibabel.as_closest_canonical.",
        )
        return


def check_classes(site: SiteFolder, expected: Sequence[str], whose: str) -> None:
    """Check that the labels of a site have the same names as elsewhere.

    Capitals, spaces, ``_`` and ``-`` do not matter, and ``foreground`` is any one class.

    Args:
        site: the site.
        expected: the classes in the order of their labels.
        whose: they are, for the message.

    Raises:
        DataError: naming the site and both names.
    """
    listing = site.path / site.listing
    if len(site.classes) != len(expected):
        there = set(map(plain_name, site.classes))
        fewer = there < set(map(plain_name, expected))
        lacking = [name for name in expected if fewer and plain_name(name) not in there]
        told = f", without {', '.join(lacking)}" if lacking else ""
        # What a site did not annotate would be background there, and be learned as such.
        raise DataError(
            f"{len(site.classes)} classes{told}, {whose} has {len(expected)}",
            site=site.name,
            path=listing,
            hint="All sites need the same classes: annotate what is there of each, and name one that no case "
            "has, too.",
        )
    for label, (name, other) in enumerate(zip(site.classes, expected, strict=True)):
        unnamed = len(expected) == 2 and label == 1 and "foreground" in (plain_name(name), plain_name(other))
        if plain_name(name) != plain_name(other) and not unnamed:
            raise DataError(
                f"label {label} is {name!r}, and {other!r} for {whose}",
                site=site.name,
                path=listing,
                hint="All sites need the same classes in the same order.",
            )


def check_known_classes(site: SiteFolder, expected: Sequence[str]) -> None:
    """Check that a site of photographs has no class that the federation does not know; it may lack some.

    Raises:
        DataError: naming the site and the class.
    """
    unknown = sorted(set(site.classes) - set(expected))
    if unknown:
        raise DataError(
            f"the class '{own(unknown[0])}' is not among the federation's: {', '.join(expected)}",
            site=site.name,
            path=site.path,
        )


def check_files_alone(site: SiteFolder, who: str) -> None:
    """Check that who reads a site's files without us gets the images of the federation.

    Args:
        site: the site.
        who: reads them, for the message.

    Raises:
        DataError: where channels are missing or in another order, images are in archives, or label maps have
            other values than the indices of the classes.
    """
    if site.label_values:
        raise DataError(
            f"has label maps with the values {', '.join(map(str, site.label_values))}, and {who} reads files "
            "as they are",
            site=site.name,
            path=site.path,
            hint="Write the index of each voxel's class: 0, 1, 2, ...",
        )
    if site.channel_places:
        raise DataError(
            f"has other channels than the federation, or in another order, and {who} reads files as they are",
            site=site.name,
            path=site.path,
        )
    if any(case.index is not None for cases in site.cases.values() for case in cases):
        raise DataError(f"has its images in archives, and {who} reads files", site=site.name, path=site.path)


def check_folders_of_classes(sites: Sequence[SiteFolder]) -> None:
    """Check that folders of classes mean the same classes at all sites; a site may lack some.

    Raises:
        DataError: for two names that differ only as `check_classes` does not mind, naming site and both.
    """
    where: dict[str, list[tuple[str, SiteFolder]]] = defaultdict(list)
    for site in sites:
        for name in site.classes:
            where[plain_name(name)].append((name, site))
    for (first, owner), *others in where.values():
        for name, site in others:
            if name != first:
                raise DataError(
                    f"{name!r} and {first!r} of site {owner.name} would be two classes",
                    site=site.name,
                    path=site.path,
                    hint="Give the folders one name.",
                )
        if not others and len(sites) > 1:
            warn(f"no other site has the class {first!r}", site=owner.name, path=owner.path / first)
