"""Check that the sites' files are those that a run began with, or was made with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from medfedaug.data.base import SPLITS, SiteFolder
from medfedaug.data.io.formats import files_of
from medfedaug.errors import DataError

Fingerprint = dict[str, dict[str, str]]
"""Size and hash of each file, by site and file."""

# Of a larger file, pieces are read: both ends, and between them at even distances.
_WHOLE, _PIECES, _PIECE = 2**24, 64, 2**16


def fingerprint_files(sites: Sequence[SiteFolder]) -> Fingerprint:
    """Sizes and hashes of the images and label maps of the sites' training cases.

    Cases for validation and test change no weight: one of them that could not be read may be mended before a
    run is continued.

    Of a file above 16 MiB, 64 pieces of 64 KiB are hashed, the first and the last among them: a change of the
    same length between them is not seen, unless the file is compressed.
    """
    return {site.name: _files(site, "training") for site in sites}


def fingerprint_sites(sites: Sequence[SiteFolder]) -> dict[str, str]:
    """Hash, for each site, the files of all its cases and their splits.

    For a finished run: its scores are of the test cases, and its round was selected by the validation cases.
    Files are read as by `fingerprint_files`.
    """
    found = (
        (site, [(split, *file) for split in SPLITS for file in _files(site, split).items()]) for site in sites
    )
    return {
        site.name: hashlib.blake2b(repr(files).encode(), digest_size=8).hexdigest() for site, files in found
    }


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
                what = (
                    "is new" if file not in before else "is missing" if file not in after else "has changed"
                )
                raise DataError(f"{what} since the run began", site=site, path=data / site / file, hint=hint)


def check_made_with(made: Mapping[str, str], now: Mapping[str, str], run: Path, data: Path) -> None:
    """Check that a finished run was made with the files that are there.

    Raises:
        DataError: naming the first site whose files are others, or that is missing or new.
    """
    for site in sorted({*made, *now}):
        if made.get(site) != now.get(site):
            what = "is new" if site not in made else "is not there" if site not in now else "has other files"
            raise DataError(
                f"{what} since the finished run in {run} was made",
                site=site,
                path=data / site,
                hint="Restore what was there (results.json there has a hash of the files), or choose another "
                "folder for the results",
            )


def _files(site: SiteFolder, split: str) -> dict[str, str]:
    """Size and hash of each file of the images and label maps of a split, sorted by name."""
    return dict(sorted(_hashes(site, split)))


def _hashes(site: SiteFolder, split: str) -> Iterator[tuple[str, str]]:
    named = {
        path for case in site.cases[split] for path in (*case.files, case.label) if isinstance(path, Path)
    }
    for path in named:
        for file in files_of(path):
            if file.is_file():
                status = file.stat()
                hashed = _hash(file.absolute(), status.st_size, status.st_mtime_ns)
                yield os.path.relpath(file, site.path), hashed


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
