r"""Record of phantom federations: test Dice of each method at each site, for a table of gains.

    python benchmarks/calibration.py --work DIR --record calibration.jsonl --draws 8 --seeds 0 1
    python benchmarks/calibration.py --record calibration.jsonl --csv calibration.csv

A family turns one dial of the phantom: `FAMILIES` says for each of them what is drawn. A draw gives one
federation of each family, and a seed gives the federation other patients and other initial weights. Every
federation is trained with one seed before any is trained with the next. A line of the record is one training.
An interrupted record goes on where it stopped, and a federation is completed before the next begins; with
`--methods` the methods of most use can be trained first.

The number of rounds follows from validation: a training whose best validation score is of its last third, and
by `_STEP` above the best before, is repeated with twice the rounds, up to `_MOST` times the first number. The
line has the validation scores of all rounds.

`--csv` writes a row for each federation, seed, site, method and norm of which FedAvg is in the record, and
makes the phantoms again for the sites' fingerprints. Rows of other federations that the file has already are
kept. With `--shift-record`, the rows are those of records of `shift_gain.py`.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch
from measure import hardware
from shift_gain import moved

from medfedaug.analysis.calibration_table import COLUMNS
from medfedaug.data.datasets.phantom import Structure, make_phantom
from medfedaug.data.quality.image_fingerprint import fingerprint_of
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError
from medfedaug.federation import run_in_process
from medfedaug.federation.pooled import run_pooled
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure

METHODS = ("fedavg", "single", "norm", "fedrdn", "fedfa", "fedbn", "fixbn", "ditto", "pooled")
NORMS = ("batch", "instance")
SITES, SHAPE = 3, (32, 32, 6)
TESTED = 12
"""Test patients of each site, besides those who train and validate."""

_STEP, _MOST = 0.01, 2
_RANDOM = np.random.RandomState


@dataclass(frozen=True)
class Dials:
    """Settings of a phantom federation that its family draws; the others are at rest.

    Attributes:
        patients: their number at each site, of training and validation.
        shift: of each site's scanner (`medfedaug.data.datasets.phantom.Scanner.shifted`).
        inverted: whether each site's images are inverted.
        spacings: edges of a voxel at each site, mm; none where every volume has one shape.
        scanner_values: numbers of each site's scanner that are given.
        structures: of each site.
    """

    patients: tuple[int, ...] = (12,) * SITES
    shift: tuple[float, ...] = (0.5,) * SITES
    inverted: tuple[bool, ...] = (False,) * SITES
    spacings: tuple[tuple[float, ...], ...] = ()
    scanner_values: tuple[Mapping[str, float], ...] = ({},) * SITES
    structures: tuple[Structure, ...] = field(default=(Structure(),) * SITES)


def _values(R: _RANDOM, name: str, low: float, high: float) -> Dials:
    """One number of the scanners, drawn evenly in the logarithm; at every second draw of one site alone."""
    drawn = np.exp(R.uniform(np.log(low), np.log(high), SITES)).round(4).tolist()
    odd = R.randint(2 * SITES)
    if odd < SITES:
        drawn = [one if site == odd else float(np.sqrt(low * high)) for site, one in enumerate(drawn)]
    return Dials(shift=(0.3,) * SITES, scanner_values=tuple({name: value} for value in drawn))


def _structures(R: _RANDOM, draw: Callable[[], Structure]) -> Dials:
    return Dials(structures=tuple(draw() for _ in range(SITES)))


def _odd(R: _RANDOM) -> Dials:
    odd, dial = R.randint(SITES), round(R.uniform(0.5, 3), 2)
    return Dials(shift=tuple(dial if site == odd else 0.0 for site in range(SITES)))


def _polarity(R: _RANDOM) -> Dials:
    odd, dial = R.randint(SITES), round(R.uniform(0, 1.5), 2)
    return Dials(shift=(dial,) * SITES, inverted=tuple(site == odd for site in range(SITES)))


def _patients(R: _RANDOM) -> Dials:
    if R.randint(2):
        return Dials(patients=(int(R.choice([5, 8, 16, 24])),) * SITES)
    return Dials(patients=tuple(R.choice([5, 8, 12, 20], SITES).tolist()))


FAMILIES: dict[str, Callable[[_RANDOM], Dials]] = {
    "scanners": lambda R: Dials(shift=(round(R.uniform(0, 2), 2),) * SITES),
    "odd": _odd,
    "polarity": _polarity,
    "noise": lambda R: _values(R, "noise", 0.01, 0.25),
    "blur": lambda R: _values(R, "blur", 0.5, 12),
    "field_of_view": lambda R: _values(R, "field_of_view", 200, 420),
    "resolution": lambda R: Dials(
        spacings=tuple((edge, edge, 14.0) for edge in R.uniform(5, 12, SITES).round(2).tolist())
    ),
    "structure": lambda R: _structures(
        R, lambda: Structure(lesions=int(R.randint(1, 5)), size=round(float(R.uniform(0.6, 1.6)), 2))
    ),
    "label_style": lambda R: _structures(R, lambda: Structure(outline=round(float(R.uniform(-6, 8)), 1))),
    "prevalence": lambda R: _structures(R, lambda: Structure(prevalence=round(float(R.uniform(0.2, 1)), 2))),
    "patients": _patients,
}
"""The dial that each family draws."""


@dataclass(frozen=True)
class Federation:
    """A phantom federation, which follows from these three.

    Attributes:
        family: of `FAMILIES`.
        draw: the number of the federation in its family, of which dials and scanners follow.
        seed: of patients and initial weights.
    """

    family: str
    draw: int
    seed: int

    @property
    def dials(self) -> Dials:
        """Draw the dials; the same family and draw give the same."""
        return FAMILIES[self.family](_RANDOM([list(FAMILIES).index(self.family), self.draw]))

    @property
    def name(self) -> str:
        """Return the name of the federation in the record, without the seed."""
        return f"{self.family}_{self.draw}"

    def write(self, folder: Path) -> None:
        """Write the sites' images; patients beyond the dials' number are test patients of the site."""
        dials = self.dials
        make_phantom(
            folder,
            SITES,
            max(dials.patients) + TESTED,
            SHAPE,
            self.seed * 1000 + self.draw,
            shift=dials.shift,
            inverted=dials.inverted,
            spacings=dials.spacings or None,
            scanner_seed=self.draw,
            scanner_values=dials.scanner_values,
            structures=dials.structures,
        )
        for site, number in zip(sorted(folder.glob("site_*")), dials.patients, strict=True):
            _share_out(site / "dataset.json", number)


def _share_out(path: Path, number: int) -> None:
    """Let a third of so many patients validate and the others train; further ones are tested."""
    listed = json.loads(path.read_text(encoding="utf-8"))
    splits = ("training", "validation", "test")
    cases = sorted((case for split in splits for case in listed[split]), key=lambda case: case["image"])
    kept, listed["test"] = cases[:number], cases[-TESTED:]
    # The first patients of the phantom, one of each split, always have lesions.
    listed["validation"] = kept[1::3]
    listed["training"] = [case for case in kept if case not in listed["validation"]]
    listed |= {f"num{split.capitalize()}": len(listed[split]) for split in splits}
    path.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def train(data: Path, methods: str, norm: str, seed: int, rounds: int) -> dict[str, Any]:
    """Train one combination; return the test Dice by site and the mean validation score of each round."""
    folders = find_sites(data)
    config = configure(
        folders,
        methods=tuple(parse_methods(methods)),
        network_args={"features": [8, 8, 16, 32, 64, 8], "norm": norm},
        rounds=rounds,
        local_epochs=4,
        batch_size=8,
        learning_rate=0.006,
        schedule="cosine",
        seed=seed,
    )
    run = run_pooled if methods == "pooled" else run_in_process
    results = run(config, data, folders, "cpu").results()
    validation = []
    for one in results["rounds"]:
        scores = [site.get("val_dice") for site in one["sites"].values()]
        known = [score for score in scores if score is not None]
        validation.append(round(fmean(known), 4) if known else None)
    return {
        "rounds": rounds,
        "dice": {site: entry["dice"] for site, entry in results["test"]["sites"].items()},
        "cases": {site: _of_cases(entry["cases"]) for site, entry in results["test"]["sites"].items()},
        "selected_round": results["selected_round"],
        "validation": validation,
    }


def _of_cases(scores: Mapping[str, Any]) -> list[float | None]:
    """Test Dice of each patient, in the order of their names."""
    found = [one["dice"] if isinstance(one, Mapping) else one for _, one in sorted(scores.items())]
    return [None if score is None else round(score, 4) for score in found]


def is_converged(validation: Sequence[float | None]) -> bool:
    """Return whether the last third of the rounds brought at most `_STEP` to the best validation score."""
    scores = [score or 0.0 for score in validation]
    first = -(-len(scores) * 2 // 3)
    return max(scores[first:], default=0) <= max(scores[:first]) + _STEP


def measure(
    federation: Federation, work: Path, missing: Sequence[tuple[str, str]], rounds: int
) -> Iterator[dict[str, Any]]:
    """Train a federation with each of some methods and norms."""
    data = work / f"{federation.name}_{federation.seed}"
    shutil.rmtree(data, ignore_errors=True)
    federation.write(data)
    for methods, norm in missing:
        started = time.perf_counter()
        line: dict[str, Any] = {"federation": federation.name, **asdict(federation), "first_rounds": rounds}
        line |= {"methods": methods, "norm": norm}
        try:
            number = rounds
            found = train(data, methods, norm, federation.seed, number)
            while not is_converged(found["validation"]) and number < _MOST * rounds:
                number *= 2
                found = train(data, methods, norm, federation.seed, number)
            line |= found
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


Scores = Mapping[str, float]
Cases = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True)
class Training:
    """A training of the table.

    Attributes:
        federation: its name; a training with another seed has the same.
        family: of the federation.
        seed: of patients and initial weights.
        methods: the combination.
        norm: of the network.
        rounds: of the training.
        selected_round: empty where it was not recorded.
        dice: by site.
        cases: test Dice of each patient by site; empty where it was not recorded.
        write: writes the sites' images to a folder.
    """

    federation: str
    family: str
    seed: int
    methods: str
    norm: str
    rounds: int
    selected_round: str
    dice: Scores
    cases: Cases
    write: Callable[[Path], None]

    @property
    def run(self) -> tuple[str, int, str]:
        """The trainings that are compared with one another."""
        return self.federation, self.seed, self.norm


def of_record(lines: Sequence[Mapping[str, Any]]) -> list[Training]:
    """The trainings of the record of this script."""
    return [
        Training(
            **{
                key: line[key]
                for key in ("federation", "family", "seed", "methods", "norm", "rounds", "dice")
            },
            selected_round=str(line["selected_round"]),
            cases=line["cases"],
            write=Federation(line["family"], line["draw"], line["seed"]).write,
        )
        for line in lines
        if "dice" in line
    ]


def of_shift_record(path: Path) -> list[Training]:
    """The trainings of a record of `shift_gain.py`, whose phantoms follow from seed and dials."""
    record = json.loads(path.read_text(encoding="utf-8"))
    size, found = record["settings"], []
    for run in record["runs"]:
        seed, dial, number = run["seed"], run["shift"], run.get("inverted", 0)
        family = "odd" if run["odd"] else "polarity" if number else "scanners"

        def write(folder: Path, run: Mapping[str, Any] = run, number: int = number) -> None:
            seed, dial = run["seed"], run["shift"]
            shift = moved(folder.parent, seed, dial) if run["odd"] else dial
            inverted = [k >= 4 - number for k in range(4)]
            make_phantom(folder, 4, size["patients"], size["shape"], seed, shift=shift, inverted=inverted)

        found.append(
            Training(
                federation=f"{family}{number or ''}_64_{dial:g}_{seed}",
                family=family,
                seed=seed,
                methods=run["methods"],
                norm="batch",
                rounds=size["rounds"],
                selected_round="",
                dice=run["dice"],
                cases={},
                write=write,
            )
        )
    return found


def write_table(trainings: Sequence[Training], path: Path) -> int:
    """Write the rows of federations with FedAvg, keep others, and return the number of the former."""
    before: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            before = list(csv.DictReader(file))
    known = {one.run: one for one in trainings if one.methods == "fedavg"}
    prints: dict[tuple[str, int], dict[str, str]] = {}
    for row in before:
        if row["fingerprint"]:
            prints.setdefault((row["federation"], int(row["seed"])), {})[row["site"]] = row["fingerprint"]
    for one in known.values():
        if (key := (one.federation, one.seed)) not in prints:
            prints[key] = fingerprints(one.write)
            print(f"fingerprints of {one.federation}, seed {one.seed}", flush=True)
    names = {one.federation for one in known.values()}
    rows = [row for row in before if row["federation"] not in names]
    for one in {(*one.run, one.methods): one for one in trainings if one.run in known}.values():
        for site, dice in sorted(one.dice.items()):
            cases = one.cases, known[one.run].cases
            rows.append(
                {
                    **{key: str(getattr(one, key)) for key in COLUMNS if hasattr(one, key)},
                    "site": site,
                    "metric": "dice",
                    "score": f"{dice:.4f}",
                    "patient_deviation": _deviation(*(found[site] for found in cases)) if all(cases) else "",
                    # Once for each site and seed: it does not depend on the method.
                    "fingerprint": prints[one.run[:2]][site] if one.methods == "fedavg" else "",
                }
            )
    if rows:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return len(names)


def fingerprints(write: Callable[[Path], None]) -> dict[str, str]:
    """Make a federation's images again, and return the fingerprint of each site as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "sites")
        found = map(fingerprint_of, find_sites(Path(folder) / "sites"))
        return {one.site: json.dumps(one.to_dict(), separators=(",", ":")) for one in found}


