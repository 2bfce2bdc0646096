"""Trainings of earlier records, for the table of gains: `shift_gain.py` and `medfedaug benchmark`."""

from __future__ import annotations

import json
import lzma
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from calibration_rows import Training, as_text, written
from calibration_table import PHANTOM, REAL
from shift_gain import moved

from medfedaug.analysis.gain_record import FEDAVG
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.benchmarks import find_root, open_benchmark
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.quality.image_fingerprint import ImageFingerprint, case_numbers, from_means, sample_cases
from medfedaug.data.sites import arrange
from medfedaug.errors import ConfigError, first_line
from medfedaug.federation.job_folder import RESULTS
from medfedaug.metrics.convergence import is_converged
from medfedaug.runs.load_results import find_runs, load_run
from medfedaug.runs.run import Run

_NUMBERS = ("cases", "looked_at", "patients")


def of_shift_record(path: Path) -> list[Training]:
    """Return the trainings of a record of `shift_gain.py`, with phantoms from seed and dials."""
    record = json.loads(path.read_text(encoding="utf-8"))
    size, trainings = record["settings"], []
    for run in record["runs"]:
        seed, dial, number = run["seed"], run["shift"], run.get("inverted", 0)
        family = "odd" if run["odd"] else "polarity" if number else "scanners"

        def write(folder: Path, run: Mapping[str, Any] = run, number: int = number) -> None:
            seed, dial = run["seed"], run["shift"]
            shift = moved(folder.parent, seed, dial) if run["odd"] else dial
            inverted = [k >= 4 - number for k in range(4)]
            make_phantom(folder, 4, size["patients"], size["shape"], seed, shift=shift, inverted=inverted)

        trainings.append(
            Training(
                federation=f"{family}{number or ''}_64_{dial:g}_{seed}",
                family=family,
                origin=PHANTOM,
                seed=seed,
                methods=run["methods"],
                norm="batch",
                rounds=size["rounds"],
                selected_round="",
                converged="",
                metric="dice",
                scores=run["dice"],
                cases={},
                fingerprints=partial(written, write),
            )
        )
    return trainings


@dataclass(frozen=True)
class Part:
    """A run of `medfedaug benchmark`, or of one of its folds.

    Attributes:
        data: name of the data set.
        family: name of its federations' family.
        options: of the data set.
        variant: of the protocol, for the name of the federation.
        methods: the combination.
        norm: of the network.
        rounds: of the run.
        seed: its seed.
        fold: the tested fold; empty for none.
        metric: of the scores.
        scores: by site and patient.
        validation: mean score by round.
        selected_round: the round of the tested model.
        other_input: whether its images had other intensities than FedAvg's.
    """

    data: str
    family: str
    options: Mapping[str, Any]
    variant: str
    methods: str
    norm: str
    rounds: int
    seed: int
    fold: str
    metric: str
    scores: Mapping[str, Mapping[str, float | None]]
    validation: Sequence[float | None]
    selected_round: int
    other_input: bool

    @property
    def federation(self) -> str:
        """Name the federation: data, protocol, and the site that did not train."""
        return "_".join(filter(None, (self.family, self.variant, f"{self.rounds}r")))


def of_results(
    sources: Sequence[str], data: Path, methods: Sequence[str], log: Callable[[str], None]
) -> list[Training]:
    """Return the trainings of runs of `medfedaug benchmark`, by data set, protocol and seed.

    The folds of a seed are one training, since their patients train in the other folds. Its score at a site
    is the mean over the patients of the folds that all methods have, and its fingerprints are means over
    these folds.

    Args:
        sources: folders of runs, archives of them, and summaries (``FILE.json``, as of `docs/results/lgg`).
            ``NAME=`` before one names the family; for a summary it must name the data set.
        data: folder of the data sets.
        methods: of the table; others are left out.
        log: called with a line about each record that is left out, with the reason.
    """
    groups: dict[tuple[str, str], list[Part]] = defaultdict(list)
    for part in (part for source in sources for part in parts_of(source)):
        if part.methods in methods:
            groups[part.federation, part.norm].append(part)
    trainings = []
    for (name, norm), parts in groups.items():

        def say(reason: str, group: str = f"{name}, {norm} norm") -> None:
            log(f"{group}: {reason}")

        usable = list(_usable(parts, say))
        for seed in sorted({part.seed for part in usable}):
            trainings += list(_training([p for p in usable if p.seed == seed], data, say))
    return trainings


