"""Does the ranking of `medfedaug compare` hold after five times the rounds? Ten federations, one record each.

Each federation is compared by short trainings, as by `medfedaug compare`, and then trained five times as long
with three other seeds. A later call continues from the records::

    OMP_NUM_THREADS=1 nice python benchmarks/short_ranking.py --out docs/results/short_ranking --data DATA
    python benchmarks/short_ranking.py --out docs/results/short_ranking --table
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.data.phantom import Structure, make_phantom
from medfedaug.data.preparation.cache import keep_decoded
from medfedaug.data.sites import arrange, find_sites
from medfedaug.federation.in_process import compare_in_process, run_in_process
from medfedaug.methods import parse_methods
from medfedaug.research.datasets.benchmarks import open_benchmark
from medfedaug.simulate import configure
from medfedaug.utils.files import write_json

METHODS = ("fedavg", "single", "fedrdn", "fedbn", "ditto", "fedfa")
ROUNDS, LONGER, SEEDS = 8, 5, (10, 11, 12)
SETTINGS = {
    "network": "unet",
    "network_args": {"channels": [8, 16, 32], "strides": [2, 2], "norm": "batch"},
    "learning_rate": 1e-2,
    "batch_size": 6,
    "local_steps": 6,
    "augmentation": "none",
}

_OUTLINES = (Structure(outline=7.0), Structure(outline=-4.0))
_LESIONS = (Structure(lesions=3, size=0.6), Structure(size=1.6))


def _phantom(seed: int, **arguments: Any) -> Callable[[Path, Path | None], list[SiteFolder]]:
    def opened(folder: Path, _data: Path | None) -> list[SiteFolder]:
        usual: dict[str, Any] = {"sites": 2, "patients": 20, "shape": (32, 32, 2)}
        make_phantom(folder, seed=seed, **{**usual, **arguments})
        return find_sites(folder)

    return opened


def _real(name: str, folder: str, limit: int) -> Callable[[Path, Path | None], list[SiteFolder]]:
    def opened(_folder: Path, data: Path | None) -> list[SiteFolder]:
        if data is None:
            raise SystemExit(f"{name} needs --data, the folder that holds {folder}")
        return arrange([site for site in open_benchmark(name, data / folder, limit=limit) if site.trains])

    return opened


FEDERATIONS: dict[str, Callable[[Path, Path | None], list[SiteFolder]]] = {
    "different_scanners": _phantom(201),
    "very_different_scanners": _phantom(202, shift=2.0),
    "alike_scanners": _phantom(203, shift=0.0),
    "one_odd_scanner": _phantom(204, sites=3, shift=(3.0, 0.3, 0.3)),
    "one_site_inverted": _phantom(205, inverted=(False, True)),
    "inverted_and_different": _phantom(206, sites=3, shift=1.5, inverted=(False, True, False)),
    "outlines": _phantom(207, structures=_OUTLINES),
    "lesions": _phantom(208, structures=_LESIONS, shape=(40, 40, 2)),
    "outlines_and_scanners": _phantom(209, shift=1.5, structures=_OUTLINES),
    "lgg": _real("lgg_multisite", "lgg_multisite", 3),
}


def base_settings(name: str, sites: Sequence[SiteFolder]) -> RunConfig:
    """Return the settings of all trainings of a federation."""
    size = {"image_size": 32} if name == "lgg" else {}
    return configure(sites, methods=parse_methods("fedavg"), rounds=ROUNDS, **SETTINGS, **size)


def measure(name: str, out: Path, data: Path | None) -> None:
    """Make the missing trainings of a federation."""
    file = out / f"{name}.json"
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"long": {}}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(keep_decoded(2**30))
        sites = FEDERATIONS[name](Path(folder) / "data", data)
        run = base_settings(name, sites)
        execution = Execution(threads=1)
        if "short" not in record:
            started = time.process_time()
            methods = {method: parse_methods(method) for method in METHODS}
            config = ComparisonConfig(run=run, methods=methods)
            result = compare_in_process(config, sites, Path(folder) / "state", "cpu", execution=execution)
            record["short"] = {"processor_seconds": round(time.process_time() - started, 1), **result}
            write_json(file, record)
        long = replace(run, rounds=LONGER * ROUNDS, validate_every=ROUNDS)
        for seed in SEEDS:
            for method in METHODS:
                scores = record["long"].setdefault(method, [])
                if len(scores) > SEEDS.index(seed):
                    continue
                config_of_run = replace(long, methods=tuple(parse_methods(method)), seed=seed)
                server = run_in_process(config_of_run, Path(folder), sites, "cpu", execution=execution)
                mean = server.results()["test"]["mean"]
                scores.append(round(mean[next(iter(mean))], 4))
                write_json(file, record)


def table(out: Path) -> str:
    """Return the table of the page, and the sums below it."""
    lines = ["| federation | named | largest gain | long trainings, best first |", "|---|---|---|---|"]
    hits = largest_hits = total = inside = intervals = repeated = 0
    for name in FEDERATIONS:
        file = out / f"{name}.json"
        record = json.loads(file.read_text()) if file.exists() else {"long": {}}
        if any(len(record["long"].get(method, [])) < len(SEEDS) for method in METHODS):
            continue
        means = {method: fmean(scores) for method, scores in record["long"].items()}
        order = sorted(means, key=lambda method: -means[method])
        gains = record["short"]["gains"]
        named = next(iter(record["short"]["recommended"]), "none")
        largest = max(["fedavg", *gains], key=lambda m: gains[m]["mean"] if m in gains else 0.0)
        marks = ["" if method in order[:2] else " (miss)" for method in (named, largest)]
        hits, largest_hits, total = hits + (not marks[0]), largest_hits + (not marks[1]), total + 1
        for seed in range(len(SEEDS)):
            first = max(METHODS, key=lambda method: record["long"][method][seed])
            others = {m: fmean(s for n, s in enumerate(record["long"][m]) if n != seed) for m in METHODS}
            repeated += first in sorted(others, key=lambda method: -others[method])[:2]
        for method, gain in gains.items():
            if gain["low"] is not None:
                intervals += 1
                inside += gain["low"] <= means[method] - means["fedavg"] <= gain["high"]
        ranking = ", ".join(f"{method} {means[method]:.2f}" for method in order)
        lines.append(f"| {name} | {named}{marks[0]} | {largest}{marks[1]} | {ranking} |")
    return "\n".join(
        [
            *lines,
            "",
            f"named: {hits} of {total}; largest gain: {largest_hits} of {total}; "
            f"{inside} of {intervals} intervals contain the gain of the long trainings; the best of one "
            f"seed's long trainings is among the others' first two in {repeated} of {total * len(SEEDS)}",
        ]
    )


def main() -> None:
    """Measure the named federations, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("names", nargs="*", metavar="FEDERATION", help=", ".join(FEDERATIONS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        for name in args.names or FEDERATIONS:
            measure(name, args.out, args.data)
    print(table(args.out))


if __name__ == "__main__":
    main()