def _deviation(ours: Sequence[float | None], theirs: Sequence[float | None]) -> str:
    """Deviation over the patients of the difference from FedAvg."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    apart = [a - b for a, b in pairs]
    return f"{stdev(apart):.4f}" if len(apart) > 1 and any(apart) else ""


def main() -> None:
    """Make the trainings that the record lacks, or the table of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--record", type=Path, help="one JSON line for each training")
    parser.add_argument("--csv", type=Path, help="write the table of the record, and train nothing")
    parser.add_argument("--shift-record", type=Path, nargs="+", help="write the table of these records")
    parser.add_argument("--work", type=Path, help="folder for the phantom sites")
    parser.add_argument("--draws", type=int, default=8, help="federations of each family")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--norms", nargs="+", choices=NORMS, default=list(NORMS))
    parser.add_argument("--rounds", type=int, default=10, help="of a training that converges in them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.record and not (options.shift_record and options.csv):
        parser.error("name a record: --record FILE, or --shift-record FILE with --csv FILE")
    lines = read(options.record) if options.record else []
    if options.csv:
        given = [one for path in options.shift_record or () for one in of_shift_record(path)]
        number = write_table([*of_record(lines), *given], options.csv)
        print(f"{number} federations in {options.csv}")
        return
    if options.work is None:
        parser.error("name a folder for the phantom sites: --work DIR")
    if any(line["first_rounds"] != options.rounds for line in lines):
        parser.error(f"{options.record} has another number of rounds; name a new --record")
    options.work.mkdir(parents=True, exist_ok=True)
    order = [
        Federation(family, draw, seed)
        for seed in options.seeds
        for draw in range(options.draws)
        for family in options.families
    ]
    for federation in order:
        key = (federation.name, federation.seed)
        done = {(one["methods"], one["norm"]) for one in lines if (one["federation"], one["seed"]) == key}
        wanted = [(methods, norm) for norm in options.norms for methods in options.methods]
        missing = [one for one in wanted if one not in done]
        for line in measure(federation, options.work, missing, options.rounds) if missing else ():
            with options.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            told = line.get("refused") or f"{fmean(line['dice'].values()):.3f}"
            what = f"{federation.name} seed {federation.seed} {line['methods']} {line['norm']}"
            print(f"{what}: {told}, {line['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