def _usable(parts: Sequence[Part], log: Callable[[str], None]) -> Iterator[Part]:
    """Yield the comparable runs of a protocol, if FedAvg has converged in the mean over seeds and folds."""
    every = [scores for part in parts for scores in part.scores.values()]
    base = [part for part in parts if part.methods == FEDAVG]
    if not base:
        log("left out, FedAvg is not in the record")
    elif any(part.metric != "dice" for part in parts):
        log(f"left out, its scores are {parts[0].metric}, and the gains of the table are of Dice")
    elif not all(any(score is not None for score in scores.values()) for scores in every):
        log("left out, a site has no score of a patient")
    elif not is_converged(_validation(base)):
        log("left out, FedAvg has not converged by the rule of this script")
    else:
        others = {part.methods for part in parts if part.other_input}
        if others:
            log(f"{', '.join(sorted(others))} left out, with other intensities than FedAvg")
        yield from (part for part in parts if part.methods not in others)


def _training(parts: Sequence[Part], data: Path, log: Callable[[str], None]) -> Iterator[Training]:
    """Yield the training of each method in a seed, over the folds that all methods have."""
    by_methods: dict[str, dict[str, Part]] = defaultdict(dict)
    for part in parts:
        by_methods[part.methods][part.fold] = part
    base = by_methods.get(FEDAVG, {})
    log = partial(_of_seed, log, parts[0].seed)
    for name, runs in [*by_methods.items()]:
        if len(runs.keys() & base.keys()) * 2 < len(base):
            log(f"{name} is left out, with {len(runs)} folds where FedAvg has {len(base)}")
            del by_methods[name]
    folds = sorted(set.intersection(*(set(runs) for runs in by_methods.values())))
    if not folds:
        log("left out, no fold was trained with all methods")
        return
    for name, runs in by_methods.items():
        chosen = [runs[fold] for fold in folds]
        cases = _patients(chosen)
        first = chosen[0]
        yield Training(
            federation=first.federation,
            family=first.family,
            origin=REAL,
            seed=first.seed,
            methods=name,
            norm=first.norm,
            rounds=first.rounds,
            selected_round=str(first.selected_round) if len(chosen) == 1 else "",
            converged=as_text(is_converged(_validation(chosen))),
            metric=first.metric,
            scores={
                site: fmean(s for s in scores.values() if s is not None) for site, scores in cases.items()
            },
            cases=cases,
            fingerprints=partial(_fingerprints, [base[fold] for fold in folds], data, sorted(cases)),
        )


def _of_seed(log: Callable[[str], None], seed: int, reason: str) -> None:
    log(f"seed {seed}: {reason}")


def _validation(parts: Iterable[Part]) -> list[float | None]:
    """Return the mean over the folds by round."""
    rounds = zip(*(part.validation for part in parts), strict=False)
    known = ([score for score in scores if score is not None] for scores in rounds)
    return [fmean(scores) if scores else None for scores in known]


def _patients(parts: Sequence[Part]) -> dict[str, dict[str, float | None]]:
    """Return the score of each patient by site, over all folds."""
    patients: dict[str, dict[str, float | None]] = defaultdict(dict)
    for part in parts:
        for site, scores in part.scores.items():
            patients[site] |= scores
    return dict(patients)


def _fingerprints(parts: Sequence[Part], data: Path, names: Sequence[str]) -> list[ImageFingerprint]:
    """Compute fingerprints of a data set's sites, means over the folds; each image is read once."""
    numbers: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

    def of_case(site: SiteFolder, case: Case) -> dict[str, torch.Tensor]:
        key = site.name, case.name
        if key not in numbers:
            numbers[key] = case_numbers(site, case)
        return numbers[key]

    by_site: dict[str, list[ImageFingerprint]] = defaultdict(list)
    for part in parts:
        sites = open_benchmark(part.data, find_root(data, part.data), **part.options)
        for site in arrange([site for site in sites if site.name in names]):
            chosen = sample_cases(site)
            every = [of_case(site, case) for case in chosen]
            means = {name: sum(numbers[name] for numbers in every) / len(every) for name in every[0]}
            by_site[site.name].append(from_means(site, means, len(chosen)))
    return [_merged(by_site[name]) for name in names]


