"""Options of commands that use a DICOM archive: its address, and the way to it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    from medfedaug.data.pacs.archive import Access, Archive

__all__ = ["PANEL", "ArchiveOptions", "takes_archive"]

PANEL = "The archive"
"""Title of the options in the help of a command."""


@dataclass(frozen=True)
class ArchiveOptions:
    """Archive as a command was given it.

    Args:
        dicomweb: URL of a DICOMweb service.
        dimse: ``AET@HOST:PORT``.
        access: arguments of `medfedaug.data.pacs.archive.Access`.
        parallel: studies at a time.
    """

    dicomweb: str | None
    dimse: str | None
    access: dict[str, Any]
    parallel: int

    @property
    def given(self) -> bool:
        """Return whether there is an address."""
        return self.dicomweb is not None or self.dimse is not None

    def open(self, folder: Path | None = None) -> Archive:
        """Open the archive.

        Args:
            folder: a folder of DICOM files in its place.

        Raises:
            ConfigError: where none or several are named, and for values that are none.
        """
        from medfedaug.data.pacs.archive import Access
        from medfedaug.data.pacs.open_archive import open_archive

        access: Access = Access(**self.access)
        return open_archive(dicomweb=self.dicomweb, dimse=self.dimse, folder=folder, access=access)


def takes_archive(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of an archive; it receives them as ``archive``, an `ArchiveOptions`."""
    added = inspect.signature(_options, eval_str=True).parameters

    @functools.wraps(command)
    def call(**values: Any) -> None:
        archive = _options(**{name: values.pop(name) for name in added})
        command(**values, archive=archive)

    own = inspect.signature(command, eval_str=True).parameters
    order = [*(one for one in own.values() if one.name != "archive"), *added.values()]
    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in order]
    )
    call.__annotations__ = {one.name: one.annotation for one in order}
    return call


def _options(
    dicomweb: Annotated[
        str | None, typer.Option(metavar="URL", help="DICOMweb service.", rich_help_panel=PANEL)
    ] = None,
    dimse: Annotated[
        str | None, typer.Option(metavar="AET@HOST:PORT", help="DIMSE archive.", rich_help_panel=PANEL)
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds that the archive may be silent.", rich_help_panel=PANEL)
    ] = 60.0,
    user: Annotated[
        str | None,
        typer.Option(
            help="User of DICOMweb; the password is in MEDFEDAUG_PACS_PASSWORD.", rich_help_panel=PANEL
        ),
    ] = None,
    aet: Annotated[str, typer.Option(help="Own AE title.", rich_help_panel=PANEL)] = "MEDFEDAUG",
    receive: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Receive by C-MOVE on this port, in place of C-GET.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    receive_on: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Address of this machine on which --receive listens; by default the one from which the "
            "archive is reached.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    sender: Annotated[
        str | None,
        typer.Option(
            metavar="AET@HOST",
            help="Sender to --receive, where it is not the AE title and host of --dimse; others are refused.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File that holds a bearer token for DICOMweb, in place of --user; or the token is in "
            "MEDFEDAUG_PACS_TOKEN.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Encrypt DIMSE; a DICOMweb URL says so itself.", rich_help_panel=PANEL),
    ] = False,
    authority: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file of the authority of the archive's certificate.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file of the own certificate, where the archive wants one.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file of its private key, where --certificate does not hold it.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    parallel: Annotated[
        int, typer.Option(min=1, help="Series and studies at a time.", rich_help_panel=PANEL)
    ] = 2,
    connections: Annotated[
        int,
        typer.Option(
            min=1,
            help="Objects that DICOMweb is asked for at a time, of all series together, where a series did "
            "not come in one request.",
            rich_help_panel=PANEL,
        ),
    ] = 4,
) -> ArchiveOptions:
    access = {
        "timeout": timeout,
        "user": user,
        "password": os.environ.get("MEDFEDAUG_PACS_PASSWORD"),
        "aet": aet,
        "receive": receive,
        "receive_on": receive_on,
        "sender": sender,
        "token": _token(token_file),
        "tls": tls,
        "authority": authority,
        "certificate": certificate,
        "key": key,
        "connections": connections,
    }
    return ArchiveOptions(dicomweb, dimse, access, parallel)


def _token(file: Path | None) -> str | None:
    """The token of a file or of the environment: never of the command line, which every user may see."""
    if file is None:
        return os.environ.get("MEDFEDAUG_PACS_TOKEN")
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not readable as a token") from error
