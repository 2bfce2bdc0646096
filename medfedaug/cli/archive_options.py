"""Options of commands that use a DICOM archive, besides `medfedaug.hospital.pacs.archive.Access`."""

import os
from functools import partial
from typing import Annotated

from typer import Option

from medfedaug.cli.options import Given
from medfedaug.hospital.pacs.archive import Access

archive_option = partial(Option, rich_help_panel=Access.PANEL)
DicomWeb = Annotated[str | None, archive_option(metavar="URL", help="DICOMweb service.")]
Dimse = Annotated[str | None, archive_option(metavar="AET@HOST:PORT", help="DIMSE archive.")]


def archive_access(given: Given) -> Access:
    """Return the access to an archive, with the secrets of the environment.

    They are never on the command line, which every user may see.
    """
    secrets = {name: os.environ.get(f"MEDFEDAUG_PACS_{name.upper()}") for name in ("password", "token")}
    return Access(**{**given[Access], **{name: secret for name, secret in secrets.items() if secret}})
