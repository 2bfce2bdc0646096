"""The files that hold an image's voxels, and by what another version of them is known."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["FileState", "file_states", "files_of", "voxel_files"]

FileState = tuple[str, int | None, int | None]
"""Absolute path, time of the last change in ns, and size; ``None`` for what is not there."""


def voxel_files(path: Path) -> list[Path]:
    """The files that hold the voxels of an image: those of a DICOM series, or the one that a header names.

    A folder stands for the DICOM series in it, at any depth, and a DICOM file for the series that it is of.
    Of a folder that holds no whole series, all files count.
    """
    from medfedaug.data.io.formats import format_of  # readers, for those that need them

    return format_of(path).voxel_files(path)


def files_of(image: Path) -> set[Path]:
    """An image's own file, or folder, and the files of its voxels; of one that is not there, itself alone."""
    return {image, *(voxel_files(image) if image.exists() else ())}


def file_states(images: Iterable[Path]) -> tuple[FileState, ...]:
    """Return paths, sizes and times of images' files, which change when an image is written again.

    A folder's own time stays when a slice in it is replaced by another of its name, and a header's when the
    voxels beside it are.

    Args:
        images: files, or folders of files.

    Raises:
        OSError: for a header that cannot be read.
    """
    return tuple(_state(file) for image in images for file in sorted(files_of(image)))


def _state(file: Path) -> FileState:
    if not file.exists():
        return str(file.absolute()), None, None
    status = file.stat()
    return str(file.absolute()), status.st_mtime_ns, status.st_size
