"""`Calibration`: federations that were trained with several methods, with the fingerprints of their sites."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from medfedaug.analysis.fingerprint_distance import check_together
from medfedaug.analysis.gain_record import FEDAVG
from medfedaug.data.quality.image_fingerprint import ImageFingerprint
from medfedaug.errors import ConfigError, MedFedAugError, first_line

PHANTOM, REAL = "phantom", "real"

COLUMNS = (
    *("federation", "family", "origin", "seed", "site", "methods", "norm", "rounds", "selected_round"),
    *("converged", "metric", "score", "patient_deviation", "fingerprint"),
)
"""Columns of a calibration table. ``origin`` is ``phantom`` or ``real``; ``converged`` is ``yes`` where the
last third of the rounds improved the validation score by at most 0.01, and empty if unknown;
``patient_deviation`` is the deviation over test patients of the difference from FedAvg; ``fingerprint`` is
`ImageFingerprint.to_dict` as JSON, in at least one row of a site and seed."""

TABLE = Path(__file__).resolve().parents[1] / "docs/results/prospect/calibration.csv"
"""The recorded federations."""


@dataclass(frozen=True)
class TrainedFederation:
    """A federation with one seed, and the scores of methods at its sites.

    Attributes:
        name: of the federation, with any seed.
        family: of the data: a published data set, or the dial of a phantom.
        origin: `PHANTOM` or `REAL`.
        norm: the normalisation of the network.
        metric: of the scores; higher is better.
        seed: of its patients and initial weights.
        sites: the fingerprints of its sites.
        scores: by methods and site.
        deviations: of each site, by methods: see `COLUMNS`.
        unconverged: methods whose training had not converged.
    """

    name: str
    family: str
    origin: str
    norm: str
    metric: str
    seed: str
    sites: tuple[ImageFingerprint, ...]
    scores: Mapping[str, Mapping[str, float]]
    deviations: Mapping[str, tuple[float, ...]]
    unconverged: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Calibration:
    """A table of trained federations.

    Attributes:
        federations: in the order of the table, one for each seed.
    """

    federations: tuple[TrainedFederation, ...]

    @classmethod
    def load(cls, paths: Sequence[Path] = (TABLE,), norm: str = "batch") -> Calibration:
        """Read tables.

        Args:
            paths: files with the columns `COLUMNS`.
            norm: the normalisation of the network.

        Raises:
            ConfigError: naming file and row.
        """
        federations: list[TrainedFederation] = []
        for path in paths:
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{path}: cannot be read as a calibration table ({first_line(error)})"
                ) from error
            federations += _read(str(path), text, norm)
        return cls(tuple(federations))

    @property
    def number(self) -> int:
        """Return the number of federations, each with all its seeds."""
        return len({one.name for one in self.federations})

    @property
    def families(self) -> list[str]:
        """List the families in their order."""
        return list(dict.fromkeys(one.family for one in self.federations))

    @property
    def methods(self) -> list[str]:
        """List the methods of all federations, without FedAvg."""
        known = dict.fromkeys(name for one in self.federations for name in one.scores)
        return [name for name in known if name != FEDAVG]

    @property
    def seeds(self) -> int:
        """Return the largest number of seeds of a federation."""
        return max(Counter(one.name for one in self.federations).values(), default=0)

    def of_origin(self, origin: str) -> Calibration:
        """Keep the federations of phantoms (`PHANTOM`), or of patients (`REAL`)."""
        return Calibration(tuple(one for one in self.federations if one.origin == origin))

    def scored_by(self, metric: str) -> Calibration:
        """Keep the federations with scores of a metric."""
        return Calibration(tuple(one for one in self.federations if one.metric == metric))

    def gained(self, methods: str) -> tuple[int, int]:
        """Return the number of trainings with a mean over the sites above FedAvg's, and of all trainings."""
        pairs = [
            (fmean(one.scores[methods].values()), fmean(one.scores[FEDAVG].values()))
            for one in self.federations
            if methods in one.scores and FEDAVG in one.scores
        ]
        return sum(ours > theirs for ours, theirs in pairs), len(pairs)

    def patient_deviation(self, methods: str) -> float | None:
        """Return the median over sites of the patients' deviation, of a difference from FedAvg."""
        known = [value for one in self.federations for value in one.deviations.get(methods, ())]
        return median(known) if known else None


def _read(name: str, text: str, norm: str) -> Iterator[TrainedFederation]:
    reader = csv.DictReader(text.splitlines())
    lacking = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if lacking:
        raise ConfigError(
            f"{name}: lacks the column {lacking[0]}; a calibration table has {', '.join(COLUMNS)}"
        )
    by_name: dict[tuple[str, str], list[tuple[int, dict[str, str]]]] = {}
    for number, row in enumerate(reader, start=2):
        if row["norm"] == norm:
            by_name.setdefault((row["federation"], row["seed"]), []).append((number, row))
    for (federation, _), rows in by_name.items():
        yield _federation(name, federation, rows)


def _federation(table: str, name: str, rows: Iterable[tuple[int, Mapping[str, str]]]) -> TrainedFederation:
    """Build a federation from its rows.

    Raises:
        ConfigError: naming the row.
    """
    scores: dict[str, dict[str, float]] = {}
    deviations: dict[str, list[float]] = {}
    prints: dict[str, ImageFingerprint] = {}
    unconverged: set[str] = set()
    row: Mapping[str, str] = {}
    for number, row in rows:
        try:
            scores.setdefault(row["methods"], {})[row["site"]] = float(row["score"])
            if row["converged"] == "no":
                unconverged.add(row["methods"])
            if row["patient_deviation"]:
                deviations.setdefault(row["methods"], []).append(float(row["patient_deviation"]))
            if row["fingerprint"]:
                prints[row["site"]] = ImageFingerprint.from_dict(json.loads(row["fingerprint"]))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ConfigError(f"{table}, line {number}: {first_line(error)}") from error
    sites = tuple(fingerprint for _, fingerprint in sorted(prints.items()))
    try:
        check_together(sites)
        if {*scores.get(FEDAVG, {})} != {*prints}:
            raise ConfigError("a federation needs FedAvg's score and a fingerprint of each site")
    except MedFedAugError as error:
        raise ConfigError(f"{table}, federation {name}: {error}") from error
    return TrainedFederation(
        name=name,
        family=row["family"],
        origin=row["origin"] or REAL,
        norm=row["norm"],
        metric=row["metric"],
        seed=row["seed"],
        sites=sites,
        scores=scores,
        deviations={methods: tuple(values) for methods, values in deviations.items()},
        unconverged=frozenset(unconverged),
    )
