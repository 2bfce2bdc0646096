"""Open the archive that a user names, and import its network package."""

from pathlib import Path

from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import Access, Archive, require_pacs
from medfedaug.hospital.pacs.folder import FolderArchive


def open_archive(
    *,
    dicomweb: str | None = None,
    dimse: str | None = None,
    folder: str | Path | None = None,
    access: Access | None = None,
) -> Archive:
    """Open the archive of the one address that is given."""
    addresses = {"--dicomweb": dicomweb, "--dimse": dimse, "--folder": folder}
    names = [name for name, value in addresses.items() if value]
    if len(names) != 1:
        text = " and ".join(names) or "no archive"
        raise ConfigError(f"{text} given; give one of --dicomweb URL, --dimse AET@HOST:PORT or --folder DIR")
    access = access or Access()
    if dicomweb:
        require_pacs("dicomweb_client")
        from medfedaug.hospital.pacs.dicomweb import DicomWebArchive

        return DicomWebArchive(dicomweb, access)
    if dimse:
        require_pacs("pynetdicom")
        from medfedaug.hospital.pacs.dimse import DimseArchive

        return DimseArchive(dimse, access)
    return FolderArchive(Path(str(folder)))
