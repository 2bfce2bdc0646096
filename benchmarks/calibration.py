r"""Record of phantom federations: fingerprint of each site, and test Dice of each method there.

    python benchmarks/calibration.py --work DIR --record calibration.jsonl --seeds 0 1
    python benchmarks/calibration.py --record calibration.jsonl --csv calibration.csv

Each family turns one dial of `medfedaug phantom`: all scanners apart, one scanner apart, inverted sites,
number of patients, edges of a voxel. A seed draws one federation of each family, and every method is trained
on it with batch norm and with instance norm. A line of the record is one training. An interrupted record goes
on where it stopped, a federation is completed before the next begins, and all families have a seed before
any has the next. `--csv` writes a row for each federation, site, method and norm, of complete federations
alone; the round that was selected and the validation scores of the last rounds show convergence.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from measure import hardware

from medfedaug.analysis.inspection_page import federation_shift
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.quality.inspection import QUANTILES, SiteInspection, inspect_sites
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.federation.pooled import run_pooled
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure

METHODS = ("fedavg", "single", "norm", "fedrdn", "fedfa", "fedbn", "fixbn", "ditto", "pooled")
NORMS = ("batch", "instance")
FAMILIES = ("scanners", "odd", "polarity", "patients", "resolution")
SITES, SHAPE = 4, (48, 48, 8)
LEVELS = (0.01, 0.1, 0.5, 0.9, 0.99)
"""Quantiles of the intensities that a fingerprint holds."""


@dataclass(frozen=True)
class Federation:
    """Dials of one phantom federation.

    Attributes:
        family: the dial that was drawn; the others are at rest.
        seed: of patients, scanners and initial weights.
        patients: their number at each site.
        shift: of each site's scanner (`medfedaug.data.datasets.phantom.Scanner.shifted`).
        inverted: whether each site's images are inverted.
        spacings: edges of a voxel at each site, mm; none where every volume has one shape.
    """

    family: str
    seed: int
    patients: int
    shift: tuple[float, ...]
    inverted: tuple[bool, ...]
    spacings: tuple[tuple[float, ...], ...]

    @classmethod
    def drawn(cls, family: str, seed: int) -> Federation:
        """Draw the dials of a family from a seed; the same arguments give the same federation."""
        R = np.random.RandomState([FAMILIES.index(family), seed])
        shift, patients, inverted, edges = [0.5] * SITES, 15, 0, []
        if family == "scanners":
            shift = [round(R.uniform(0, 2), 2)] * SITES
        elif family == "odd":
            odd, dial = R.randint(SITES), round(R.uniform(0.5, 3), 2)
            shift = [dial if site == odd else 0.0 for site in range(SITES)]
        elif family == "polarity":
            inverted = R.randint(1, SITES // 2 + 1)
        elif family == "patients":
            patients = int(R.choice([5, 10, 20, 30]))
        else:
            edges = [(edge, edge, 12.0) for edge in R.uniform(4, 7, SITES).round(2).tolist()]
        flags = tuple(site >= SITES - inverted for site in range(SITES))
        return cls(family, seed, patients, tuple(shift), flags, tuple(edges))

    @property
    def name(self) -> str:
        """Return the name of the federation in the record."""
        return f"{self.family}_{self.seed}"

    def write(self, folder: Path) -> None:
        """Write the sites' images."""
        make_phantom(
            folder,
            SITES,
            self.patients,
            SHAPE,
            self.seed,
            shift=self.shift,
            inverted=self.inverted,
            spacings=self.spacings or None,
        )


def fingerprint(site: SiteInspection, distance: float) -> dict[str, Any]:
    """Summaries of a site's training images as a run sees them.

    Args:
        site: what was found at the site.
        distance: mean distance from the other sites (`medfedaug.analysis.shift.Shift.by_site`).
    """
    known = [edge for edges, count in site.edges.items() for edge in [edges] * count]
    return {
        "distance": distance,
        "patients": site.patients,
        "training_cases": len(site.pairs),
        "mean": site.pairs[..., 0].mean(axis=0).tolist(),
        "std": site.pairs[..., 1].mean(axis=0).tolist(),
        "mean_spread": site.pairs[..., 0].std(axis=0).tolist(),
        "std_spread": site.pairs[..., 1].std(axis=0).tolist(),
        "quantiles": site.seen[..., np.searchsorted(QUANTILES, LEVELS)].mean(axis=0).tolist(),
        "edges": np.mean(known, axis=0).tolist() if known else [],
        "shares": site.voxels,
    }


