r"""Gain against shift: phantom sites whose scanners are more and more apart, with and without each method.

    python benchmarks/shift_gain.py --work DIR --out docs/results/shift --seeds 0 1 2 3 4
    python benchmarks/shift_gain.py --work DIR --out docs/results/shift --seeds 0 1 2 3 4 --odd \
        --shifts 0.35 0.7 1.2 2 --methods fedavg norm fedbn fedrdn fedfa

Each seed and each setting of the phantom's dial (`medfedaug phantom --shift`) give a federation of four sites
with other patients, other scanners and other initial weights. `--odd` moves only the scanner whose contrast
is farthest from the middle, and the other three are alike. With `--inverted N` the images of the last N sites
are inverted, and the printed table compares these. The distance of the sites is that of `medfedaug inspect`.
A method's gain is its test Dice minus FedAvg's on the same federation: the mean over the sites, and the gain
of the site that is farthest from the others. `numbers.json` has every run; printed tables and two pictures
summarise them. Runs that are in `numbers.json` already are not repeated.
"""

import argparse
import csv
import json
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from measure import hardware, parser

from medfedaug.data.phantom import Scanner, make_phantom
from medfedaug.data.sites import MANIFEST, find_sites
from medfedaug.federation import run_in_process
from medfedaug.methods import parse_methods
from medfedaug.metrics.significance import paired_t_test
from medfedaug.research.comparison.inspection import inspect_sites
from medfedaug.research.comparison.inspection_page import federation_shift
from medfedaug.simulate import configure
from medfedaug.utils.files import write_json

BASELINE = "fedavg"
METHODS = (BASELINE, "norm", "fedbn", "fedrdn", "fedfa", "fedrdn,fedfa")
SHIFTS = (0.0, 0.1, 0.2, 0.35, 0.5, 1.0, 2.0)
EDGES = (0.0, 0.75, 1.5, 3.0, 5.0, 8.0, 12.0)
"""Edges of the groups of distances."""
FEWEST = 3
"""Smallest number of federations of a group."""
MEAN, FARTHEST = "mean", "farthest"
"""The mean gain over the sites, or the gain of the site that is farthest from the others."""
PLACES = {MEAN: "mean of the sites", FARTHEST: "farthest site"}


def distance(data: Path) -> dict[str, Any]:
    """Return the shift of a federation, and the mean distance of each site from the others."""
    shift = federation_shift(inspect_sites(data))
    assert shift is not None
    sites = sorted({site for pair in shift.pairs for site in pair.sites})
    apart = {site: fmean(p.statistics for p in shift.pairs if site in p.sites) for site in sites}
    return {"distance": shift.shift, "apart": apart}


def moved(work: Path, seed: int, dial: float) -> list[float]:
    """Return the dial of each site if only the scanner with the most extreme contrast moves."""
    with TemporaryDirectory(dir=work) as folder:
        make_phantom(folder, 4, 3, (16, 16, 1), seed)
        sites = json.loads((Path(folder) / MANIFEST).read_text())["sites"].values()
    scanners = [Scanner(**values) for values in sites]
    contrast = [abs(math.log(scanner.gamma / scanner.shifted(0).gamma)) for scanner in scanners]
    return [dial if value == max(contrast) else 0.0 for value in contrast]


