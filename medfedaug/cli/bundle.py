"""The command `bundle` writes a finished run as a MONAI Bundle."""

from pathlib import Path
from shlex import quote
from typing import Annotated

from typer import Argument, Option

from medfedaug.cli.console import err_console, say
from medfedaug.cli.options import SiteNames, State, existing_run


def bundle(
    run: Annotated[Path, Argument(metavar="RUN", callback=existing_run, help="A run, or its model.")],
    out: Annotated[Path, Option(help="A new or empty folder.")],
    site: Annotated[str | None, Option(help="Site whose statistics or layers are used.")] = None,
    statistics: Annotated[Path | None, Option(help="Statistics of the place of use.")] = None,
    state: State = None,
    site_names: SiteNames = False,
) -> None:
    """Write the model as a MONAI Bundle, which runs with MONAI alone and gives the same label maps."""
    from medfedaug.analysis.model_card import write_model_card
    from medfedaug.runs.bundle.export import write_bundle
    from medfedaug.runs.finished_run import FinishedRun, Origin

    opened = FinishedRun.open(run, state=state)
    origin = Origin.of(opened, site, statistics)

    def write_card(folder: Path) -> None:
        write_model_card(opened, folder, site_names=site_names)

    with err_console.status("comparing with MONAI's network"):
        write_bundle(opened, out, origin, card=write_card)
    config, meta = (quote(f"{out}/configs/{name}.json") for name in ("inference", "metadata"))
    call = f"python -m monai.bundle run --bundle_root {quote(str(out))} --config_file {config}"
    say(f"{out}: run it with")
    say(f"{call} --meta_file {meta} --dataset_dir IMAGES --output_dir PREDICTIONS")
