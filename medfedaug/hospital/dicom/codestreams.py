"""Walk over the markers of JPEG, JPEG-LS and JPEG 2000 images, without decoding them.

A decoder takes the size of an image from its compressed data, goes on where they break off, and skips
comments. `describe` returns the size, and refuses incomplete data; `without_comments` keeps decoded parts.
Markers: ITU-T T.81 Annex B (JPEG), T.87 Annex C (JPEG-LS), T.800 Annex A (JPEG 2000).
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from medfedaug.errors import ReaderError

_JP2_START = b"\0\0\0\x0cjP  "
_J2K_START = b"\xff\x4f\xff\x51"
_SIZE, _TILE, _DATA, _END = 0x51, 0x90, 0x93, 0xD9
_SCAN, _J2K_COMMENT, _J2K_LENGTHS = 0xDA, 0x64, (0x55, 0x57, 0x58)
_FRAMES = {*range(0xC0, 0xD0), 0xF7} - {0xC4, 0xC8, 0xCC}
_COMMENTS = {0xFE, *range(0xE0, 0xF0)}
# The marker that ends the coded values of a scan: no stuffing, no restart, no fill byte.
_NEXT_MARKER = re.compile(rb"\xff[\x80-\xcf\xd8-\xfe]")
# Application segments with the coding of colours: their first bytes, the bytes that replace numbers which no
# decoder needs, and the index of the byte to keep.
_COLOURS = {
    0xE0: (b"JFIF\0", b"\1\1\0\0\1\0\1\0\0", None),
    0xE8: (b"mrfx", b"", 4),
    0xEE: (b"Adobe", b"\0\x64\0\0\0\0", 11),
}


class Codestream(NamedTuple):
    """Size of a compressed image, values of one of its pixels, and bits of a value."""

    rows: int
    columns: int
    samples: int
    bits: int


class _Segment(NamedTuple):
    """Marker, its parameters, and the coded values of a scan or a tile."""

    marker: int
    parameters: bytes
    coded: bytes = b""

    @property
    def written(self) -> bytes:
        length = (len(self.parameters) + 2).to_bytes(2, "big")
        return bytes([0xFF, self.marker]) + length + self.parameters + self.coded


def describe(data: bytes) -> Codestream:
    """Return the size of a complete compressed image."""
    sizes = [size for segment in _segments(data) if (size := _size(segment)) is not None]
    if len(sizes) != 1:
        raise ReaderError("its compressed pixels do not say how large they are")
    return sizes[0]


def unwrapped(data: bytes) -> bytes:
    """Return compressed data, for a JP2 file its content."""
    at = 0
    while data.startswith(_JP2_START) and at + 8 <= len(data):
        # The last box may have no length.
        length = int.from_bytes(data[at : at + 4], "big") or len(data) - at
        if data[at + 4 : at + 8] == b"jp2c":
            return data[at + 8 : at + length]
        at += max(8, length)
    return data


def without_comments(data: bytes) -> bytes:
    """Return a compressed image without comments, application segments, and bytes after its end.

    Segments with the coding of colours (JFIF, Adobe, HP's of JPEG-LS) lose all their other fields.
    """
    return data[:2] + b"".join(map(_without_comments, _segments(data))) + bytes([0xFF, _END])


def _segments(data: bytes) -> Iterator[_Segment]:
    if data.startswith(_J2K_START):
        return _of_jpeg_2000(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _of_jpeg(data)
    raise ReaderError("its compressed pixels are neither JPEG nor JPEG 2000")


def _of_jpeg(data: bytes) -> Iterator[_Segment]:
    at = 2
    while True:
        while data[at : at + 2] == b"\xff\xff":  # a fill byte
            at += 1
        marker, parameters = _parameters(data, at)
        if marker == _END:
            return
        at += 4 + len(parameters)
        coded = b""
        if marker == _SCAN:
            end = _NEXT_MARKER.search(data, at)
            if end is None:
                raise _broken_off()
            coded, at = data[at : end.start()], end.start()
        yield _Segment(marker, parameters, coded)


def _of_jpeg_2000(data: bytes) -> Iterator[_Segment]:
    at = 2
    while True:
        marker, parameters = _parameters(data, at)
        if marker == _END:
            return
        if marker != _TILE:
            at += 4 + len(parameters)
            yield _Segment(marker, parameters)
            continue
        if len(parameters) != 8:
            raise _broken_off()
        length = int.from_bytes(parameters[2:6], "big")
        # The last tile part may have no length.
        end = at + length if length else data.rfind(bytes([0xFF, _END]))
        if not at + 12 < end <= len(data) - 2:
            raise _broken_off()
        yield _Segment(marker, parameters, data[at + 12 : end])
        at = end


def _parameters(data: bytes, at: int) -> tuple[int, bytes]:
    """Read the marker at an index, and its parameters."""
    if len(data) < at + 2:
        raise _broken_off()
    if data[at] != 0xFF:
        raise ReaderError("its compressed pixels are damaged: a marker is missing")
    if (marker := data[at + 1]) == _END:
        return marker, b""
    length = int.from_bytes(data[at + 2 : at + 4], "big")
    if length < 2 or len(data) < at + 2 + length:
        raise _broken_off()
    return marker, data[at + 4 : at + 2 + length]


def _size(segment: _Segment) -> Codestream | None:
    """Read the size from a frame or size segment; ``None`` for another segment."""
    parameters = segment.parameters
    number = lambda at, count: int.from_bytes(parameters[at : at + count], "big")  # noqa: E731
    if segment.marker == _SIZE and len(parameters) > 36:
        rows, columns = number(6, 4) - number(14, 4), number(2, 4) - number(10, 4)
        return Codestream(rows, columns, samples=number(34, 2), bits=parameters[36] % 128 + 1)
    if segment.marker in _FRAMES and len(parameters) > 5:
        return Codestream(number(1, 2), number(3, 2), parameters[5], parameters[0])
    return None


def _without_comments(segment: _Segment) -> bytes:
    marker, parameters = segment.marker, segment.parameters
    if marker == _TILE:
        return _tile_without_comments(segment)
    if marker in _COLOURS and parameters.startswith(_COLOURS[marker][0]):
        start, rest, index = _COLOURS[marker]
        value = b"" if index is None else parameters[index : index + 1]
        return segment._replace(parameters=start + rest + value).written
    # Lengths of tile parts and packets would be wrong without the comments, and no decoder needs them.
    return b"" if marker in {*_COMMENTS, _J2K_COMMENT, *_J2K_LENGTHS} else segment.written


def _tile_without_comments(tile: _Segment) -> bytes:
    at, header = 0, b""
    while tile.coded[at : at + 2] != bytes([0xFF, _DATA]):
        marker, parameters = _parameters(tile.coded, at)
        at += 4 + len(parameters)
        if marker not in {_J2K_COMMENT, *_J2K_LENGTHS}:
            header += _Segment(marker, parameters).written
    coded = header + tile.coded[at:]
    length = (len(coded) + 12).to_bytes(4, "big")
    parameters = tile.parameters[:2] + length + tile.parameters[6:]
    return _Segment(tile.marker, parameters, coded).written


def _broken_off() -> ReaderError:
    return ReaderError("its compressed pixels break off")
