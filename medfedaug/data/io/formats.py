"""Image formats by the suffixes of files, also of other packages; headers of images, and their files."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from medfedaug.data.io import dicom, itk, nifti, photographs
from medfedaug.data.io.base import FileState, Header, ImageFormat, file_state
from medfedaug.errors import ConfigError
from medfedaug.utils import plugins


def image_suffix(name: str) -> str:
    """Return the known suffix that a file's name ends with, as it is written there; empty for none.

    Raises:
        ConfigError: for one of a package that may not or cannot be used.
    """
    known = next((suffix for suffix in _BY_SUFFIX if name.lower().endswith(suffix)), "")
    if not known and (plugin := _added(name)):
        known = f".{plugin.name}"
    return name[len(name) - len(known) :]


def without_suffix(name: str) -> str:
    """Return a file's name without its known suffix."""
    return name[: len(name) - len(image_suffix(name))]


def is_volume_file(file: Path) -> bool:
    """Return whether a file is an image of a format other than DICOM, or the voxels of one, by its name."""
    return bool(image_suffix(file.name)) or file.name.lower().endswith(voxel_suffixes())


def format_of(path: Path) -> ImageFormat:
    """Return the format of an image, by its name; a folder, or a file without a known suffix, is DICOM.

    Raises:
        ConfigError: for one of a package that may not or cannot be used.
    """
    name = path.name.lower()
    known = next((suffix for suffix in _BY_SUFFIX if name.endswith(suffix)), None)
    if known is None and (plugin := _added(name)):
        return plugin_format(plugin)
    return _BY_SUFFIX[known] if known else _WITHOUT_SUFFIX


def is_dicom(path: Path) -> bool:
    """Return whether an image is DICOM by its name: a folder, or a file without another suffix."""
    return format_of(path) is _WITHOUT_SUFFIX


def is_photograph(path: Path) -> bool:
    """Return whether a file's name is that of a photograph."""
    return bool(image_suffix(path.name)) and format_of(path).photograph


def is_lossy(path: Path) -> bool:
    """Return whether a file's format does not keep every value."""
    return image_suffix(path.name).lower() in format_of(path).lossy


def voxel_suffixes() -> tuple[str, ...]:
    """Return the suffixes of files that hold voxels beside a header, and are no images themselves."""
    return tuple(suffix for found in _usable() for suffix in found.voxel_suffixes)


def known_formats() -> str:
    """Return all formats but DICOM, for messages.

    Example:
        >>> known_formats()
        'MHA (.mha, .mhd), NRRD (.nrrd, .nhdr), NIfTI (.nii, .nii.gz), PNG, JPEG, TIFF, BMP'
    """
    return ", ".join(found.title for found in _usable() if found is not _WITHOUT_SUFFIX)


def plugin_format(plugin: plugins.Plugin) -> ImageFormat:
    """Return the format that a package adds.

    Raises:
        ConfigError: naming the package, when the object cannot be loaded or is no format of that suffix.
    """
    found = plugin.load()
    if not isinstance(found, ImageFormat):
        raise ConfigError(f"{plugin.what}: {found!r} is no medfedaug.data.io.base.ImageFormat")
    if f".{plugin.name}" not in found.suffixes:
        raise ConfigError(f"{plugin.what}: its suffixes are {found.suffixes!r}, without .{plugin.name}")
    return found


def _added(name: str) -> plugins.Plugin | None:
    """Return the plugin of the longest suffix that a name ends with; nothing of it is imported."""
    names = {plugin.name for plugin in plugins.installed(plugins.FORMATS)}
    ending = max((one for one in names if name.lower().endswith(f".{one}")), key=len, default="")
    return plugins.find(plugins.FORMATS, ending, BUILT_IN_SUFFIXES) if ending else None


def _usable() -> list[ImageFormat]:
    """Return every format that may be used here, each once."""
    names = plugins.names(plugins.FORMATS, BUILT_IN_SUFFIXES)
    added = [plugins.find(plugins.FORMATS, name, BUILT_IN_SUFFIXES) for name in names]
    return list(dict.fromkeys([*_BUILT_IN, *(plugin_format(plugin) for plugin in added if plugin)]))


def voxel_files(path: Path) -> list[Path]:
    """Return the files that hold the voxels of an image: of a DICOM series, or the one that a header names.

    A folder stands for the DICOM series in it, at any depth, and a DICOM file for the series that it is of.
    Of a folder that holds no whole series, all files count.
    """
    return format_of(path).voxel_files(path)


def files_of(image: Path) -> set[Path]:
    """Return an image's own file, or folder, and the files of its voxels; of a missing one, itself alone."""
    return {image, *(voxel_files(image) if image.exists() else ())}


def file_states(images: Iterable[Path]) -> tuple[FileState, ...]:
    """Return paths, times and sizes of images' files, which change when an image is written again.

    A folder's own time stays when a slice in it is replaced by another of its name, and a header's when the
    voxels beside it are.

    Raises:
        OSError: for a header that cannot be read.
    """
    return tuple(file_state(file) for image in images for file in sorted(files_of(image)))


def read_header(path: Path) -> Header:
    """Read a volume's properties without decoding it, once for each version of its files.

    Raises:
        Exception: whatever the reader raises, `ValueError` for what is not a volume.
    """
    return _read_header(path, hash(file_states([path])))


@lru_cache(maxsize=2**14)
def _read_header(path: Path, state: int) -> Header:
    return format_of(path).read_header(path)


_BUILT_IN = (dicom.FORMAT, itk.FORMAT, nifti.FORMAT, photographs.FORMAT)
_BY_SUFFIX = {suffix: found for found in _BUILT_IN for suffix in found.suffixes}
(_WITHOUT_SUFFIX,) = (found for found in _BUILT_IN if not found.suffixes)
BUILT_IN_SUFFIXES = tuple(suffix.removeprefix(".") for suffix in _BY_SUFFIX)
"""Suffixes that no other package may take, without the dot."""
