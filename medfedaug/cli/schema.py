"""The command `schema` prints JSON Schemas of the files that users write, for their editors."""

import json
from dataclasses import fields
from enum import Enum
from typing import Annotated, Any

import typer
from typer import Argument

from medfedaug.cli.docstrings import plain
from medfedaug.config.options import json_schema
from medfedaug.config.plan import Plan
from medfedaug.config.run import Execution, RunConfig
from medfedaug.config.site_description import SiteDescription


class File(str, Enum):
    """Files that have a schema."""

    experiment = "experiment"
    run = "run"
    site_settings = "site-settings"
    site_description = "site-description"


def schema(
    file: Annotated[File, Argument(help="experiment, run, site-settings or site-description.")],
) -> None:
    """Print the JSON Schema of a file, with which an editor completes and checks it.

    The first line of the file names it: # yaml-language-server: $schema=experiment.schema.json
    """
    typer.echo(json.dumps(schema_of(file), indent=1, ensure_ascii=False))


def schema_of(file: File) -> dict[str, Any]:
    """Return the JSON Schema of a file."""
    if file is File.site_settings:
        from medfedaug.hospital.privacy.site_settings import SiteSettings

        return json_schema(SiteSettings)
    if file is File.site_description:
        return json_schema(SiteDescription)
    if file is File.run:
        run = json_schema(RunConfig)
        run["properties"] |= json_schema(Execution)["properties"]
        return run
    from medfedaug.research.sweeps.experiment import Experiment  # imports PyTorch

    experiment = json_schema(Experiment)
    del experiment["required"]  # options of the command may give the rest
    known = [*fields(RunConfig), *fields(Plan)]
    texts = {f.name: {"description": plain(f.metadata["description"])} for f in known if f.metadata}
    for name in ("settings", "vary"):
        experiment["properties"][name]["properties"] = texts
    return experiment
