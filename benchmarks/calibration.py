r"""Record of phantom federations: test Dice of each method at each site, for a table of gains.

    python benchmarks/calibration.py --work DIR --record calibration.jsonl --draws 8 --seeds 0 1
    python benchmarks/calibration.py --record calibration.jsonl --csv calibration.csv
    python benchmarks/calibration.py --results runs/retina runs.tar.xz --data DATA --csv calibration.csv

A family turns one dial of the phantom (`FAMILIES`). A draw gives one federation of each family, and a seed
gives the federation other patients and other initial weights. Every federation is trained with one seed
before any is trained with the next. A line of the record is one training. An interrupted record continues,
and a federation is completed before the next begins; `--methods` selects the methods to train first.

The number of rounds follows from validation: a training whose best validation score is of its last third, and
by 0.01 above the best before, is repeated with twice the rounds, up to `_MOST` times the first number. The
line has the validation scores of all rounds.

`--csv` writes a row for each federation, seed, site, method and norm with FedAvg in the record, and makes the
phantoms again for the sites' fingerprints. The file keeps rows of other federations. `--shift-record` takes
the trainings of records of `shift_gain.py`. `--results` takes those of runs of `medfedaug benchmark`, where
each data set is a family; `--data` is the folder of their images.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from calibration_rows import Training, as_text, write_table, written
from calibration_table import PHANTOM
from measure import hardware, parser
from recorded_federations import of_results, of_shift_record

from medfedaug.config.plan import Plan
from medfedaug.data.datasets.phantom import Structure, make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.experiments.prospective import SMALL
from medfedaug.federation import run_in_process
from medfedaug.federation.pooled import run_pooled
from medfedaug.methods import parse_methods
from medfedaug.metrics.convergence import is_converged
from medfedaug.simulate import configure

METHODS = ("fedavg", "single", "norm", "fedrdn", "fedfa", "fedbn", "fixbn", "ditto", "pooled")
NORMS = ("batch", "instance")
SITES, SHAPE = 3, (32, 32, 6)
TESTED = 12
"""Number of test patients of each site."""

_MOST = 2
_RANDOM = np.random.RandomState


@dataclass(frozen=True)
class Dials:
    """Settings of a phantom federation, of which its family draws some.

    Attributes:
        patients: number of patients for training and validation at each site.
        shift: of each site's scanner (`medfedaug.data.datasets.phantom.Scanner.shifted`).
        inverted: whether each site's images are inverted.
        spacings: edges of a voxel at each site, mm; empty where all volumes have one shape.
        scanner_values: fixed numbers of each site's scanner.
        structures: of each site.
        shape: voxels of a volume; without effect with ``spacings``.
        dimensions: 2 for networks of slices, 3 for volumes.
    """

    patients: tuple[int, ...] = (12,) * SITES
    shift: tuple[float, ...] = (0.5,) * SITES
    inverted: tuple[bool, ...] = (False,) * SITES
    spacings: tuple[tuple[float, ...], ...] = ()
    scanner_values: tuple[Mapping[str, float], ...] = ({},) * SITES
    structures: tuple[Structure, ...] = field(default=(Structure(),) * SITES)
    shape: tuple[int, ...] = SHAPE
    dimensions: int = 2


def _values(R: _RANDOM, name: str, low: float, high: float) -> Dials:
    """Draw one number of the scanners, evenly in the logarithm; in every second draw for one site only."""
    drawn = np.exp(R.uniform(np.log(low), np.log(high), SITES)).round(4).tolist()
    odd = R.randint(2 * SITES)
    if odd < SITES:
        drawn = [value if site == odd else float(np.sqrt(low * high)) for site, value in enumerate(drawn)]
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
    "volumes": lambda R: Dials(
        shift=(round(R.uniform(0, 2), 2),) * SITES, shape=(*SHAPE[:2], 16), dimensions=3
    ),
}
"""Draw of the dials, by family."""


@dataclass(frozen=True)
class Federation:
    """A phantom federation.

    Attributes:
        family: of `FAMILIES`.
        draw: the number of the federation in its family, which gives dials and scanners.
        seed: of patients and initial weights.
    """

    family: str
    draw: int
    seed: int

    @property
    def dials(self) -> Dials:
        """Draw the dials of the family and draw."""
        return FAMILIES[self.family](_RANDOM([list(FAMILIES).index(self.family), self.draw]))

    @property
    def name(self) -> str:
        """Return the name of the federation in the record, without the seed."""
        return f"{self.family}_{self.draw}"

    def write(self, folder: Path) -> None:
        """Write the sites' images; patients beyond the dials' number are test patients."""
        dials = self.dials
        make_phantom(
            folder,
            SITES,
            max(dials.patients) + TESTED,
            dials.shape,
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
    """Split a number of patients into training and a third for validation; the last are for the test."""
    listed = json.loads(path.read_text(encoding="utf-8"))
    splits = ("training", "validation", "test")
    cases = sorted((case for split in splits for case in listed[split]), key=lambda case: case["image"])
    kept, listed["test"] = cases[:number], cases[-TESTED:]
    # The first patients of the phantom, one of each split, always have lesions.
    listed["validation"] = kept[1::3]
    listed["training"] = [case for case in kept if case not in listed["validation"]]
    listed |= {f"num{split.capitalize()}": len(listed[split]) for split in splits}
    path.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def train(data: Path, methods: str, norm: str, seed: int, rounds: int, dimensions: int) -> dict[str, Any]:
    """Train one combination; return the test Dice by site and the mean validation score of each round."""
    folders = find_sites(data)
    # An epoch has as many steps as there are slices or volumes.
    sizes = {} if dimensions == 2 else {"local_epochs": 8, "batch_size": 2}
    config = configure(
        folders,
        methods=tuple(parse_methods(methods)),
        rounds=rounds,
        plan=Plan(spatial_dims=dimensions),
        seed=seed,
        **{**SMALL, **sizes, "network_args": {**SMALL["network_args"], "norm": norm}},
    )
    run = run_pooled if methods == "pooled" else run_in_process
    results = run(config, data, folders, "cpu").results()
    validation = []
    for round_ in results["rounds"]:
        scores = [site.get("val_dice") for site in round_["sites"].values()]
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
    """Return the test Dice of each patient, in the order of their names."""
    values = [value["dice"] if isinstance(value, Mapping) else value for _, value in sorted(scores.items())]
    return [None if score is None else round(score, 4) for score in values]


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
        run = partial(train, data, methods, norm, federation.seed, dimensions=federation.dials.dimensions)
        try:
            number = rounds
            result = run(number)
            while not is_converged(result["validation"]) and number < _MOST * rounds:
                number *= 2
                result = run(number)
            line |= result
        except ConfigError as error:  # the method does not fit the norm
            line |= {"refused": str(error)}
        yield {**line, "seconds": round(time.perf_counter() - started, 1), "hardware": hardware()}
    shutil.rmtree(data, ignore_errors=True)


def read(record: Path) -> list[dict[str, Any]]:
    """Read the record, and remove a last line that a killed process left incomplete."""
    if not record.exists():
        return []
    whole = record.read_bytes()
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        record.write_bytes(kept)
    return [json.loads(line) for line in kept.splitlines()]


def of_record(lines: Sequence[Mapping[str, Any]]) -> list[Training]:
    """Return the trainings of this script's record."""
    return [
        Training(
            **{key: line[key] for key in ("federation", "family", "seed", "methods", "norm", "rounds")},
            origin=PHANTOM,
            selected_round=str(line["selected_round"]),
            converged=as_text(is_converged(line["validation"])),
            metric="dice",
            scores=line["dice"],
            cases={site: dict(enumerate(scores)) for site, scores in line["cases"].items()},
            fingerprints=partial(written, Federation(line["family"], line["draw"], line["seed"]).write),
        )
        for line in lines
        if "dice" in line
    ]


