"""Check that the sites' files have not changed since a run began or finished."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from medfedaug.data.base import SPLITS, SiteFolder
from medfedaug.data.io.formats import files_of
from medfedaug.errors import DataError

Fingerprint = dict[str, dict[str, str]]
"""Size and hash of each file, by site and file."""

# Above the first size, pieces of a file are hashed, evenly spaced and including both ends.
_WHOLE, _PIECES, _PIECE = 2**24, 64, 2**16


def fingerprint_files(sites: Sequence[SiteFolder]) -> Fingerprint:
    """Return sizes and hashes of the images and label maps of the sites' training cases.

    Cases for validation and test change no weight, and may be repaired before a run is continued.

    Of a file above 16 MiB, 64 pieces of 64 KiB are hashed, with both ends: a change of the same length
    between the pieces is not detected, unless the file is compressed.
    """
    return {site.name: _hashes(site, "training") for site in sites}


def fingerprint_sites(sites: Sequence[SiteFolder]) -> dict[str, str]:
    """Hash, for each site, the files of all its cases and their splits, as `fingerprint_files` does.

    The results of a finished run follow from the validation and test cases, too.
    """
    hashes = {}
    for site in sites:
        files = [(split, *file) for split in SPLITS for file in _hashes(site, split).items()]
        hashes[site.name] = hashlib.blake2b(repr(files).encode(), digest_size=8).hexdigest()
    return hashes


def check_unchanged(began: Mapping[str, Mapping[str, str]], now: Fingerprint, data: Path) -> None:
    """Check that a run is continued with the files that it began with."""
    hint = "Restore it, or begin anew with --overwrite"
    for site in sorted({*began, *now}):
        if site not in now or site not in began:
            reason = "is not there, and the run began with this site"
            if site in now:
                reason, hint = "the run began without this site", hint.replace("Restore it", "Move it away")
            raise DataError(reason, site=site, path=data / site, hint=hint)
        before, after = began[site], now[site]
        for file in sorted({*before, *after}):
            if before.get(file) != after.get(file):
                change = "is new" if file not in before else "has changed" if file in after else "is missing"
                raise DataError(
                    f"{change} since the run began", site=site, path=data / site / file, hint=hint
                )


def check_same_files(recorded: Mapping[str, str], now: Mapping[str, str], run: Path, data: Path) -> None:
    """Check that the sites' files are the files of a finished run."""
    for site in sorted({*recorded, *now}):
        if recorded.get(site) != now.get(site):
            change = (
                "is new" if site not in recorded else "has other files" if site in now else "is not there"
            )
            problem = f"{change} since the finished run in {run} was made"
            hint = "Restore the files (results.json has their hash), or choose another folder for the results"
            raise DataError(problem, site=site, path=data / site, hint=hint)


def _hashes(site: SiteFolder, split: str) -> dict[str, str]:
    """Return size and hash of each file of the images and label maps of a split, sorted by name."""
    paths = (path for case in site.cases[split] for path in (*case.files, case.label))
    files = {file for path in paths if isinstance(path, Path) for file in files_of(path) if file.is_file()}
    states = {os.path.relpath(file, site.path): (file.absolute(), file.stat()) for file in files}
    return {name: _hash(file, s.st_size, s.st_mtime_ns) for name, (file, s) in sorted(states.items())}


@lru_cache(maxsize=2**16)  # the runs of a sweep have the same files
def _hash(file: Path, size: int, modified: int) -> str:
    digest = hashlib.blake2b(digest_size=8)
    with file.open("rb") as stream:
        if size <= _WHOLE:
            digest.update(stream.read())
        else:
            for index in range(_PIECES):
                stream.seek((size - _PIECE) * index // (_PIECES - 1))
                digest.update(stream.read(_PIECE))
    return f"{size}:{digest.hexdigest()}"
