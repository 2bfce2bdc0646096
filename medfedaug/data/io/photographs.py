"""Photographs, by Pillow: headers, and pixels as volumes of one slice.

A photograph has a fixed scale of intensity, unlike a volume: the format says which number is white.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image

from medfedaug.data.io.base import Header, ImageFormat, Segments

_DEEP = (".png", ".tif", ".tiff")  # formats that may hold more than 8 bits
_WHITE = 65535
# Pillow's modes; P is a palette, 1 black and white, a last A an alpha channel; `_check_kind` has I and F.
_CHANNELS = {"1": 1, "L": 1, "LA": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3}
_UPRIGHT = (None, 0, 1)  # EXIF orientations


def _check_kind(file: Image.Image) -> None:
    """Check that the pixels' range is known: 8 bits, or unsigned 16 bits."""
    frames = getattr(file, "n_frames", 1) if file.format == "TIFF" else 1
    if frames > 1:
        raise ValueError(f"a stack of {frames} images, expected one")
    sixteen = file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PNG")
    if file.mode == "F" or (file.mode.startswith("I") and not sixteen):
        kind = "floating point" if file.mode == "F" else "whole numbers with a sign or of 32 bits"
        raise ValueError(f"{kind}, without a known white: write it with 8 or 16 bits")


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    if not path.is_file():  # reading a pipe would block
        raise ValueError("no file")
    with Image.open(path) as file:
        _check_kind(file)
        if file.mode not in _CHANNELS and not file.mode.startswith("I"):
            raise ValueError(f"of the kind {file.mode}, expected grey or RGB")
        _check_upright(file)
        yield file


def _check_upright(file: Image.Image) -> None:
    """Refuse an image that must be turned: its label image may have been drawn before or after the turn."""
    # In a PNG file EXIF may follow the pixels, which Pillow would decode to reach it.
    known = file.format != "PNG" or "exif" in file.info
    orientation = file.getexif().get(ExifTags.Base.Orientation) if known else None
    if orientation not in _UPRIGHT:
        raise ValueError(f"stored turned or mirrored, EXIF orientation {orientation}: write it upright")


def _check_opaque(file: Image.Image) -> None:
    if file.has_transparency_data and file.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        raise ValueError("has transparent pixels: write it without an alpha channel")


def _volume(pixels: np.ndarray) -> np.ndarray:
    """Bring (Y, X) or (Y, X, C) to (C, X, Y, 1)."""
    planes = pixels[..., None] if pixels.ndim == 2 else pixels
    return np.ascontiguousarray(planes.transpose(2, 1, 0)[..., None], dtype=np.float32)


class Photographs(ImageFormat):
    """Photographs that Pillow reads."""

    title = "PNG, JPEG, TIFF, BMP"
    suffixes = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")
    lossy = (".jpg", ".jpeg")
    photograph = True

    def read_header(self, path: Path) -> Header:
        """Read size and kind."""
        with _opened(path) as file:
            deep = file.mode.startswith("I")
            channels, white = (1, _WHITE) if deep else (_CHANNELS[file.mode], 255)
            return Header((*file.size, 1), channels, None, white)

    def read_volume(self, path: Path) -> np.ndarray:
        """Read a photograph as it is stored, float32 (C, X, Y, 1), indexed from the left and from above.

        A palette becomes its colours, black and white 0 and 255. An alpha channel is left out where nothing
        is transparent. In colour the upper 8 of 16 bits are read.
        """
        with _opened(path) as file:
            file.load()
            _check_upright(file)
            if file.mode.startswith("I"):
                return _volume(np.asarray(file))
            _check_opaque(file)
            return _volume(np.asarray(file.convert("L" if _CHANNELS[file.mode] == 1 else "RGB")))

    def read_label(self, path: Path) -> np.ndarray:
        """Read a label image, float32 (1, X, Y, 1): greys as they are stored, black and white as 0 and 1.

        A palette gives its indices, which its colours only show. A palette of greys alone gives the greys,
        since some programs write grey images that way, in any order. Colours must have three equal channels.
        """
        with _opened(path) as file:
            file.load()
            _check_upright(file)
            pixels = np.asarray(file if file.mode != "PA" else file.getchannel("P"))
            if file.mode in ("P", "PA"):
                colours = np.asarray(file.getpalette("RGB"), np.uint8).reshape(-1, 3)
                # All colours of the palette: an image without a lesion has the palette of one with a lesion.
                grey = pixels.max() < len(colours) and bool((colours == colours[:, :1]).all())
                return _volume(colours[pixels, 0] if grey else pixels)
            if not file.mode.startswith("I"):
                _check_opaque(file)
            if file.mode == "LA":
                pixels = pixels[..., 0]
            if pixels.ndim == 3:
                colour = pixels[..., :3]
                if not (colour == colour[..., :1]).all():
                    raise ValueError("in colour; label images hold the index of each pixel's class, in grey")
                pixels = colour[..., 0]
            return _volume(pixels)

    def label_suffix(self, image: Path) -> str:
        """Return the suffix of PNG, which keeps every value."""
        return ".png"

    def probability_files(self, label: str, classes: int) -> list[str]:
        stem, _, suffix = label.rpartition(".")
        return [f"{stem}_{index}.{suffix}" for index in range(classes)]

    def write_label_map(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        Image.fromarray(np.ascontiguousarray(voxels[..., 0].T)).save(path)

    def write_probabilities(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write a grey image of 16 bits for each class, in which white is 1."""
        planes = np.rint(voxels[:, :, 0] * _WHITE).astype(np.uint16).transpose(2, 1, 0)
        for name, plane in zip(self.probability_files(path.name, len(planes)), planes, strict=True):
            Image.fromarray(np.ascontiguousarray(plane)).save(path.with_name(name))


def check_photograph(path: Path) -> None:
    """Check that a file exists, and that the range of the pixels is known."""
    if not path.is_file():  # reading a pipe would block
        raise ValueError("no file")
    status = path.stat()
    if path.suffix.lower() in _DEEP:
        _known_kind(path.absolute(), status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=2**16)
def _known_kind(path: Path, modified: int, size: int) -> None:
    with Image.open(path) as file:
        _check_kind(file)


def read_photograph(path: Path) -> np.ndarray:
    """Read a photograph in colour, (3, H, W), uint8; one channel of 16 bits is float32, divided by 257.

    Of 16 bits in colour Pillow reads the upper 8.
    """
    with Image.open(path) as file:
        _check_kind(file)
        if file.mode.startswith("I"):
            grey = np.asarray(file).astype(np.float32) / 257
            return np.stack([grey] * 3)
        pixels = np.asarray(file.convert("RGB"))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


FORMAT = Photographs()
