"""The command `schema` prints JSON Schemas of the files that users write, for their editors."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

FOLDER = Path(__file__).with_name("schemas")
"""Folder of the schemas, which ``make catalogue`` makes from the classes (`medfedaug.cli.describe`)."""


class File(str, Enum):
    """Files that have a schema."""

    experiment = "experiment"
    run = "run"
    site_settings = "site-settings"
    site_description = "site-description"

    @property
    def path(self) -> Path:
        """The file of the schema."""
        return FOLDER / f"{self.value}.json"


def schema(
    file: Annotated[File, typer.Argument(help="experiment, run, site-settings or site-description.")],
) -> None:
    """Print the JSON Schema of a file, with which an editor completes and checks it.

    The first line of the file names it: # yaml-language-server: $schema=experiment.schema.json
    """
    typer.echo(file.path.read_text(encoding="utf-8"), nl=False)
