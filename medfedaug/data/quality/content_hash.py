"""Identify a case by its content, wherever its file lies and whatever its name is."""

from __future__ import annotations

import hashlib
from pathlib import Path

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.io.voxel_files import voxel_files

__all__ = ["case_identities"]

_PIECE = 2**16


def case_identities(site: SiteFolder, split: str) -> dict[bytes, bytes]:
    """An identity of 16 bytes for each case of a split, with that of its patient.

    It is a hash of the sizes of the image's files and of 64 KiB each from their beginnings, middles and ends:
    two images with the same identity are copies, and a file of gigabytes is not read for it. A file that was
    written again is another one. A patient is known by a hash of the name in the site's list; a case without
    one stands for a patient, and has the case's identity.

    Args:
        site: the site's data.
        split: one of `medfedaug.data.base.SPLITS`.
    """
    cases = ((_identity(case), case.patient) for case in site.cases[split])
    return {identity: _patient(name) if name else identity for identity, name in cases}


def _patient(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=16, person=b"patient").digest()


def _identity(case: Case) -> bytes:
    digest = hashlib.blake2b(repr(case.index).encode(), digest_size=16)
    for path in (file for image in case.files for file in _voxels(image)):
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for start in sorted({0, max(0, size // 2 - _PIECE // 2), max(0, size - _PIECE)}):
                file.seek(start)
                digest.update(file.read(_PIECE))
    return digest.digest()


def _voxels(image: Path) -> list[Path]:
    # A header may also say that the voxels follow it in its own file.
    return [file for file in voxel_files(image) if file.is_file()] or [image]
