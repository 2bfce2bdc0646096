"""Rows of the table of gains behind `medfedaug prospect`, from trainings of any record."""

from __future__ import annotations

import csv
import json
import tempfile
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev

from calibration_table import COLUMNS

from medfedaug.analysis.gain_record import FEDAVG
from medfedaug.data.quality.image_fingerprint import ImageFingerprint, fingerprint_of
from medfedaug.data.sites import find_sites

Cases = Mapping[str, Mapping[Hashable, float | None]]


@dataclass(frozen=True)
class Training:
    """A training of the table.

    Attributes:
        federation: its name, the same for all seeds.
        family: of the federation.
        origin: `calibration_table.PHANTOM` or `REAL`.
        seed: of patients, or their folds, and initial weights.
        methods: the combination.
        norm: of the network.
        rounds: of the training.
        selected_round: empty if not recorded, or if folds have several.
        converged: of `as_text`; empty if validation was not recorded.
        metric: of the scores.
        scores: by site.
        cases: score of each patient by site; empty if not recorded.
        fingerprints: makes the sites' fingerprints.
    """

    federation: str
    family: str
    origin: str
    seed: int
    methods: str
    norm: str
    rounds: int
    selected_round: str
    converged: str
    metric: str
    scores: Mapping[str, float]
    cases: Cases
    fingerprints: Callable[[], Sequence[ImageFingerprint]]

    @property
    def run(self) -> tuple[str, int, str]:
        """Return the key of comparable trainings."""
        return self.federation, self.seed, self.norm


def as_text(converged: bool) -> str:
    """Write `is_converged` as in the table."""
    return "yes" if converged else "no"


def written(write: Callable[[Path], None]) -> list[ImageFingerprint]:
    """Write a federation's images to a folder, and return the fingerprints of its sites."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "sites")
        return [fingerprint_of(site) for site in find_sites(Path(folder) / "sites")]


def write_table(trainings: Sequence[Training], path: Path) -> int:
    """Write the rows of federations with FedAvg, keep others, and return the number of these federations.

    The file keeps its fingerprints; delete it after a change of their definition.
    """
    before: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            before = list(csv.DictReader(file))
    known = {one.run: one for one in trainings if one.methods == FEDAVG}
    prints: dict[tuple[str, int], dict[str, str]] = {}
    for row in before:
        if row["fingerprint"]:
            prints.setdefault((row["federation"], int(row["seed"])), {})[row["site"]] = row["fingerprint"]
    for one in known.values():
        if (key := (one.federation, one.seed)) not in prints:
            fingerprints = one.fingerprints()
            prints[key] = {f.site: json.dumps(f.to_dict(), separators=(",", ":")) for f in fingerprints}
            print(f"fingerprints of {one.federation}, seed {one.seed}", flush=True)
    names = {one.federation for one in known.values()}
    rows = [row for row in before if row["federation"] not in names]
    for one in {(*one.run, one.methods): one for one in trainings if one.run in known}.values():
        base = known[one.run].cases
        for site, score in sorted(one.scores.items()):
            rows.append(
                {
                    **{key: str(getattr(one, key)) for key in COLUMNS if hasattr(one, key)},
                    "site": site,
                    "score": f"{score:.4f}",
                    "patient_deviation": _deviation(one.cases.get(site, {}), base.get(site, {})),
                    # Once for each site and seed, since it does not depend on the method.
                    "fingerprint": prints[one.run[:2]][site] if one.methods == FEDAVG else "",
                }
            )
    if rows:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", restval="")
            writer.writeheader()
            writer.writerows(rows)
    return len(names)


def _deviation(ours: Mapping[Hashable, float | None], theirs: Mapping[Hashable, float | None]) -> str:
    """Return the deviation over the patients of the difference from FedAvg."""
    pairs = [(ours[name], theirs[name]) for name in ours.keys() & theirs.keys()]
    apart = [a - b for a, b in pairs if a is not None and b is not None]
    return f"{stdev(apart):.4f}" if len(apart) > 1 and any(apart) else ""
