"""Find copies of an image in two splits, within a site and across sites."""

import os
from collections import defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from medfedaug.data.base import SPLITS, Case, SiteFolder
from medfedaug.data.io.formats import FileState, file_states, voxel_files
from medfedaug.errors import own, warn
from medfedaug.utils.files import sha256

Entry = tuple[str, SiteFolder, Case]
"""A case with its split and site."""


def check_copies(sites: Sequence[SiteFolder]) -> None:
    """Check that no image is in two splits, as a link or a copy, within and across sites.

    Files are compared by length and a sample first, so that few are read. Volumes are refused; photographs,
    which published data sets have in two splits, cause a warning.
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
    for entry in entries:
        by_file[Path(os.path.realpath(entry[2].image))].append(entry)
    alike: dict[Hashable, list[Path]] = defaultdict(list)
    for path in by_file:
        with suppress(OSError):  # a reader of the file raises an error that names it
            alike[frozenset(map(_sample, voxel_files(path)))].append(path)
    by_content: dict[Hashable, list[Entry]] = defaultdict(list)
    for paths in alike.values():
        for path in paths:
            by_content[_digest(path, file_states([path])) if len(paths) > 1 else path] += by_file[path]
    return [pair for group in by_content.values() if (pair := _pair(group, apart))]


def _pair(entries: Sequence[Entry], apart: bool) -> tuple[Entry, Entry] | None:
    """Return two entries of different splits and, if ``apart``, of different sites."""
    first = entries[0]
    others = [e for e in entries[1:] if e[0] != first[0] and not (apart and e[1] is first[1])]
    return (first, others[0]) if others else None


def _sample(file: Path) -> tuple[int, bytes]:
    """Return the length of a file, and bytes from its middle."""
    length = file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(length // 2)
        return length, stream.read(2**12)


@lru_cache(maxsize=2**14)
def _digest(path: Path, states: tuple[FileState, ...]) -> Hashable:
    return frozenset(map(sha256, voxel_files(path)))
