"""Identify a case by its decoded voxels, for any name, place and compression of its file."""

import hashlib
import logging
from functools import partial

import numpy as np
from monai.utils import convert_to_tensor

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.io.formats import voxel_files
from medfedaug.errors import MedFedAugError
from medfedaug.hospital.privacy.ledger import PrivacyLedger

_log = logging.getLogger(__name__)

_PIECE = 2**16


def case_identities(site: SiteFolder, split: str, store: PrivacyLedger | None = None) -> dict[bytes, bytes]:
    """Compute an identity of 16 bytes for each case of a split, with its patient's.

    A case's identity is a hash of the image's decoded voxels, as float32: it survives another compression,
    type or format of the file, and changes with any voxel. A file that cannot be decoded has a hash of its
    bytes.

    Decoding takes as long as reading the image for training, so a store keeps the result by the sizes of the
    image's files and 64 KiB each from their beginnings, middles and ends.

    A patient's identity is a hash of the name in the site's list, or the case's identity without a name.
    """
    keys = [(case, _hash_files(case)) for case in site.cases[split]]
    compute = {key: partial(_hash_voxels, site, case, key) for case, key in keys}
    hashes = {key: f() for key, f in compute.items()} if store is None else store.identities(compute)
    of_name = partial(hashlib.blake2b, digest_size=16, person=b"patient")
    return {
        hashes[key]: of_name(case.patient.encode("utf-8", "replace")).digest()
        if case.patient
        else hashes[key]
        for case, key in keys
    }


def _hash_voxels(site: SiteFolder, case: Case, default: bytes) -> bytes:
    """Hash the stored voxels of a case; return the default of a case that cannot be decoded."""
    digest = hashlib.blake2b(repr(case.index).encode(), digest_size=16, person=b"voxels")
    channels, grid = 0, ()
    try:
        for part in site.read_files(case):
            voxels = np.ascontiguousarray(convert_to_tensor(part, track_meta=False).numpy(), dtype=np.float32)
            channels, grid = channels + voxels.shape[0], voxels.shape[1:]
            digest.update(voxels.data)
    except MedFedAugError as error:  # training cannot read it either
        _log.warning("known by its bytes: %s", error)
        return default
    digest.update(repr((channels, *grid)).encode())
    return digest.digest()


def _hash_files(case: Case) -> bytes:
    digest = hashlib.blake2b(repr(case.index).encode(), digest_size=16)
    for image in case.files:
        # Without separate files, the voxels follow the header in the image's file.
        for path in [file for file in voxel_files(image) if file.is_file()] or [image]:
            size = path.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                for start in sorted({0, max(0, size // 2 - _PIECE // 2), max(0, size - _PIECE)}):
                    file.seek(start)
                    digest.update(file.read(_PIECE))
    return digest.digest()
