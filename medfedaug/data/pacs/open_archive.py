"""Open the archive that a user names; its network package is imported with it."""

from __future__ import annotations

from pathlib import Path

from medfedaug.data.pacs.archive import Access, Archive, require_pacs
from medfedaug.data.pacs.folder import FolderArchive
from medfedaug.errors import ConfigError


def open_archive(
    *,
    dicomweb: str | None = None,
    dimse: str | None = None,
    folder: str | Path | None = None,
    access: Access | None = None,
) -> Archive:
    """Open the one archive that is named.

    Raises:
        ConfigError: where none or several are named, for an address that is none, and where a package is
            missing.
    """
    given = [
        name for name, value in (("--dicomweb", dicomweb), ("--dimse", dimse), ("--folder", folder)) if value
    ]
    if len(given) != 1:
        what = " and ".join(given) if given else "no archive"
        raise ConfigError(f"{what} given; give one of --dicomweb URL, --dimse AET@HOST:PORT, --folder DIR")
    access = access or Access()
    if dicomweb:
        require_pacs("dicomweb_client")
        from medfedaug.data.pacs.dicomweb import DicomWebArchive

        return DicomWebArchive(dicomweb, access)
    if dimse:
        require_pacs("pynetdicom")
        from medfedaug.data.pacs.dimse import DimseArchive

        return DimseArchive(dimse, access)
    return FolderArchive(Path(str(folder)))
