"""The files that hold an image's voxels, and by what another version of them is known."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from medfedaug.data.io.file_state import FileState, file_state
from medfedaug.data.io.formats import format_of

__all__ = ["FileState", "file_states", "files_of", "voxel_files"]


def voxel_files(path: Path) -> list[Path]:
    """The files that hold the voxels of an image: those of a DICOM series, or the one that a header names.

    A folder stands for the DICOM series in it, at any depth, and a DICOM file for the series that it is of.
    Of a folder that holds no whole series, all files count.
    """
    return format_of(path).voxel_files(path)


def files_of(image: Path) -> set[Path]:
    """An image's own file, or folder, and the files of its voxels; of one that is not there, itself alone."""
    return {image, *(voxel_files(image) if image.exists() else ())}


def file_states(images: Iterable[Path]) -> tuple[FileState, ...]:
    """Return paths, sizes and times of images' files, which change when an image is written again.

    A folder's own time stays when a slice in it is replaced by another of its name, and a header's when the
    voxels beside it are.
    """
    return tuple(file_state(file) for image in images for file in sorted(files_of(image)))
