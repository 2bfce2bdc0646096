"""Options of commands that use a DICOM archive, besides `medfedaug.hospital.pacs.archive.Access`."""

import os
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Option

from medfedaug.cli.options import Given
from medfedaug.hospital.pacs.archive import Access

archive_option = partial(Option, rich_help_panel=Access.PANEL)
DicomWeb = Annotated[str | None, archive_option(metavar="URL", help="DICOMweb service.")]
Dimse = Annotated[str | None, archive_option(metavar="AET@HOST:PORT", help="DIMSE archive.")]
TokenFile = Annotated[
    Path | None,
    archive_option(metavar="FILE", help="Bearer token for DICOMweb, or MEDFEDAUG_PACS_TOKEN."),
]


def archive_access(given: Given, token_file: Path | None) -> Access:
    """Return the access to an archive, with the secrets of file and environment.

    They are never on the command line, which every user may see.
    """
    token = os.environ.get("MEDFEDAUG_PACS_TOKEN")
    if token_file is not None:
        token = token_file.read_text(encoding="utf-8").strip()
    secrets = {"password": os.environ.get("MEDFEDAUG_PACS_PASSWORD"), "token": token}
    return Access(**{**given[Access], **{name: value for name, value in secrets.items() if value}})
