"""The versions of the software that computes a run's numbers."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from medfedaug._version import __version__

_PACKAGES = ("monai", "torch", "numpy", "nvflare")


def software_versions() -> dict[str, str]:
    """Return the versions of the installed packages.

    Example:
        >>> "torch" in software_versions()
        True
    """
    versions = {"medfedaug": __version__}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions
