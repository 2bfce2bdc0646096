"""`check_bounds`: refuse DICOM objects that inflate, or nest, beyond the needs of images.

Parsers of DICOM inflate a deflated object as a whole, and follow sequences by recursion: SimpleITK's GDCM
crashes at some ten thousand of them. So an object is checked before it is parsed.
"""

import io
import mmap
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

from pydicom.filereader import read_dataset, read_preamble
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRBigEndian, ImplicitVRLittleEndian

from medfedaug.errors import ReaderError

MOST_INFLATED = 2**29
"""Bytes of the largest deflated object, inflated."""
_MOST_LEVELS = 128  # of sequences and their items
_FEW_ITEMS = 500  # harmless for parsers in any nesting
_MARKS = (b"\xfe\xff\x00\xe0", b"\xff\xfe\xe0\x00")  # of an item, in both byte orders
_UNDEFINED = 0xFFFFFFFF
_OPEN = 2**63  # the end of a level of undefined length
_LONG = {b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"}
_BYTES = (b"OB", b"OW")
_GARBLED = "a damaged DICOM file (its elements do not follow each other)"


def check_bounds(source: Path | bytes) -> None:
    """Check the size and the structure of a DICOM object, without reading its values."""
    if isinstance(source, bytes):
        _check(io.BytesIO(source), source)
    elif source.stat().st_size:
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _check(file, content)


def _check(file: BinaryIO, content: bytes | mmap.mmap) -> None:
    try:
        read_preamble(file, force=True)
        meta = read_dataset(file, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 2)
        syntax = str(meta.get("TransferSyntaxUID", ImplicitVRLittleEndian))
    except Exception as error:  # a damaged header fails anywhere in pydicom
        raise ReaderError(_GARBLED) from error
    start = file.tell()
    if syntax == DeflatedExplicitVRLittleEndian:
        content, start = _inflated(content[start:]), 0
    if any(_has_many(content, mark) for mark in _MARKS):
        order = ">" if syntax == ExplicitVRBigEndian else "<"
        _check_nesting(content, start, implicit=syntax == ImplicitVRLittleEndian, order=order)


def _has_many(content: bytes | mmap.mmap, mark: bytes) -> bool:
    place = -1
    return all((place := content.find(mark, place + 1)) >= 0 for _ in range(_FEW_ITEMS))


def _inflated(content: bytes) -> bytes:
    try:
        inflated = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, MOST_INFLATED + 1)
    except zlib.error as error:
        raise ReaderError("a damaged DICOM file (it cannot be inflated)") from error
    if len(inflated) > MOST_INFLATED:
        raise ReaderError(f"a DICOM file that inflates to more than {MOST_INFLATED >> 20} MiB")
    return inflated


def _check_nesting(content: bytes | mmap.mmap, start: int, *, implicit: bool, order: str) -> None:
    """Walk over all elements, without recursion."""
    tags, length_32, length_16 = (struct.Struct(order + form) for form in ("HH", "I", "H"))
    levels: list[tuple[int, bool]] = []  # the end of each level, and whether its elements have no VR
    place = start
    try:
        while place < len(content):
            while levels and place >= levels[-1][0]:
                if place > levels.pop()[0]:
                    raise ReaderError(_GARBLED)
            group, element = tags.unpack_from(content, place)
            form = levels[-1][1] if levels else implicit
            if group == 0xFFFE:
                (length,) = length_32.unpack_from(content, place + 4)
                place += 8
                if element == 0xE000:
                    end = _OPEN if length == _UNDEFINED else place + length
                    levels.append((end, form or _is_implicit(content, place)))
                else:
                    levels.pop()
                    continue
            else:
                vr = b"" if form else content[place + 4 : place + 6]
                if form:
                    (length,), place = length_32.unpack_from(content, place + 4), place + 8
                elif vr in _LONG:
                    (length,), place = length_32.unpack_from(content, place + 8), place + 12
                else:
                    (length,), place = length_16.unpack_from(content, place + 6), place + 8
                if length == _UNDEFINED and vr in _BYTES:
                    place = _after_fragments(content, place, tags, length_32)
                elif length == _UNDEFINED or vr == b"SQ" or content[place : place + 4] in _MARKS:
                    end = _OPEN if length == _UNDEFINED else place + length
                    levels.append((end, form or vr == b"UN"))
                else:
                    place += length
            if len(levels) > _MOST_LEVELS:
                raise ReaderError("a DICOM file with sequences nested without end")
    except (struct.error, IndexError) as error:
        raise ReaderError(_GARBLED) from error


def _is_implicit(content: bytes | mmap.mmap, place: int) -> bool:
    """Return whether the element at a place has no VR, by pydicom's rule."""
    vr = content[place + 4 : place + 6]
    return not (vr.isalpha() and vr.isupper())


def _after_fragments(
    content: bytes | mmap.mmap, place: int, tags: struct.Struct, lengths: struct.Struct
) -> int:
    """Return the index after encapsulated pixels."""
    while tags.unpack_from(content, place) == (0xFFFE, 0xE000):
        place += 8 + lengths.unpack_from(content, place + 4)[0]
    return place + 8
