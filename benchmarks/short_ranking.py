"""Do the rankings of `medfedaug compare` hold after five times the rounds? Two sets of ten federations.

Each federation is compared by short trainings, as by `medfedaug compare`, and then trained five times as long
with three other seeds. It has one record. A later call continues from the records::

    OMP_NUM_THREADS=1 nice python benchmarks/short_ranking.py --out docs/results/short_ranking --data DATA
    python benchmarks/short_ranking.py --out docs/results/short_ranking --table
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from medfedaug.analysis.gain_page import largest_gain
from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.data.phantom import Structure, make_phantom
from medfedaug.data.preparation.cache import keep_decoded
from medfedaug.data.sites import arrange, find_sites
from medfedaug.federation.in_process import compare_in_process, run_in_process
from medfedaug.federation.server.comparison import recommended
from medfedaug.methods import parse_methods
from medfedaug.metrics.significance import Gain
from medfedaug.research.datasets.benchmarks import find_root, open_benchmark
from medfedaug.simulate import configure
from medfedaug.utils.files import write_json

METHODS = ("fedavg", "single", "fedrdn", "fedbn", "ditto", "fedfa")
ROUNDS, LONGER, SEEDS = 20, 5, (10, 11, 12)
SETTINGS = {
    "network": "unet",
    "network_args": {"channels": [8, 16], "strides": [2], "norm": "batch"},
    "learning_rate": 1e-2,
    "schedule": "cosine",
    "batch_size": 6,
    "local_steps": 12,
    "augmentation": "none",
}
# Of real data: other settings, and how many cases of each split and site are used.
_PHOTOGRAPHS = {
    "network": "densenet100",
    "network_args": {"block_config": [4, 4, 4]},
    "optimizer": "adam",
    "learning_rate": 3e-3,
    "batch_size": 8,
    "image_size": 32,
}
_REAL: dict[str, tuple[dict[str, Any], int | None]] = {
    "lgg_multisite": ({"image_size": 32}, 8),
    "retina_vessels": ({"image_size": 64}, None),
    "office_caltech_10": (_PHOTOGRAPHS, None),
    "pacs": (_PHOTOGRAPHS, 200),
}

_SPLITS = {"training": 12, "validation": 12, "test": 24}  # patients of a phantom's site
_OUTLINES = (Structure(outline=7.0), Structure(outline=-4.0), Structure())


# Opens the sites, from a folder for phantoms and one of real data.
Federation = Callable[[Path, Path | None], list[SiteFolder]]


def _phantom(seed: int, **arguments: Any) -> Federation:
    def opened(folder: Path, _data: Path | None) -> list[SiteFolder]:
        for site in make_phantom(folder, seed=seed, sites=3, patients=48, shape=(32, 32, 2), **arguments):
            file = site / "dataset.json"
            content = json.loads(file.read_text())
            rows = [row for split in _SPLITS for row in content[split]]
            write_json(
                file, content | {split: [rows.pop() for _ in range(n)] for split, n in _SPLITS.items()}
            )
        return find_sites(folder)

    return opened


def _real(name: str) -> Federation:
    def opened(_folder: Path, data: Path | None) -> list[SiteFolder]:
        if data is None:
            raise SystemExit(f"{name} needs --data, the folder that holds {name}")
        sites = open_benchmark(name, find_root(data, name), limit=_REAL[name][1])
        return arrange([site for site in sites if site.trains])

    return opened


_INVERTED = (False, True, False)
_PHANTOMS: dict[str, dict[str, Any]] = {
    "one_inverted": {"inverted": _INVERTED},
    "inverted_and_odd_scanner": {"shift": (0.3, 0.3, 3.0), "inverted": _INVERTED},
    "inverted_and_different": {"shift": 1.5, "inverted": _INVERTED},
    "outlines": {"structures": _OUTLINES},
    "outlines_and_different": {"shift": 1.5, "structures": _OUTLINES},
    "odd_scanner": {"shift": (3.0, 0.3, 0.3)},
    "very_different_scanners": {"shift": 2.5},
    "different_scanners": {},
}
SETS: tuple[dict[str, Federation], ...] = tuple(
    {
        **{f"{name}{suffix}": _phantom(seed + n, **a) for n, (name, a) in enumerate(_PHANTOMS.items())},
        **{name: _real(name) for name in real},
    }
    for suffix, seed, real in (
        ("", 801, ("lgg_multisite", "retina_vessels")),
        ("_2", 901, ("office_caltech_10", "pacs")),
    )
)
FEDERATIONS = SETS[0] | SETS[1]


def base_settings(name: str, sites: Sequence[SiteFolder]) -> RunConfig:
    """Return the settings of all trainings of a federation."""
    own, _ = _REAL.get(name, ({}, None))
    fixed: dict[str, Any] = {**SETTINGS, **own}
    return configure(sites, methods=parse_methods("fedavg"), rounds=ROUNDS, validate_every=5, **fixed)


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


def named_method(record: dict[str, Any]) -> tuple[str, bool]:
    """Return the method that a comparison names, and whether it was distinguishable from FedAvg."""
    gains = {name: Gain(**gain) for name, gain in record["gains"].items()}
    if names := recommended(gains):
        return names[0], True
    return largest_gain(record["gains"]), False


def table(out: Path, names: Iterable[str]) -> str:
    """Return the table of a set of federations, and the sums below it."""
    lines = ["| federation | named | long trainings, best first | behind the best |", "|---|---|---|---:|"]
    hits, behind, inside, repeated = list[str](), list[float](), list[bool](), list[bool]()
    always: dict[str, list[tuple[bool, float]]] = {method: [] for method in METHODS}
    for name in names:
        file = out / f"{name}.json"
        record = json.loads(file.read_text()) if file.exists() else {"long": {}}
        if any(len(record["long"].get(method, [])) < len(SEEDS) for method in METHODS):
            continue
        means = {method: fmean(scores) for method, scores in record["long"].items()}
        order = sorted(means, key=lambda method: -means[method])
        named, shown = named_method(record["short"])
        behind.append(means[order[0]] - means[named])
        if named in order[:2]:
            hits.append(name)
        for method in METHODS:
            always[method].append((method in order[:2], means[order[0]] - means[method]))
        for seed in range(len(SEEDS)):
            first = max(METHODS, key=lambda method: record["long"][method][seed])
            others = {m: fmean(s for n, s in enumerate(record["long"][m]) if n != seed) for m in METHODS}
            repeated.append(first in sorted(others, key=lambda method: -others[method])[:2])
        for method, gain in record["short"]["gains"].items():
            if gain["low"] is not None:
                inside.append(gain["low"] <= means[method] - means["fedavg"] <= gain["high"])
        ranking = ", ".join(f"{method} {means[method]:.3f}" for method in order)
        words = f"{named}{'' if shown else ', not distinguishable'}{'' if name in hits else ' (miss)'}"
        lines.append(f"| {name} | {words} | {ranking} | {behind[-1]:.3f} |")
    constant = ", ".join(
        f"{method} {sum(hit for hit, _ in found)} and {fmean(lost for _, lost in found):.3f}"
        for method, found in always.items()
        if found
    )
    sums = (
        f"named: {len(hits)} of {len(behind)}, on average {fmean(behind or [0.0]):.3f} behind the best",
        f"always the same method: {constant}",
        f"{sum(inside)} of {len(inside)} intervals contain the gain of the long trainings",
        "the best of one seed's long trainings is among the others' first two in "
        f"{sum(repeated)} of {len(repeated)}",
    )
    return "\n".join([*lines, "", *sums])


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
    print(*(table(args.out, names) for names in SETS), sep="\n\n")


if __name__ == "__main__":
    main()
