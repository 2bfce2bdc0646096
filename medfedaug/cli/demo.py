"""The command `demo`: a federation with one odd scanner, with and without a remedy."""

import json
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from typer import Option

from medfedaug.cli.catalogue import describe_method
from medfedaug.cli.console import RoundProgress, Table, err_console, out_console, say, starting
from medfedaug.cli.options import JsonFile
from medfedaug.utils.files import check_empty

BASELINE, REMEDY = "fedavg", "fedrdn"
SCANNERS = 1  # the seed of the scanners, which `--seed` does not change
ODD = 2  # the site with the odd scanner, from 0
DISTANCE = 2.0  # of the odd scanner from the others (`make_phantom`)

_SETTINGS = {"image_size": 48, "rounds": 6, "local_epochs": 3, "batch_size": 4, "learning_rate": 0.002}
_NETWORK = {"features": [8, 16, 32, 64, 64, 8], "norm": "batch"}
_SCANNER = {
    "gain": "brightness of fat",
    "noise": "noise (fat is 1)",
    "blur": "blur in mm",
    "gamma": "contrast exponent",
}
_NEXT = (
    ("distances between your sites", "medfedaug inspect --data {data} --out inspection.html"),
    (
        "the same comparison on your own data",
        "medfedaug benchmark --data {data} --methods single fedavg fedrdn --seeds 3 --out runs/own",
    ),
    ("all methods, and what each sends", "medfedaug methods"),
)


def demo(
    out: Annotated[Path, Option(help="A new or empty folder.")] = Path("demo"),
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="Seed of patients and training.")] = 0,
    quick: Annotated[bool, Option("--quick", help="Three patients per site, one round.")] = False,
    json_: JsonFile = None,
) -> None:
    """Show in two minutes the harm of one odd scanner to a federation, and the effect of a remedy."""
    check_empty(out)
    with starting():
        from medfedaug.analysis import write_report
        from medfedaug.data.phantom import make_phantom
        from medfedaug.data.sites import find_sites
        from medfedaug.methods import parse_methods
        from medfedaug.runs.load_results import load_run
        from medfedaug.simulate import Simulation, configure, run_simulation
    patients, settings = 3 if quick else 12, {**_SETTINGS, **({"rounds": 1} if quick else {})}
    with err_console.status("making the phantom"):
        sites = make_phantom(
            out / "data",
            patients=patients,
            seed=seed,
            shift=[DISTANCE if index == ODD else 0.0 for index in range(4)],
            scanner_seed=SCANNERS,
        )
    odd = sites[ODD].name
    scanners = _scanners(out / "data", patients, odd)
    expected = (
        f"What to expect: plain averaging (fedavg) fails at {odd}, and fedrdn finds most of its lesions. The "
        "other sites go up or down a little, as short trainings do."
    )
    say(expected)
    folders, runs = find_sites(out / "data"), {}
    for name in (BASELINE, REMEDY):
        say(f"{name}: {describe_method(name).what}")
        config = configure(
            folders, methods=tuple(parse_methods(name)), seed=seed, network_args=_NETWORK, **settings
        )
        with RoundProgress(config.rounds) as progress:
            simulation = Simulation(
                data=out / "data",
                out=out / name,
                config=config,
                sites=folders,
                engine="inprocess",
                on_event=progress.show,
            )
            run_simulation(simulation)
        runs[name] = load_run(out / name)
    scores = {site.name: {name: run.sites[site.name] for name, run in runs.items()} for site in sites}
    with err_console.status("drawing the page"):
        alone = f"The hospitals differ only in their scanners, and {odd} has the odd one:"
        notes: list[Any] = [alone, scanners, expected]
        page = write_report([*map(out.joinpath, runs)], out / "report.html", data=out / "data", notes=notes)
    _outcome(scores, odd)
    if json_ is not None:
        from medfedaug.utils.files import write_json

        sites_ = {site: {name: {"dice": dice} for name, dice in by.items()} for site, by in scores.items()}
        write_json(json_, {"odd": odd, "remedy": REMEDY, "sites": sites_})
    say("")
    say(f"The page, with pictures of truth and prediction: {page}")
    say("Next, with the folder of your own sites instead of the phantom's:")
    for purpose, command in _NEXT:
        say(f"  {command.format(data=quote(str(out / 'data')))}   # {purpose}")


def _scanners(data: Path, patients: int, odd: str) -> list[list[str]]:
    """Print the scanners, and return them as lines of cells for the page."""
    from medfedaug.data.sites import MANIFEST

    scanners = json.loads((data / MANIFEST).read_text())["sites"]
    header = ["site", *_SCANNER.values()]
    lines = [[name, *(_short(scanner[key]) for key in _SCANNER)] for name, scanner in scanners.items()]
    table = Table(*header, title=f"The scanners: {odd} has the odd one")
    for line in lines:
        table.add_row(*line, style="bold" if line[0] == odd else None)
    say(f"{len(scanners)} phantom hospitals, {patients} patients each: heads with a lesion to segment.")
    out_console.print(table)
    return [header, *lines]


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.2g}"


def _outcome(scores: dict[str, dict[str, float | None]], odd: str) -> None:
    table = Table("site", BASELINE, REMEDY, title="How well lesions of new patients were found (Dice)")
    for site, by in scores.items():
        label = f"{site} (odd scanner)" if site == odd else site
        dice = (by[name] for name in (BASELINE, REMEDY))
        table.add_row(label, *("–" if value is None else f"{value:.2f}" for value in dice))
    out_console.print(table)
    say("Dice: 1 is a perfect outline, 0 is none at all.")
    before, after = (scores[odd][name] for name in (BASELINE, REMEDY))
    if before is None or after is None:
        say(f"{odd} has no score.")
        return
    say(f"{odd}, whose scanner differs: {before:.2f} with {BASELINE}, {after:.2f} with {REMEDY}.")
    say("One training with few patients is not a verdict: that takes five seeds and more patients.")