def train(data: Path, methods: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the test Dice by site."""
    folders = find_sites(data)
    config = configure(
        folders,
        methods=tuple(parse_methods(methods)),
        network_args={"features": options.features},
        rounds=options.rounds,
        local_epochs=options.local_epochs,
        batch_size=8,
        learning_rate=0.003,
        schedule="cosine",
        seed=seed,
    )
    results = run_in_process(config, data, folders, "cpu").results()
    return {site: entry["dice"] for site, entry in results["test"]["sites"].items()}


def federations(runs: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """Return the distance and the test Dice of each method, by federation.

    Args:
        runs: of `numbers.json`.
        place: ``"mean"`` of all sites, or ``"farthest"`` for the site that is farthest from the others.
    """
    by_key: dict[tuple[int, float, bool], dict[str, Any]] = {}
    for run in runs:
        apart = run["apart"]
        site = max(apart, key=lambda name: apart[name])
        far = apart[site] if place == FARTHEST else run["distance"]
        key = (run["seed"], run["shift"], run["odd"])
        entry = by_key.setdefault(key, {"distance": far, "dice": {}})
        entry["odd"] = run["odd"]
        entry["dice"][run["methods"]] = (
            run["dice"][site] if place == FARTHEST else fmean(run["dice"].values())
        )
    return [entry for entry in by_key.values() if BASELINE in entry["dice"]]


def by_distance(measured: Sequence[Mapping[str, Any]], place: str) -> list[dict[str, Any]]:
    """Return the gain of each method over federations with similar distances."""
    rows = []
    for (nearest, farthest), methods in product(pairwise(EDGES), METHODS[1:]):
        near = [one["dice"] for one in measured if nearest <= one["distance"] < farthest]
        both = [dice for dice in near if methods in dice]
        if len(both) < FEWEST:
            continue
        test = paired_t_test([dice[methods] for dice in both], [dice[BASELINE] for dice in both])
        rows.append(
            {
                "at": place,
                "methods": methods,
                "nearest": nearest,
                "farthest": farthest,
                "federations": len(both),
                **{
                    name: f"{value:.4f}"
                    for name, value in (("mean", test.difference), ("low", test.low), ("high", test.high))
                },
            }
        )
    return rows


def cell(row: Mapping[str, Any], federations: int) -> str:
    """Format a gain with its interval, and the number of federations if some lack the method."""
    mean, low, high = (float(row[end]) for end in ("mean", "low", "high"))
    few = f"; {row['federations']}" if row["federations"] < federations else ""
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f}{few})"


def table(measured: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], place: str) -> str:
    """Tabulate the gains by distance, with their 95% intervals over federations."""
    head = ["distance", "federations", f"`{BASELINE}`", *(f"`{name}`" for name in METHODS[1:])]
    lines = [f"{PLACES[place]}:", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for nearest, farthest in pairwise(EDGES):
        here = {row["methods"]: row for row in rows if row["nearest"] == nearest}
        if not here:
            continue
        base = [one["dice"][BASELINE] for one in measured if nearest <= one["distance"] < farthest]
        cells = [f"{nearest:g} to {farthest:g}", str(len(base)), f"{fmean(base):.3f}"]
        for name in METHODS[1:]:
            cells.append(cell(here[name], len(base)) if name in here else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(
    measured: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    real: Mapping[str, float],
    path: Path,
    place: str,
) -> None:
    """Draw a panel for each method: every federation, the means with their intervals, and real data sets."""
    figure, panels = plt.subplots(2, 3, figsize=(12, 6.5), sharex=True, sharey=True, constrained_layout=True)
    for axes, name in zip(panels.flat, METHODS[1:], strict=False):
        for odd, colour in ((False, "C0"), (True, "C1")):
            both = [one for one in measured if name in one["dice"] and one["odd"] is odd]
            gains = [one["dice"][name] - one["dice"][BASELINE] for one in both]
            label = "one site apart" if odd else "all sites apart"
            axes.scatter(
                [o["distance"] for o in both], gains, s=14, color=colour, alpha=0.6, lw=0, label=label
            )
        for row in rows:
            if row["methods"] == name:
                low, mean, high = (float(row[end]) for end in ("low", "mean", "high"))
                axes.plot([row["nearest"], row["farthest"]], [mean, mean], color="C3")
                axes.fill_between([row["nearest"], row["farthest"]], low, high, color="C3", alpha=0.15, lw=0)
        axes.axhline(0, color="0.3", linewidth=0.8)
        for at in real.values():
            axes.axvline(at, color="0.6", linestyle=":", linewidth=1)
        axes.set_title(name)
    panels.flat[-1].axis("off")
    panels.flat[-1].legend(*panels[0, 0].get_legend_handles_labels(), loc="center", frameon=False)
    panels[0, 0].set_xlim(-0.3, EDGES[-1] if place == FARTHEST else EDGES[-2])
    for index, (label, at) in enumerate(sorted(real.items(), key=lambda one: one[1])):
        style = {"xycoords": ("data", "axes fraction"), "rotation": 90, "va": "top", "ha": "right"}
        panels[0, 0].annotate(label, (at, 0.98 - 0.16 * (index % 2)), fontsize=8, **style)
    whose = "of the farthest site from the others" if place == FARTHEST else "of the sites"
    figure.supxlabel(f"distance {whose} (medfedaug inspect)")
    figure.supylabel(f"test Dice minus that of {BASELINE}, {PLACES[place]}")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def polarity_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Tabulate the mean Dice of each method by the number of inverted sites, there and elsewhere."""
    lines = ["| inverted sites | methods | federations | inverted sites: Dice | other sites: Dice |"]
    lines.append("|---:|---|---:|---:|---:|")
    for number in sorted({run["inverted"] for run in runs}):
        here = [run for run in runs if run["inverted"] == number]
        for methods in dict.fromkeys(run["methods"] for run in here):
            own = [run for run in here if run["methods"] == methods]
            sites = [sorted(run["dice"].items()) for run in own]
            cut = len(sites[0]) - number
            means = [
                ", ".join(f"{fmean(v for _, v in part):.3f}" for one in sites if (part := one[start:end]))
                for start, end in ((cut, None), (0, cut))
            ]
            lines.append(f"| {number} | `{methods}` | {len(own)} | {means[0] or '–'} | {means[1]} |")
    return "\n".join(lines)


def main() -> None:
    """Make the missing runs, and write tables and pictures."""
    arguments = parser(__doc__)
    arguments.add_argument("--out", type=Path, required=True, help="for numbers, table and pictures")
    arguments.add_argument("--work", type=Path, required=True, help="folder for the phantom sites")
    arguments.add_argument("--seeds", type=int, nargs="*", default=[0])
    arguments.add_argument("--shifts", type=float, nargs="+", default=list(SHIFTS))
    arguments.add_argument("--odd", action="store_true", help="move one scanner only")
    arguments.add_argument("--inverted", type=int, nargs="*", default=[], help="numbers of inverted sites")
    arguments.add_argument("--methods", nargs="+", default=list(METHODS))
    arguments.add_argument("--patients", type=int, default=15)
    arguments.add_argument("--shape", type=int, nargs=3, default=[64, 64, 12])
    arguments.add_argument("--features", type=int, nargs=6, default=[8, 8, 16, 32, 64, 8])
    arguments.add_argument("--rounds", type=int, default=12)
    arguments.add_argument("--local-epochs", type=int, default=2)
    arguments.add_argument("--csv", type=Path, help="gains by distance, as medfedaug inspect reads them")
    arguments.add_argument("--real", nargs="*", default=[], metavar="NAME=DIR", help="data sets to mark")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    numbers = options.out / "numbers.json"
    settings = {
        key: getattr(options, key) for key in ("patients", "shape", "features", "rounds", "local_epochs")
    }
    record: dict[str, Any] = {"settings": settings, "hardware": hardware(), "real": {}, "runs": []}
    if numbers.exists():
        record = json.loads(numbers.read_text())
    if record["settings"] != settings:
        raise SystemExit(f"{numbers} is of other settings: {record['settings']}")
    runs: list[dict[str, Any]] = record["runs"]
    print(hardware(), flush=True)
    for text in options.real:
        name, _, folder = text.partition("=")
        record["real"][name] = distance(Path(folder))
    for seed, dial, number in product(options.seeds, options.shifts, options.inverted or [0]):
        federation = {"seed": seed, "shift": dial, "odd": options.odd}
        federation |= {"inverted": number} if options.inverted else {}
        done = {run["methods"] for run in runs if federation.items() <= run.items()}
        missing = [methods for methods in options.methods if methods not in done]
        data = options.work / f"seed_{seed}_shift_{dial:g}{'_odd' if options.odd else ''}_{number}"
        if missing:
            shutil.rmtree(data, ignore_errors=True)
            apart = moved(options.work, seed, dial) if options.odd else dial
            inverted = [k >= 4 - number for k in range(4)]
            make_phantom(data, 4, options.patients, options.shape, seed, shift=apart, inverted=inverted)
            federation |= distance(data)
        for methods in missing:
            started = time.perf_counter()
            dice = train(data, methods, seed, options)
            runs.append({**federation, "methods": methods, "dice": dice})
            write_json(numbers, record)
            seconds = time.perf_counter() - started
            print(f"{seed} {dial:g} {methods}: {fmean(dice.values()):.3f}, {seconds:.0f} s", flush=True)
        shutil.rmtree(data, ignore_errors=True)
    write_json(numbers, record)
    if options.inverted:
        print(polarity_table(runs))
        return
    rows, tables = [], []
    for place, picture in ((MEAN, "gain.png"), (FARTHEST, "gain_farthest.png")):
        measured = federations(runs, place)
        real = {
            name: max(one["apart"].values()) if place == FARTHEST else one["distance"]
            for name, one in record["real"].items()
        }
        here = by_distance(measured, place)
        draw(measured, here, real, options.out / picture, place)
        tables.append(table(measured, here, place))
        rows += here
    print(*tables, sep="\n\n")
    if options.csv and rows:
        with options.csv.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
