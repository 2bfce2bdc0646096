"""Check that the sites' files have not changed since a run began or finished."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from medfedaug.data.base import SPLITS, SiteFolder
from medfedaug.data.io.formats import files_of
from medfedaug.errors import DataError
from medfedaug.utils.files import sha256


def fingerprint_sites(sites: Sequence[SiteFolder], splits: Sequence[str] = SPLITS) -> dict[str, str]:
    """Hash, for each site, the images and label maps of some splits.

    The results of a finished run follow from all splits. Cases for validation and test change no weight, and
    may be repaired before a run is continued.
    """
    hashes = {}
    for site in sites:
        files = [(split, *file) for split in splits for file in _hashes(site, split).items()]
        hashes[site.name] = hashlib.blake2b(repr(files).encode(), digest_size=8).hexdigest()
    return hashes


def check_same_files(recorded: Mapping[str, str], now: Mapping[str, str], run: str, data: Path) -> None:
    """Check that the sites' files are those of a run, which is described in words."""
    for site in sorted({*recorded, *now}):
        if recorded.get(site) != now.get(site):
            known = "has other files" if site in now else "is not there"
            problem = f"{'is new' if site not in recorded else known} since {run}"
            raise DataError(problem, site=site, path=data / site, hint="Restore the files, or begin anew")


def _hashes(site: SiteFolder, split: str) -> dict[str, str]:
    """Return the hash of each file of the images and label maps of a split, sorted by name."""
    paths = (path for case in site.cases[split] for path in (*case.files, case.label))
    files = {file for path in paths if isinstance(path, Path) for file in files_of(path) if file.is_file()}
    states = {os.path.relpath(file, site.path): (file.absolute(), file.stat()) for file in files}
    return {name: _hash(file, s.st_size, s.st_mtime_ns) for name, (file, s) in sorted(states.items())}


@lru_cache(maxsize=2**16)  # the runs of a sweep have the same files
def _hash(file: Path, size: int, modified: int) -> str:
    return sha256(file)
