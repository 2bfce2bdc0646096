"""`Monitor`: a site's accepted and later cases, a rule by case and a rule over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import FiniteFloat, TypeAdapter

from medfedaug.errors import ConfigError, config_errors
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.predict import uses_given_images
from medfedaug.utils.files import parse_versioned, write_versioned

_RIDGE = 0.1
_SMALL = 1e-12
_LARGEST = 1e100  # evidence beyond says nothing more, and floats end


def distances(values: np.ndarray) -> np.ndarray:
    """Return the squared Mahalanobis distance of each case from the mean of all, (n,).

    d²(x) = zᵀ (R + 0.1 I)⁻¹ z, with z the standard scores of the case and R the correlations of the measures,
    both of the given cases, which are treated alike. The ridge allows fewer cases than measures.

    Args:
        values: (n, measures).

    Example:
        >>> distances(np.array([[1.0], [1.0], [1.0], [5.0]])).argmax().item()
        3
    """
    spread = values.std(axis=0)
    scores = (values - values.mean(axis=0)) / np.where(spread > _SMALL, spread, np.inf)
    correlations = scores.T @ scores / len(scores)
    solved = np.linalg.solve(correlations + _RIDGE * np.eye(values.shape[1]), scores.T)
    # Rounded, so that cases with equal measures have equal distances.
    return (scores * solved.T).sum(axis=1).round(9)


def case_p_value(reference: np.ndarray, case: np.ndarray) -> float:
    """Return the conformal p-value of a case: the share of cases at least as far away, itself included.

    p = #{i: d(xᵢ) ≥ d(x)} / (n + 1) over the n cases of the reference and the case, with `distances` of all
    n + 1. If the case is exchangeable with the reference, P(p ≤ α) ≤ α for every α: the rank of one of n + 1
    exchangeable numbers is uniform, and ties enlarge p. The rate is an average over references; that of one
    reference may be higher or lower.

    Args:
        reference: (n, measures).
        case: (measures,).
    """
    apart = distances(np.vstack([reference, case]))
    return float((apart >= apart[-1]).mean())


def fewest_cases(rate: float) -> int:
    """Return the number of accepted cases from which p ≤ ``rate`` / 1000 is possible: 1/(n + 1) ≤ rate/1000.

    Example:
        >>> fewest_cases(10), fewest_cases(50)
        (99, 19)
    """
    return math.ceil(1000 / rate - _SMALL) - 1


@dataclass
class Course:
    """Evidence over time against exchangeability, for each measure and for the distance of a case.

    The t-th case has, for each measure, the conformal p-value of its rank among all cases so far, accepted
    ones included: p = (#{xᵢ < x} + τ #{xᵢ = x}) / t, with τ uniform. If cases are exchangeable, the p-values
    of a measure are independent and uniform. A bet is a density f on [0, 1], here of Beta(ε, 1), Beta(1, ε)
    or both; its Shiryaev-Roberts statistic is R_t = (1 + R_{t-1}) f(p_t), from R = 0. The rule averages the
    statistics of the bets and gives an alarm when the average of a measure reaches J c, with J the number of
    measures and the distance, and c = 1000 / ``rate``.

    Promise: within n cases, the probability of a false alarm is at most n ``rate`` / 1000. Proof: since
    E f(p) = 1, R_t - t is a martingale, and so is the average over the bets. Let τ be the first time at which
    the average of measure j reaches J c. Optional stopping at min(τ, n) gives J c P(τ ≤ n) ≤ E min(τ, n) ≤ n;
    the sum over the J measures is at most n / c.

    Source: V. Vovk, "Testing randomness online", Statistical Science 36 (2021), arXiv:1906.09256.

    Deviations:
        Vovk has one sequence of p-values and one bet; here, bets are averaged and measures share the rate.
    """

    values: np.ndarray  # (t, measures), all cases so far; first the accepted ones
    rate: float  # alarms per thousand cases
    # (J, bets), the statistics after the last case; the distance is the last row.
    evidence: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))

    def __post_init__(self) -> None:
        if not self.evidence.size:
            self.evidence = np.zeros((self.values.shape[1] + 1, len(_bets(np.full(1, 0.5)))))

    @property
    def shares(self) -> np.ndarray:
        """The evidence of each measure, and of the distance, as a share of the alarm's."""
        return self.evidence.mean(axis=1) * self.rate / (1000 * len(self.evidence))

    def add(self, case: np.ndarray) -> None:
        """Add a case, (measures,)."""
        self.values = np.vstack([self.values, case])
        # Ties are broken at random, by numbers that depend on nothing but the position.
        ties = np.random.default_rng(len(self.values)).uniform(_SMALL, 1 - _SMALL, len(self.evidence))
        columns = np.column_stack([self.values, distances(self.values)])
        below, equal = (columns < columns[-1]).sum(axis=0), (columns == columns[-1]).sum(axis=0)
        bets = _bets((below + ties * equal) / len(columns))
        self.evidence = np.minimum((1 + self.evidence) * bets.T, _LARGEST)


def _bets(p: np.ndarray) -> np.ndarray:
    """Return the densities of the bets, (bets, measures): on low values, on high ones, on both."""
    low, high = ([e * q ** (e - 1) for e in (0.25, 0.6)] for q in (p, 1 - p))
    return np.stack([*low, *high, (low[0] + high[0]) / 2])


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
        if not file.exists():
            raise ConfigError(f"{file}: no reference yet; make it of accepted cases with --accept")
        remedy = "; move it away, and accept cases anew"
        with config_errors(f"{file}: not readable as accepted cases", remedy=remedy):
            content = parse_versioned(file.read_text("utf-8"), _KIND, _VERSION)
            found = TypeAdapter(cls).validate_python(content)
            if {len(case.values) for case in (*found.reference, *found.cases)} != {len(found.measures)}:
                raise ValueError(f"expected {len(found.measures)} values of each case")
        if changed := [key for key in inputs if found.inputs.get(key) != inputs[key]]:
            was, now = (str(one)[:40] for one in (found.inputs.get(changed[0]), inputs[changed[0]]))
            raise ConfigError(
                f"{file}: cases were accepted with another {changed[0]} ({was}, and now {now}); accept cases "
                "anew, into another file"
            )
        return found

    def write(self, file: Path) -> None:
        """Write the file for its owner only, since it names cases."""
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
