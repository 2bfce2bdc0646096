"""Image formats by the suffixes of files: those of this package, and those that other packages add."""

from __future__ import annotations

from pathlib import Path

from medfedaug.data.io import dicom, itk, nifti, photographs
from medfedaug.data.io.base import ImageFormat
from medfedaug.errors import ConfigError
from medfedaug.utils import plugins

__all__ = [
    "BUILT_IN_SUFFIXES",
    "format_of",
    "image_suffix",
    "is_dicom",
    "is_lossy",
    "is_photograph",
    "known_formats",
    "plugin_format",
    "voxel_suffixes",
]


def image_suffix(name: str) -> str:
    """Return the known suffix that a file's name ends with, as it is written there; empty for none.

    Raises:
        ConfigError: for one of a package that may not or cannot be used.
    """
    known = next((suffix for suffix in _BY_SUFFIX if name.lower().endswith(suffix)), "")
    if not known and (plugin := _added(name)):
        known = f".{plugin.name}"
    return name[len(name) - len(known) :]


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


_BUILT_IN = (dicom.FORMAT, itk.FORMAT, nifti.FORMAT, photographs.FORMAT)
_BY_SUFFIX = {suffix: found for found in _BUILT_IN for suffix in found.suffixes}
(_WITHOUT_SUFFIX,) = (found for found in _BUILT_IN if not found.suffixes)
BUILT_IN_SUFFIXES = tuple(suffix.removeprefix(".") for suffix in _BY_SUFFIX)
"""Suffixes that no other package may take, without the dot."""