def train(data: Path, methods: str, norm: str, seed: int, rounds: int) -> dict[str, Any]:
    """Train one combination; return the test Dice by site and the validation scores of the rounds."""
    folders = find_sites(data)
    config = configure(
        folders,
        methods=tuple(parse_methods(methods)),
        network_args={"features": [8, 8, 16, 32, 64, 8], "norm": norm},
        rounds=rounds,
        local_epochs=2,
        batch_size=8,
        learning_rate=0.003,
        schedule="cosine",
        seed=seed,
    )
    run = run_pooled if methods == "pooled" else run_in_process
    results = run(config, data, folders, "cpu").results()
    validation = []
    for one in results["rounds"]:
        scores = [site.get("val_dice") for site in one["sites"].values()]
        known = [score for score in scores if score is not None]
        validation.append(fmean(known) if known else None)
    return {
        "dice": {site: entry["dice"] for site, entry in results["test"]["sites"].items()},
        "selected_round": results["selected_round"],
        "validation": validation,
    }


def measure(
    federation: Federation, work: Path, done: set[tuple[str, str]], rounds: int
) -> Iterator[dict[str, Any]]:
    """Make the trainings of a federation that the record lacks."""
    missing = [(methods, norm) for norm in NORMS for methods in METHODS if (methods, norm) not in done]
    if not missing:
        return
    data = work / federation.name
    shutil.rmtree(data, ignore_errors=True)
    federation.write(data)
    found = inspect_sites(data)
    shift = federation_shift(found)
    assert shift is not None
    sites = {site.name: fingerprint(site, shift.by_site[site.name]) for site in found}
    for methods, norm in missing:
        started = time.perf_counter()
        line: dict[str, Any] = {"federation": federation.name, **asdict(federation), "rounds": rounds}
        line |= {"methods": methods, "norm": norm}
        try:
            line |= {"sites": sites, **train(data, methods, norm, federation.seed, rounds)}
        except ConfigError as error:  # the method does not go with the norm: recorded, and not tried again
            line |= {"refused": str(error)}
        yield {**line, "seconds": round(time.perf_counter() - started, 1), "hardware": hardware()}
    shutil.rmtree(data, ignore_errors=True)


def read(record: Path) -> list[dict[str, Any]]:
    """Read the record; a last line that was cut off by a killed process is removed from the file."""
    if not record.exists():
        return []
    whole = record.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        record.write_bytes(kept)
    return [json.loads(line) for line in kept.splitlines()]


def write_table(lines: Sequence[Mapping[str, Any]], path: Path) -> int:
    """Write the rows of complete federations; return the number of these federations."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for line in lines:
        by_name.setdefault(line["federation"], []).append(line)
    full = {name: found for name, found in by_name.items() if len(found) == len(METHODS) * len(NORMS)}
    rows = [
        {
            **{key: line[key] for key in ("federation", "family", "seed")},
            "site": site,
            **{key: line[key] for key in ("methods", "norm", "rounds", "selected_round")},
            "dice": f"{dice:.4f}",
            "fingerprint": json.dumps(line["sites"][site]),
        }
        for found in full.values()
        for line in found
        if "dice" in line
        for site, dice in line["dice"].items()
    ]
    if rows:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return len(full)


def main() -> None:
    """Make the trainings that the record lacks, or the table of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="one JSON line for each training")
    parser.add_argument("--csv", type=Path, help="write the table of the record, and train nothing")
    parser.add_argument("--work", type=Path, help="folder for the phantom sites")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    lines = read(options.record)
    if options.csv:
        print(f"{write_table(lines, options.csv)} complete federations in {options.csv}")
        return
    if options.work is None:
        parser.error("name a folder for the phantom sites: --work DIR")
    if any(line["rounds"] != options.rounds for line in lines):
        parser.error(f"{options.record} has another number of rounds; name a new --record")
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for family in options.families:
            federation = Federation.drawn(family, seed)
            done = {(one["methods"], one["norm"]) for one in lines if one["federation"] == federation.name}
            for line in measure(federation, options.work, done, options.rounds):
                with options.record.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
                told = line.get("refused") or f"{fmean(line['dice'].values()):.3f}"
                print(
                    f"{federation.name} {line['methods']} {line['norm']}: {told}, {line['seconds']} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
