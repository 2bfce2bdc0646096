"""`Monitor`: the accepted cases of a site, the later ones, and the verdicts of the rules in `drift`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import FiniteFloat, TypeAdapter, ValidationError

from medfedaug.errors import ConfigError, first_line
from medfedaug.hospital.assurance.drift import Course, case_p_value, fewest_cases
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.predict import uses_given_images
from medfedaug.utils.files import parse_versioned, write_versioned

__all__ = ["DISTANCE", "Drift", "Monitor", "SeenCase", "fixed_inputs"]

DISTANCE = "distance of the whole case"
_KIND, _VERSION = "monitor", 1
_FEWEST = 10  # accepted cases
_FAR = 3.0  # standard deviations beyond which a measure is named
_AS_THEY_ARE = ("intensity", "confidence", "probability")


def fixed_inputs(run: FinishedRun, options: PredictionOptions) -> dict[str, Any]:
    """Return what stays the same from the accepted cases on: model, site, statistics and rule for series."""
    origin = Origin.of(run, options.site, options.statistics)
    if not origin.site and uses_given_images(run, origin):
        raise ConfigError(
            "the run's methods use statistics or layers of a site, and those of each call's images would "
            "differ: give --site NAME, or --statistics FILE"
        )
    pair = None if origin.pair is None else [origin.pair.mean.tolist(), origin.pair.std.tolist()]
    return {"model": run.sha256, "site": origin.site, "statistics": pair, "series": options.series}


@dataclass
class SeenCase:
    """A case, with ``p`` of the rule by case, and the drift's evidence after it as a share of an alarm's."""

    name: str
    values: list[FiniteFloat]
    date: str = ""
    p: FiniteFloat = 1.0
    share: FiniteFloat = 0.0


@dataclass
class Drift:
    """The first alarm of the rule over time: the number of the later case, its date, and the measures."""

    case: int
    date: str
    measures: list[str]


@dataclass
class Monitor:
    """The content of a file of accepted cases and their course."""

    inputs: dict[str, Any]  # those of `fixed_inputs`
    rates: dict[str, FiniteFloat]  # alarms per thousand cases by rule, "case" and "drift"
    # Their names; the first `of_image` describe the image, the others the prediction.
    measures: list[str] = field(default_factory=list)
    of_image: int = 0
    reference: list[SeenCase] = field(default_factory=list)  # the accepted cases
    cases: list[SeenCase] = field(default_factory=list)  # the later cases in their order
    evidence: list[list[FiniteFloat]] = field(default_factory=list)  # see `Course`
    drift: Drift | None = None  # the alarm, which stays; `None` before one
    shown: list[SeenCase] = field(default_factory=list)  # the later cases of this call, not in the file

    @classmethod
    def read(cls, file: Path, inputs: Mapping[str, Any]) -> Monitor:
        """Read a file, and check that it is of the same model, site and statistics."""
        try:
            found = TypeAdapter(cls).validate_python(
                parse_versioned(file.read_text("utf-8"), _KIND, _VERSION)
            )
            if {len(case.values) for case in (*found.reference, *found.cases)} != {len(found.measures)}:
                raise ValueError(f"expected {len(found.measures)} values of each case")
        except FileNotFoundError as error:
            raise ConfigError(f"{file}: no reference yet; make it of accepted cases with --accept") from error
        except (OSError, ValueError, ValidationError) as error:
            text = f"{file}: {first_line(error)}; move it away, and accept cases anew"
            raise ConfigError(text) from error
        if changed := [key for key in inputs if found.inputs.get(key) != inputs[key]]:
            was, now = (str(one)[:40] for one in (found.inputs.get(changed[0]), inputs[changed[0]]))
            raise ConfigError(
                f"{file}: cases were accepted with another {changed[0]} ({was}, and now {now}); accept cases "
                "anew, into another file"
            )
        return found

    def write(self, file: Path) -> None:
        """Write the file for its owner only, since it names cases."""
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {key: value for key, value in asdict(self).items() if key != "shown"}
        write_versioned(file, _KIND, _VERSION, content, private=True)

    def accept(self, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Make the reference from entries of ``predictions.json``; return reasons as `add` does."""
        first: Mapping[str, Any] = next(iter(cases.values()), {"image": {}, "probabilities": {}})
        self.measures, self.of_image = [*_measures(first)], len(first["image"])
        made, problems = self._made(cases)
        self.reference = [*{self._identity(case): case for case in made}.values()]
        if len(self.reference) < _FEWEST:
            raise ConfigError(f"{len(self.reference)} accepted cases are here; a reference needs {_FEWEST}")
        return problems

    def add(self, cases: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Add entries of ``predictions.json`` in the order of their names; an image counts once.

        Returns:
            By name, the reason why a case cannot be compared.
        """
        accepted = self._comparable(self.reference)
        everything = np.vstack([accepted, self._comparable(self.cases)])
        course = Course(everything, self.rates["drift"], np.array(self.evidence))
        known: dict[Any, SeenCase | None] = {self._identity(case): case for case in self.cases}
        known |= {self._identity(case): None for case in self.reference}
        made, problems = self._made(cases)
        for case in made:
            if self._identity(case) not in known:
                (values,) = self._comparable([case])
                course.add(values)
                case.date, case.p = date.today().isoformat(), case_p_value(accepted, values)
                case.share = float(f"{course.shares.max():.4g}")
                self.cases.append(case)
                self.evidence = course.evidence.tolist()
                if self.drift is None and case.share >= 1:
                    strongest = sorted(self.shares, key=lambda name: -self.shares[name])
                    measures = [name for name in strongest if self.shares[name] >= 1]
                    self.drift = Drift(len(self.cases), case.date, measures)
            self.shown.append(known.setdefault(self._identity(case), case) or case)
        self.shown = [case for case in self.shown if case.date]
        return problems

    @property
    def needed(self) -> int:
        """Number of accepted cases that the rule by case needs."""
        return fewest_cases(self.rates["case"])

    def outside(self, cases: Sequence[SeenCase]) -> list[SeenCase]:
        """Return the cases for which the rule by case gives an alarm; none if too few cases are accepted."""
        enough = len(self.reference) >= self.needed
        return [case for case in cases if enough and case.p <= self.rates["case"] / 1000 + 1e-12]

    def differences(self, case: SeenCase) -> str:
        """Name the measures of a case that differ most from the accepted cases, in standard deviations."""
        accepted = self._comparable(self.reference)
        apart = np.abs(self._comparable([case])[0] - accepted.mean(axis=0))
        scores = apart / np.maximum(accepted.std(axis=0), 1e-9)
        order = np.argsort(-scores)[:3]
        named = [j for j in order if scores[j] > _FAR] or order[:1]
        return "; ".join(
            f"{self.measures[j]} {case.values[j]:.3g} (accepted: {self.range(j)})" for j in named
        )

    def range(self, measure: int) -> str:
        """Return the range of a measure in the accepted cases."""
        values = [case.values[measure] for case in self.reference]
        return " to ".join(dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))))

    @property
    def shares(self) -> dict[str, float]:
        """The present evidence of each measure for a drift, as a share of an alarm's."""
        course = Course(self._comparable([]), self.rates["drift"], np.array(self.evidence))
        return dict(zip([*self.measures, DISTANCE], course.shares.tolist(), strict=True))

    def _made(self, entries: Mapping[str, Mapping[str, Any]]) -> tuple[list[SeenCase], dict[str, str]]:
        cases, problems = [], {}
        for name, entry in sorted(entries.items()):
            measures = _measures(entry)
            if different := {*measures} ^ {*self.measures}:
                problems[name] = (
                    f"differs from the accepted cases in what it has: {', '.join(sorted(different))}"
                )
            else:
                cases.append(SeenCase(name, [float(measures[measure]) for measure in self.measures]))
        return cases, problems

    def _comparable(self, cases: Sequence[SeenCase]) -> np.ndarray:
        """Return the values, (cases, measures): logarithms of sizes, contrast, noise and sharpness."""
        values = np.array([case.values for case in cases], dtype=float).reshape(-1, len(self.measures))
        for j, name in enumerate(self.measures):
            kind = name.rpartition(": ")[2].split()[0]
            if kind == "volume":
                values[:, j] = np.log1p(values[:, j])
            elif kind not in _AS_THEY_ARE:
                values[:, j] = np.log(np.maximum(values[:, j], 1e-6))
        return values

    def _identity(self, case: SeenCase) -> tuple[float, ...]:
        return tuple(case.values[: self.of_image])


def _measures(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures of a case from its entry in ``predictions.json``; those of the image come first."""
    if "probabilities" in entry:
        predicted = {f"probability of {name}": share for name, share in entry["probabilities"].items()}
    else:
        sizes = entry.get("volume_ml") or dict([*entry["voxels"].items()][1:])
        predicted = {f"volume of {name}": float(f"{size:.5g}") for name, size in sizes.items()}
        predicted |= {f"confidence of {name}": entry["confidence"].get(name, 0.0) for name in sizes}
    return {**entry["image"], **predicted}
