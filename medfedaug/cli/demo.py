"""The command `demo`: a federation of phantom sites with and without augmentation, told to a newcomer."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from medfedaug.cli.console import Table, err_console, out_console, say
from medfedaug.cli.progress import RoundProgress
from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    from medfedaug.analysis import Table as ScoreTable

__all__ = ["demo"]

_METHODS = ("fedavg", "fedrdn")
# Instance norm: a few hundred steps are not enough for running statistics to settle.
_SETTINGS = {
    "network_args": {"features": [8, 16, 32, 64, 64, 8], "norm": "instance"},
    "local_epochs": 3,
    "batch_size": 4,
    "learning_rate": 0.002,
}
_SCANNER = {
    "gain": "brightness of fat",
    "noise": "noise (fat is 1)",
    "blur": "blur in mm",
    "gamma": "contrast exponent",
}
_DIFFERENT = "What differs between the sites is their scanners; heads are drawn alike everywhere:"
_NEXT = (
    ("how far your own sites are apart", "medfedaug inspect --data {data} --out inspection.html"),
    (
        "every site as a process of its own",
        "medfedaug simulate --data {data} --methods fedrdn,fedfa --out runs/fedrdn_fedfa",
    ),
    ("all methods, and what each sends", "medfedaug methods"),
)


def demo(
    out: Annotated[Path, typer.Option(help="A new or empty folder.")] = Path("demo"),
    sites: Annotated[int, typer.Option(min=2, help="Number of sites, each with its own scanner.")] = 4,
    patients: Annotated[int, typer.Option(min=3, help="Patients per site.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Communication rounds.")] = 6,
) -> None:
    """Train phantom hospitals with and without augmentation, and show what came of it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not an empty folder; give a new one with --out")
    with err_console.status("starting"):
        from medfedaug.analysis import load_run, summary_table, write_report
        from medfedaug.data.datasets.phantom import make_phantom
        from medfedaug.data.sites import find_sites
        from medfedaug.experiments.simulate import configure, simulate
        from medfedaug.methods import parse_methods
    with err_console.status("making the phantom"):
        make_phantom(out / "data", sites=sites, patients=patients)
    scanners = _scanners(out / "data", patients)
    folders = find_sites(out / "data")
    runs = []
    for method in _METHODS:
        say(f"{method}: {_doing(method)}")
        config = configure(folders, methods=tuple(parse_methods(method)), rounds=rounds, **_SETTINGS)
        with RoundProgress(rounds) as progress:
            where = out / method
            simulate(out / "data", where, config, engine="inprocess", sites=folders, on_event=progress.show)
        runs.append(where)
    table = summary_table([load_run(run) for run in runs])
    with err_console.status("drawing the page"):
        notes = [_DIFFERENT, scanners, "What each method does:", _told()]
        page = write_report(runs, out / "report.html", data=out / "data", notes=notes)
    _outcome(table)
    say("")
    say(f"The page, with pictures of truth and prediction: {page}")
    say("Next:")
    for what, command in _NEXT:
        say(f"  {command.format(data=quote(str(out / 'data')))}   # {what}")


def _scanners(data: Path, patients: int) -> list[list[str]]:
    """Show what differs between the sites; the same as lines of cells for the page."""
    from medfedaug.data.datasets.phantom import MANIFEST

    found = json.loads((data / MANIFEST).read_text())["sites"]
    header = ["site", *_SCANNER.values()]
    lines = [[name, *(_short(scanner[key]) for key in _SCANNER)] for name, scanner in found.items()]
    table = Table(*header, title="What differs between the sites: their scanners")
    for line in lines:
        table.add_row(*line)
    say(f"{len(found)} phantom hospitals, {patients} patients each: heads with a lesion to be found.")
    out_console.print(table)
    return [header, *lines]


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.2g}"


def _doing(method: str) -> str:
    from medfedaug.cli.catalogue import describe_method

    return describe_method(method).what


def _told() -> list[list[str]]:
    return [["method", "what it does"], *([method, _doing(method)] for method in _METHODS)]


def _outcome(scores: ScoreTable) -> None:
    from medfedaug.analysis.report_summary import answer

    sites = list(scores.sites)
    table = Table(
        "method", "mean Dice", "to fedavg", *sites, title="How well lesions of new patients were found"
    )
    for row in scores.rows:
        shown = [str(row.sites[site]) for site in sites]
        table.add_row(row.label, str(row.mean), "" if row.baseline else row.compared, *shown)
    out_console.print(table)
    say("Dice: 1 is a perfect outline, 0 is none at all.")
    say(answer(scores))
