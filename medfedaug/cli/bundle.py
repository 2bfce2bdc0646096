"""The command `bundle` writes a finished run as a MONAI Bundle."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

from typer import Argument, Option

from medfedaug.cli.console import err_console, say
from medfedaug.cli.options import SiteNames, State, existing_run
from medfedaug.errors import ConfigError


def bundle(
    out: Annotated[Path | None, Option(help="A new or empty folder.")] = None,
    run: Annotated[
        Path | None,
        Argument(metavar="RUN", callback=existing_run, help="The folder of a run, or its global_model.pt."),
    ] = None,
    model: Annotated[Path | None, Option(callback=existing_run, help="The same as RUN.")] = None,
    site: Annotated[str | None, Option(help="A site whose own statistics or layers the bundle gets.")] = None,
    statistics: Annotated[Path | None, Option(help="Statistics of the place of use.")] = None,
    state: State = None,
    site_names: SiteNames = False,
    license_: Annotated[Path | None, Option("--license", help="Text with the terms of use.")] = None,
) -> None:
    """Write the model as a MONAI Bundle, which runs with MONAI alone and gives the same label maps."""
    sources = [path for path in (run, model) if path is not None]
    if len(sources) != 1:
        raise ConfigError("name one run, as RUN or with --model")
    if out is None:
        raise ConfigError("--out DIR is needed: the folder of the new Bundle")
    from medfedaug.analysis.model_card import write_model_card
    from medfedaug.runs.bundle import write_bundle
    from medfedaug.runs.finished_run import FinishedRun
    from medfedaug.runs.input_statistics import Origin

    opened = FinishedRun.open(sources[0], state=state)
    origin = Origin.of(opened, site, statistics)

    def write_card(folder: Path) -> None:
        write_model_card(opened, folder, site_names=site_names)

    with err_console.status("comparing with MONAI's network"):
        write_bundle(opened, out, origin, card=write_card, licence_file=license_)
    config, meta = (quote(f"{out}/configs/{name}.json") for name in ("inference", "metadata"))
    call = f"python -m monai.bundle run --bundle_root {quote(str(out))} --config_file {config}"
    say(f"{out}: run it with")
    say(f"{call} --meta_file {meta} --dataset_dir IMAGES --output_dir PREDICTIONS")
