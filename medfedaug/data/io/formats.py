"""Image formats by suffix: headers and files of images, and label maps written on their grids."""

from __future__ import annotations

import os
import pkgutil
import tempfile
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medfedaug.data.io.base import (
    FileState,
    Header,
    ImageFormat,
    NoSeries,
    Segments,
    SeriesFormat,
    file_state,
)
from medfedaug.errors import storing
from medfedaug.utils.plugins import added_modules

if TYPE_CHECKING:
    from torch import Tensor


def image_suffix(name: str) -> str:
    """Return the known suffix of a file's name, as spelled there; empty for none."""
    known = next((suffix for suffix in _BY_SUFFIX if name.lower().endswith(suffix)), "")
    return name[len(name) - len(known) :]


def without_suffix(name: str) -> str:
    """Return a file's name without its known suffix."""
    return name[: len(name) - len(image_suffix(name))]


def is_volume_file(file: Path) -> bool:
    """Return whether a file's name is of an image other than DICOM, or of the voxels of one."""
    suffixes = tuple(suffix for form in _BUILT_IN for suffix in form.voxel_suffixes)
    return bool(image_suffix(file.name)) or file.name.lower().endswith(suffixes)


def format_of(path: Path) -> ImageFormat:
    """Return the format of an image, by its name; a folder, or a file without a known suffix, is DICOM."""
    return _BY_SUFFIX.get(image_suffix(path.name).lower(), SERIES)


def is_dicom(path: Path) -> bool:
    """Return whether an image is DICOM by its name: a folder, or a file without another suffix."""
    return format_of(path) is SERIES


def is_photograph(path: Path) -> bool:
    """Return whether a file's name has the suffix of a photograph."""
    return bool(image_suffix(path.name)) and format_of(path).photograph


def is_lossy(path: Path) -> bool:
    """Return whether a file's format does not keep every value."""
    return image_suffix(path.name).lower() in format_of(path).lossy


def known_formats() -> str:
    """Return all formats but DICOM, for messages."""
    return ", ".join(form.title for form in _BUILT_IN if form is not SERIES)


def voxel_files(path: Path) -> list[Path]:
    """Return the files that hold the voxels of an image: of a DICOM series, or the file that a header names.

    A folder stands for the DICOM series in it, at any depth, and a DICOM file for its series. A folder
    without a whole series stands for all its files.
    """
    return format_of(path).voxel_files(path)


def files_of(image: Path) -> set[Path]:
    """Return an image's file or folder, and the files of its voxels; for a missing image, only its path."""
    return {image, *(voxel_files(image) if image.exists() else ())}


def file_states(images: Iterable[Path]) -> tuple[FileState, ...]:
    """Return paths, times and sizes of images' files, which change when an image is written again.

    The time of a folder alone stays when one of its files is replaced, and the time of a header when its
    voxels are.
    """
    return tuple(file_state(file) for image in images for file in sorted(files_of(image)))


def read_header(path: Path) -> Header:
    """Read a volume's properties without decoding it, once for each version of its files."""
    return _read_header(path, hash(file_states([path])))


@lru_cache(maxsize=2**14)
def _read_header(path: Path, state: int) -> Header:
    return format_of(path).read_header(path)


def label_bits(classes: int) -> int:
    """Return the bits of a label: 8, or 16 for more than 256 classes."""
    return 8 if classes <= 2**8 else 16


def write_label_map(target: Path, image: Path, label: Tensor, segments: Segments) -> None:
    """Write a label map with the geometry of its image; the file is complete or absent.

    NIfTI gets the bytes of the geometry in the image's header (sform, qform, their codes, units); MHA and
    NRRD the image's origin, spacing and direction. A photograph gets a grey image, a DICOM series a DICOM SEG
    that refers to its slices, a format without a writer a NIfTI file. Labels have `label_bits`.
    """
    voxels = label[0].numpy().astype(f"uint{label_bits(len(segments.classes))}")
    write_whole(target, lambda path: format_of(image).write_label_map(path, image, voxels, segments))


def write_probabilities(target: Path, image: Path, shares: Tensor, segments: Segments) -> None:
    """Write the probabilities of the classes, (K, X, Y, Z), float32, in the format of the image.

    NIfTI, MHA and NRRD hold all classes, background first, in float32. A photograph has a file for each
    class, ``NAME_0.png``, ..., in which 65535 is 1. A DICOM SEG holds the classes without the background, in
    steps of 1/255.
    """
    voxels = np.moveaxis(shares.numpy(), 0, -1)
    write_whole(target, lambda path: format_of(image).write_probabilities(path, image, voxels, segments))


def write_whole(target: Path, save: Callable[[Path], Any]) -> None:
    """Let ``save`` write a file, or several in its folder, and move them when complete."""
    with storing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as name:
            folder = Path(name)
            save(folder / target.name)
            for path in folder.iterdir():
                os.replace(path, target.parent / path.name)


def _formats(folder: Path, package: str) -> tuple[ImageFormat, ...]:
    """Return the object `FORMAT` of each file that makes one; other files, which need decoders, stay."""
    names = [module.name for module in pkgutil.iter_modules([str(folder)])]
    names = [name for name in names if "\nFORMAT = " in (folder / f"{name}.py").read_text(encoding="utf-8")]
    return tuple(import_module(f"{package}.{name}").FORMAT for name in sorted(names))


SERIES: SeriesFormat = next((module.FORMAT for module in added_modules("dicom.image_format")), NoSeries())
"""The format of folders, and of files without a known suffix."""
_BUILT_IN = (*_formats(Path(__file__).parent, __name__.rpartition(".")[0]), SERIES)
_BY_SUFFIX = {suffix: form for form in _BUILT_IN for suffix in form.suffixes}
