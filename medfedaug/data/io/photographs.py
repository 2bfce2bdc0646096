"""Photographs from files, by Pillow: what their headers say, and their pixels as volumes of one slice.

A photograph has a fixed scale of intensity, unlike a volume: the format says which number is white.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import ExifTags, Image

__all__ = [
    "PHOTOGRAPH_SUFFIXES",
    "PhotographHeader",
    "check_kind",
    "is_photograph",
    "load_label_photograph",
    "load_photograph",
    "photograph_header",
]

PHOTOGRAPH_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")

# Pillow's modes; P is a palette, 1 black and white, a last A an alpha channel. `check_kind` knows of I and F.
_CHANNELS = {"1": 1, "L": 1, "LA": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3}
_UPRIGHT = (None, 0, 1)  # EXIF orientations


@dataclass(frozen=True)
class PhotographHeader:
    """The properties of a photograph that are known without decoding it.

    Args:
        width: pixels of a row.
        height: pixels of a column.
        channels: 1 of grey, 3 of colour; an alpha channel is none.
        white: the number that stands for white: 255, or 65535 of 16 bits.
    """

    width: int
    height: int
    channels: int
    white: int


def is_photograph(path: Path) -> bool:
    """Whether the file's name is that of a photograph."""
    return path.suffix.lower() in PHOTOGRAPH_SUFFIXES


def photograph_header(path: Path) -> PhotographHeader:
    """Read a photograph's properties without decoding it.

    Raises:
        Exception: whatever Pillow raises, `ValueError` for a kind of image that cannot be used.
    """
    with _opened(path) as file:
        deep = file.mode.startswith("I")
        return PhotographHeader(*file.size, 1 if deep else _CHANNELS[file.mode], 65535 if deep else 255)


def load_photograph(path: Path) -> torch.Tensor:
    """A photograph as it is stored, float32 (C, X, Y, 1), indexed (x, y): from the left, and from above.

    A palette becomes the colours that it stands for, black and white 0 and 255. An alpha channel is left out
    where nothing is transparent. In colour the upper 8 of 16 bits are read.

    Raises:
        Exception: as `photograph_header`, and `ValueError` for transparent pixels.
    """
    with _opened(path) as file:
        file.load()
        _check_upright(file)
        if file.mode.startswith("I"):
            return _volume(np.asarray(file))
        _check_opaque(file)
        return _volume(np.asarray(file.convert("L" if _CHANNELS[file.mode] == 1 else "RGB")))


def load_label_photograph(path: Path) -> torch.Tensor:
    """A label image, float32 (1, X, Y, 1): greys as they are stored, and of black and white 0 and 1.

    Of a palette the indices count, since its colours only show them; of a palette of greys alone the greys,
    since some programs write grey images that way, in any order. Colour is taken where its three channels
    agree.

    Raises:
        Exception: as `load_photograph`, and `ValueError` for colours.
    """
    with _opened(path) as file:
        file.load()
        _check_upright(file)
        pixels = np.asarray(file if file.mode != "PA" else file.getchannel("P"))
        if file.mode in ("P", "PA"):
            colours = np.asarray(file.getpalette("RGB"), np.uint8).reshape(-1, 3)
            # Also the colours that no pixel has: an image without a lesion has the palette of the others.
            grey = pixels.max() < len(colours) and bool((colours == colours[:, :1]).all())
            return _volume(colours[pixels, 0] if grey else pixels)
        if not file.mode.startswith("I"):
            _check_opaque(file)
        if file.mode == "LA":
            pixels = pixels[..., 0]
        if pixels.ndim == 3:
            colour = pixels[..., :3]
            if not (colour == colour[..., :1]).all():
                raise ValueError("in colour, and label images hold the index of each pixel's class, in grey")
            pixels = colour[..., 0]
        return _volume(pixels)


def check_kind(file: Image.Image) -> None:
    """Check that the pixels' range is known: 8 bits, or unsigned 16 bits.

    Raises:
        ValueError: saying what it is.
    """
    if file.format == "TIFF" and getattr(file, "n_frames", 1) > 1:
        raise ValueError(f"a stack of {getattr(file, 'n_frames', 1)} images, and one was expected")
    sixteen = file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PNG")
    if file.mode == "F" or (file.mode.startswith("I") and not sixteen):
        kind = "floating point" if file.mode == "F" else "whole numbers with a sign or of 32 bits"
        raise ValueError(f"{kind}, of which it is not known what is white: write it with 8 or 16 bits")


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    if not path.is_file():  # a pipe would be waited for
        raise ValueError("no file")
    with Image.open(path) as file:
        check_kind(file)
        if file.mode not in _CHANNELS and not file.mode.startswith("I"):
            raise ValueError(f"of the kind {file.mode}, and grey or RGB was expected")
        _check_upright(file)
        yield file


def _check_upright(file: Image.Image) -> None:
    """Whether turning it would lay it onto its label image as drawn, or beside it, the file cannot say."""
    # In a PNG file EXIF may follow the pixels, for which Pillow would decode them.
    known = file.format != "PNG" or "exif" in file.info
    orientation = file.getexif().get(ExifTags.Base.Orientation) if known else None
    if orientation not in _UPRIGHT:
        raise ValueError(f"stored turned or mirrored, EXIF orientation {orientation}: write it upright")


def _check_opaque(file: Image.Image) -> None:
    if file.has_transparency_data and file.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        raise ValueError("has transparent pixels: write it without an alpha channel")


def _volume(pixels: np.ndarray) -> torch.Tensor:
    """From (Y, X) or (Y, X, C) to (C, X, Y, 1)."""
    planes = pixels[..., None] if pixels.ndim == 2 else pixels
    return torch.from_numpy(np.ascontiguousarray(planes.transpose(2, 1, 0), dtype=np.float32))[..., None]
