"""The versions of the software that decides over a run's numbers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from medfedaug._version import __version__

_PACKAGES = ("monai", "torch", "numpy", "nvflare")


def software_versions() -> dict[str, str]:
    """Versions by package, of those that are installed.

    Example:
        >>> "torch" in software_versions()
        True
    """
    found = {"medfedaug": __version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
