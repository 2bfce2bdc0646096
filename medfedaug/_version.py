"""The version of the package, and those of the software that computes a run's numbers."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__version__ = "0.4.0.dev0"  # the one place where the version is written

_PACKAGES = ("monai", "torch", "numpy", "nvflare")


def software_versions() -> dict[str, str]:
    """Return the versions of the installed packages.

    Example:
        >>> "torch" in software_versions()
        True
    """
    return {"medfedaug": __version__, **installed_versions(_PACKAGES)}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def other_version(record: Any) -> str:
    """Return a remark, for an error, on a record that another version of medfedaug made.

    Example:
        >>> other_version({"versions": {"medfedaug": "0.2.0"}}).partition(",")[0]
        '; medfedaug 0.2.0 made it'
    """
    versions = record.get("versions") if isinstance(record, Mapping) else None
    made = versions.get("medfedaug") if isinstance(versions, Mapping) else None
    return f"; medfedaug {made} made it, and this is {__version__}" if made not in (None, __version__) else ""
