"""The command `calibrate`: what a site may promise of a finished model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from medfedaug.cli.console import CaseProgress, Table, out_console, say
from medfedaug.cli.options import Given, JsonFile, SiteOrSites, State, existing_file, existing_run, takes
from medfedaug.errors import ConfigError
from medfedaug.hospital.assurance.options import CalibrationOptions


@takes(CalibrationOptions)
def calibrate(
    run: Annotated[Path, Argument(metavar="RUN", callback=existing_run, help="A run, or its model.")],
    data: SiteOrSites,
    *,
    given: Given,
    statistics: Annotated[
        Path | None, Option(callback=existing_file, help="Statistics of a site that took no part in the run.")
    ] = None,
    out: Annotated[Path | None, Option(help="File to write, by default calibration.json of the run.")] = None,
    json_file: JsonFile = None,
    state: State = None,
) -> None:
    """Find, on a site's own cases, the threshold at which a structure's map misses no more than promised.

    The file stays at the site, where `medfedaug predict` applies it. A folder of several sites is calibrated
    site by site.
    """
    options = CalibrationOptions(**given[CalibrationOptions])
    from medfedaug.hospital.assurance.calibrate import calibrate as calibrated
    from medfedaug.hospital.assurance.calibration import CALIBRATION, sentence
    from medfedaug.runs.finished_run import FinishedRun
    from medfedaug.runs.folder import is_json_with
    from medfedaug.utils.files import write_json

    opened = FinishedRun.open(run, state=state)
    target = out or opened.model.parent / CALIBRATION
    if target.exists() and not is_json_with(target, "format", "model", "sites"):
        raise ConfigError(f"{target} exists and is not a calibration; choose another file with --out")
    with CaseProgress("calibrating") as progress:
        content = calibrated(opened, data, options, statistics=statistics, on_event=progress.show)
    _print(content)
    for site, entry in content["sites"].items():
        for name, structure in entry["structures"].items():
            promised = "threshold" in structure
            text = sentence(content, site, name) if promised else f"no promise: {structure['reason']}"
            say(f"{site}: {name}: {text}", None if promised else "yellow")
    write_json(target, content, private=True)
    if json_file is not None:
        write_json(json_file, content)
    say(f"{target}: stays at the site; medfedaug predict applies it")


def _print(content: Mapping[str, Any]) -> None:
    for name in next(iter(content["sites"].values()))["structures"]:
        pooled = content.get("pooled", {}).get(name, {}).get("loss", {})
        units = {entry["structures"][name].get("unit") for entry in content["sites"].values()} - {None}
        heads = ["site", "patients", "threshold", "missed", "by the plain map", f"extra {', '.join(units)}"]
        table = Table(*heads, *(["missed if pooled"] if pooled else []), title=name)
        for site, entry in content["sites"].items():
            one = entry["structures"][name]
            cells = [site, str(one["patients"])] + ["–"] * 4
            if "loss" in one:
                middle, low, high = one["extra"]
                cells[2] = f"{one['threshold']:.3g}" if "threshold" in one else "–"
                cells[3:5] = [f"{100 * one[key]:.1f}%" for key in ("loss", "plain_loss")]
                cells[5] = f"{middle:+.4g} ({low:+.4g} to {high:+.4g})"
            table.add_row(
                *cells, *([f"{100 * pooled[site]:.1f}%" if site in pooled else "–"] if pooled else [])
            )
        out_console.print(table)
