"""Refuse DICOM objects: `require` what an object must have; `check_bounds` of deflated ones."""

import io
import zlib
from pathlib import Path

from pydicom.filereader import read_dataset, read_preamble
from pydicom.uid import DeflatedExplicitVRLittleEndian

from medfedaug.errors import ReaderError

MOST_INFLATED = 2**29
"""Bytes of the largest deflated object, inflated."""


def require(condition: object, fault: str) -> None:
    """Refuse an object that cannot be read: raise `ReaderError` with its fault."""
    if not condition:
        raise ReaderError(fault)


def check_bounds(source: Path | bytes) -> None:
    """Check the size of a deflated object, which parsers inflate as a whole."""
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        try:
            read_preamble(file, force=True)
            meta = read_dataset(file, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 2)
        except Exception as error:  # a damaged header fails anywhere in pydicom
            raise ReaderError("a damaged DICOM file (its header cannot be read)") from error
        if meta.get("TransferSyntaxUID") != DeflatedExplicitVRLittleEndian:
            return
        try:
            inflated = zlib.decompressobj(-zlib.MAX_WBITS).decompress(file.read(), MOST_INFLATED + 1)
        except zlib.error as error:
            raise ReaderError("a damaged DICOM file (it cannot be inflated)") from error
    require(
        len(inflated) <= MOST_INFLATED, f"a DICOM file that inflates to more than {MOST_INFLATED >> 20} MiB"
    )