def main() -> None:
    """Make the missing trainings, or the table of the record."""
    arguments = parser(__doc__)
    arguments.add_argument("--record", type=Path, help="one JSON line for each training")
    arguments.add_argument("--csv", type=Path, help="write the table of the record, and train nothing")
    arguments.add_argument("--shift-record", type=Path, nargs="+", help="write the table of these records")
    arguments.add_argument(
        "--results",
        nargs="+",
        default=[],
        metavar="[NAME=]PATH",
        help="write the table of these folders, archives (.tar.xz) or summaries of runs; NAME: of the family",
    )
    arguments.add_argument("--data", type=Path, help="folder of the data sets that --results were trained on")
    arguments.add_argument("--work", type=Path, help="folder for the phantom sites")
    arguments.add_argument("--draws", type=int, default=8, help="federations of each family")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    arguments.add_argument("--norms", nargs="+", choices=NORMS, default=list(NORMS))
    arguments.add_argument("--rounds", type=int, default=10, help="of a training that converges in them")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    if not options.record and not ((options.shift_record or options.results) and options.csv):
        arguments.error("name a record: --record FILE, or --shift-record or --results with --csv FILE")
    if options.results and options.data is None:
        arguments.error("name the folder of the data sets: --data DIR")
    lines = read(options.record) if options.record else []
    if options.csv:
        trainings = [one for path in options.shift_record or () for one in of_shift_record(path)]
        try:
            trainings += of_results(options.results, options.data, METHODS, print)
            number = write_table([*of_record(lines), *trainings], options.csv)
        except MedFedAugError as error:
            arguments.error(str(error))
        print(f"{number} federations in {options.csv}")
        return
    if options.work is None:
        arguments.error("name a folder for the phantom sites: --work DIR")
    if any(line["first_rounds"] != options.rounds for line in lines):
        arguments.error(f"{options.record} has another number of rounds; name a new --record")
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
            score = line.get("refused") or f"{fmean(line['dice'].values()):.3f}"
            what = f"{federation.name} seed {federation.seed} {line['methods']} {line['norm']}"
            print(f"{what}: {score}, {line['seconds']} s", flush=True)


if __name__ == "__main__":
    main()