def _merged(folds: Sequence[ImageFingerprint]) -> ImageFingerprint:
    weights = [one.looked_at / sum(f.looked_at for f in folds) for one in folds]
    entries = {
        name: sum(weight * one.entries[name] for weight, one in zip(weights, folds, strict=True))
        for name in folds[0].entries
    }
    counts = {name: round(fmean(getattr(one, name) for one in folds)) for name in _NUMBERS}
    return replace(folds[0], entries=entries, test_patients=sum(one.test_patients for one in folds), **counts)


def parts_of(source: str) -> Iterator[Part]:
    """Read the runs of a folder, an archive or a summary, with its family's name in front."""
    named = "=" in source and not Path(source).exists()
    name, _, file = source.rpartition("=") if named else ("", "", source)
    path = Path(file)
    if path.is_file() and path.suffix == ".json" and path.name != RESULTS:
        yield from _of_summary(path, name)
    elif path.name.endswith(".tar.xz"):
        with TemporaryDirectory() as folder:
            _unpack(path, folder)
            yield from (_of_run(load_run(run), name) for run in find_runs([folder]))
    else:
        yield from (_of_run(load_run(run), name) for run in find_runs([path]))


def _unpack(path: Path, folder: str) -> None:
    try:
        with tarfile.open(path) as archive:
            archive.extractall(folder, filter="data")
    except (OSError, tarfile.TarError, lzma.LZMAError) as error:
        raise ConfigError(f"{path}: cannot be read as an archive ({first_line(error)})") from error


def _of_run(run: Run, family: str) -> Part:
    scores: dict[str, dict[str, list[float | None]]] = {site: {} for site in run.sites}
    for site in run.sites:
        owners = run.patients.get(site, {})
        for case, score in run.case_scores.get(site, {}).items():
            # The first case of a patient names the patient.
            owner = next((name for name, number in owners.items() if number == owners.get(case)), case)
            scores[site].setdefault(owner, []).append(score)
    unseen = str(run.options.get("unseen") or ",".join(run.held_out))
    dimensions = (run.config.get("plan") or {}).get("spatial_dims", 2)
    return Part(
        data=run.data or "",
        family=family or run.data or "",
        options=run.options,
        variant="_".join(filter(None, ("3d" * (dimensions == 3), f"without_{unseen}" * bool(unseen)))),
        methods=",".join(run.methods),
        norm=_norm(run.config),
        rounds=int(run.config["rounds"]),
        seed=run.seed,
        fold=run.fold or "",
        metric=run.metric,
        scores={site: {name: _mean(row) for name, row in rows.items()} for site, rows in scores.items()},
        validation=run.validation(),
        selected_round=run.selected_round,
        other_input=_other_input(run.methods, run.config),
    )


def _of_summary(path: Path, data: str) -> Iterator[Part]:
    """Read the runs of a summary in one file."""
    if not data:
        raise ConfigError(f"{path}: a summary does not name its data set; write NAME={path}")
    record = json.loads(path.read_text(encoding="utf-8"))
    settings, runs = record["settings"], record["runs"]
    folds = max(run.get("fold") or 0 for run in runs)
    for run in runs:
        fold = run.get("fold") or 0
        options = {"folds": folds, "fold": fold, "fold_seed": run["seed"]} if fold else {}
        names = tuple(one["name"] for one in run["methods"])
        held_out = run.get("held_out") or ()
        yield Part(
            data=data,
            family=data,
            options=options,
            variant=f"without_{','.join(held_out)}" if held_out else "",
            methods=",".join(name for name in names if name != FEDAVG) or FEDAVG,
            norm=_norm(settings),
            rounds=settings["rounds"],
            seed=run["seed"],
            fold=str(fold or ""),
            metric="dice",
            # Sites without training losses did not train.
            scores={site: cases for site, cases in run["test"].items() if site in run["train_loss_last"]},
            validation=run["validation"],
            selected_round=run["selected_round"],
            other_input=_other_input(names, settings),
        )


def _norm(config: Mapping[str, Any]) -> str:
    norm = (config.get("network_args") or {}).get("norm", "batch")
    return norm if isinstance(norm, str) else str(norm[0])


def _other_input(methods: Sequence[str], config: Mapping[str, Any]) -> bool:
    """Return whether the run normalised stored intensities, and FedAvg scaled ones."""
    return config.get("intensity") in ("raw", "by_method") and bool({"norm", "fedrdn"} & set(methods))


def _mean(scores: Sequence[float | None]) -> float | None:
    known = [score for score in scores if score is not None]
    return fmean(known) if known else None
