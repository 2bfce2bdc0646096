"""Identify a case by its decoded voxels, whatever the name, the place and the packing of its file."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from monai.utils import convert_to_tensor

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.io.formats import voxel_files
from medfedaug.errors import MedFedAugError

_log = logging.getLogger(__name__)

_PIECE = 2**16


class IdentityStore(Protocol):
    """Store of identities by hashes of files, for each of which a function decodes them and hashes voxels."""

    def identities(self, files: Mapping[bytes, Callable[[], bytes]]) -> Mapping[bytes, bytes]: ...


def case_identities(site: SiteFolder, split: str, store: IdentityStore | None = None) -> dict[bytes, bytes]:
    """Compute an identity of 16 bytes for each case of a split, with that of its patient.

    It is a hash of the image's decoded voxels, as float32: a file that was written again, with other
    compression, in another type or format, keeps it. One voxel of another value makes another identity. A
    file that cannot be decoded is known by its bytes.

    Decoding takes the time of reading the image for training, so a store keeps the result by the sizes of the
    image's files and 64 KiB each from their beginnings, middles and ends.

    A patient is known by a hash of the name in the site's list; a case without one stands for a patient, and
    has the case's identity.
    """
    cases = site.cases[split]
    files = {case.name: _of_files(case) for case in cases}
    decode = {files[case.name]: partial(_of_voxels, site, case, files[case.name]) for case in cases}
    found = (
        store.identities(decode) if store is not None else {key: hashed() for key, hashed in decode.items()}
    )
    named = ((found[files[case.name]], case.patient) for case in cases)
    return {identity: _patient(name) if name else identity for identity, name in named}


def _patient(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=16, person=b"patient").digest()


def _of_voxels(site: SiteFolder, case: Case, otherwise: bytes) -> bytes:
    """Hash the voxels of a case as they are stored; of one that cannot be decoded, return the other hash."""
    digest = hashlib.blake2b(repr(case.index).encode(), digest_size=16, person=b"voxels")
    channels, grid = 0, ()
    try:
        for part in site.read_files(case):
            voxels = np.ascontiguousarray(convert_to_tensor(part, track_meta=False).numpy(), dtype=np.float32)
            channels, grid = channels + voxels.shape[0], voxels.shape[1:]
            digest.update(voxels.data)
    except MedFedAugError as error:  # it is not trained with either
        _log.warning("known by its bytes: %s", error)
        return otherwise
    digest.update(repr((channels, *grid)).encode())
    return digest.digest()


def _of_files(case: Case) -> bytes:
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
