"""Find copies of an image in two splits, within a site and across sites."""

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
Entry = tuple[str, SiteFolder, Case]
"""A case with its split and site."""


def check_copies(sites: Sequence[SiteFolder]) -> None:
    """Check that no image is in two splits, as a link or a copy, within and across sites.

    Files are compared by length first, so that few are read. A compressed NIfTI file ends with the length and
    the checksum of its content, by which volumes of different compression are equal. Volumes are refused;
    photographs, which published data sets have in two splits, cause a warning.
    """
    # The check of each site alone finds copies within it.
    copies = find_copies(sites, apart=len(sites) > 1)
    for (first, owner, original), (split, site, case) in copies:
        other = own(original.image) if owner is site else f"{own(original.image)} of site {owner.name}"
        problem = f"the image of a {split} case is that of a {first} case, {other}"
        if site.task == "segmentation":
            hint = "A patient belongs to one split only, or the test is not one: take one of them out."
            raise site.error(problem, case.image, hint=hint)
        if len(copies) > 1:
            problem += f", and {len(copies) - 1} more are in two splits"
        hint = "The test is not one for these: take them out of one split."
        warn(problem, site=site.name, path=case.image, hint=hint)
        return


def find_copies(sites: Sequence[SiteFolder], apart: bool) -> list[tuple[Entry, Entry]]:
    """Find pairs of entries with one image in two splits, as a link or a copy; ``apart``: at two sites."""
    by_file: dict[Path, list[Entry]] = defaultdict(list)
    cases = ((split, site, case) for site in sites for split in SPLITS for case in site.cases[split])
    entries = [entry for entry in cases if entry[2].index is None]  # slices share a file
    files = real_paths(case.image for *_, case in entries)
    for entry in entries:
        by_file[files[entry[2].image]].append(entry)
    copies = [[entry for path in paths for entry in by_file[path]] for paths in _equal(list(by_file))]
    pairs = [_pair(group, apart) for group in (*by_file.values(), *copies)]
    return [pair for pair in pairs if pair]


def _pair(entries: Sequence[Entry], apart: bool) -> tuple[Entry, Entry] | None:
    """Return two entries of different splits and, if ``apart``, of different sites."""
    first = entries[0]
    others = [e for e in entries[1:] if e[0] != first[0] and not (apart and e[1] is first[1])]
    return (first, others[0]) if others else None


def _equal(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield groups of files, or folders of files, with the same content."""
    for same_length in _groups(paths, _length):
        quick_key = _checksum if any(map(_compressed, same_length)) else _sample
        for alike in _groups(same_length, quick_key):
            yield from _groups(alike, lambda path: _digest(path, file_states([path])))


def _groups(paths: Sequence[Path], key: Callable[[Path], Hashable]) -> list[list[Path]]:
    groups: dict[Hashable, list[Path]] = defaultdict(list)
    for path in paths:
        try:
            groups[key(path)].append(path)
        except (OSError, EOFError, struct.error, zlib.error):
            continue  # a reader of the file raises an error that names it
    return [group for group in groups.values() if len(group) > 1]


def _length(path: Path) -> Hashable:
    """Return the length of the content modulo 2^32, as gzip stores it."""
    if _compressed(path):
        return _trailer(path)[1]
    return sum(file.stat().st_size for file in voxel_files(path)) % 2**32 or path


def _checksum(path: Path) -> Hashable:
    """Return the CRC-32 of a file's content, compressed or not; `_sample` in formats without compression."""
    if _compressed(path):
        return _trailer(path)[0]
    compressible = any(suffix.endswith(_GZIP) for suffix in format_of(path).suffixes)
    return _crc32(path, path.stat().st_mtime_ns) if compressible else _sample(path)


@lru_cache(maxsize=2**14)
def _crc32(path: Path, modified: int) -> int:
    checksum = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _sample(path: Path) -> Hashable:
    """Return bytes from the middle of each file."""
    samples = set()
    for file in voxel_files(path):
        with file.open("rb") as stream:
            stream.seek(max(0, (file.stat().st_size - _SAMPLE) // 2))
            samples.add(stream.read(_SAMPLE))
    return frozenset(samples)


def _compressed(path: Path) -> bool:
    return image_suffix(path.name).lower().endswith(_GZIP)


def _trailer(path: Path) -> tuple[int, int]:
    """Return the checksum and length of a gzip file's content."""
    with path.open("rb") as file:
        file.seek(-8, 2)
        checksum, length = struct.unpack("<II", file.read(8))
        return checksum, length


@lru_cache(maxsize=2**14)
def _digest(path: Path, status: Hashable) -> Hashable:
    return frozenset(_sha256(file, gzip.open if _compressed(path) else open) for file in voxel_files(path))


def _sha256(file: Path, opener: Callable[..., Any]) -> bytes:
    digest = hashlib.sha256()
    with opener(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.digest()
