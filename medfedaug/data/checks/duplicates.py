"""Find copies of an image in two splits, within a site and across sites."""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from medfedaug.data.base import SPLITS, Case, SiteFolder
from medfedaug.data.io.formats import file_states, format_of, image_suffix, voxel_files
from medfedaug.errors import own, warn
from medfedaug.utils.files import real_paths

_BLOCK, _SAMPLE = 2**20, 2**12
_GZIP = ".gz"
Entry = tuple[str, SiteFolder, Case]  # a case and its split and site


def check_copies(sites: Sequence[SiteFolder]) -> None:
    """Check that no image of a split is also in another one, as a link or a copy, within and across sites.

    Files are compared by their length first, so that few of them are read. A compressed NIfTI file ends with
    the length and the checksum of its content: it is the same volume however it was packed. Volumes are
    refused; of photographs, whose published data sets have such copies, the first is told in a warning.
    """
    # What a site has twice itself was found when it was looked at alone.
    leaks = find_copies(sites, apart=len(sites) > 1)
    for (first, owner, one), (split, site, case) in leaks:
        other = own(one.image) if owner is site else f"{own(one.image)} of site {owner.name}"
        told = f"the image of a {split} case is that of a {first} case, {other}"
        if site.task == "segmentation":
            hint = "A patient belongs to one split only, or the test is not one: take one of them out."
            raise site.error(told, case.image, hint=hint)
        if len(leaks) > 1:
            told += f", and {len(leaks) - 1} more are in two splits"
        hint = "The test is not one for these: take them out of one split."
        warn(told, site=site.name, path=case.image, hint=hint)
        return


def find_copies(sites: Sequence[SiteFolder], apart: bool) -> list[tuple[Entry, Entry]]:
    """Find pairs of entries with one image in two splits, as a link or a copy; ``apart``: at two sites."""
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
    return _known_digest(path, file_states([path]))


@lru_cache(maxsize=2**14)
def _known_digest(path: Path, status: Hashable) -> Hashable:
    return frozenset(_hashed(file, gzip.open if _compressed(path) else open) for file in voxel_files(path))


def _hashed(file: Path, opened: Callable[..., Any]) -> bytes:
    digest = hashlib.sha256()
    with opened(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.digest()
