"""`Run`: a finished run, by one of its metrics; `medfedaug.runs.load_results` reads it from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medfedaug.metrics.base import Metric, mean_score
from medfedaug.metrics.registry import UNSEEN, find_metric
from medfedaug.utils.validation import number_or_none

BASELINE = "fedavg"
MODEL, NOT_RECORDED = "model", "not recorded"
"""Heading of the column with the model of a row's scores, and its text where a run recorded none."""


OTHER_INPUT = "‡"
"""Marks the rows of a table whose input was scaled differently from the reference row's."""

_SCALED = {
    "none": "intensities as stored",
    "each volume": "each volume scaled to [0, 1]",
    "fixed": "intensities divided by 255",
    "bundle": "as the Bundle's transforms give them",
}


@dataclass(frozen=True)
class Input:
    """Scaling and normalisation of a network's input images.

    Attributes:
        scaling: ``"none"``: intensities as stored; ``"each volume"``: scaled to [0, 1] by its range;
            ``"fixed"``: divided by 255, or by 65535 for 16 bits; ``"bundle"``: scaled by a Bundle's
            transforms.
        normalised_by: the method, or "the plan", that normalises the scaled images; ``None`` for none.
    """

    scaling: str = "each volume"
    normalised_by: str | None = None

    def __str__(self) -> str:
        scaled = _SCALED.get(self.scaling, self.scaling)
        return f"{scaled}, normalised by {self.normalised_by}" if self.normalised_by else scaled

    def differs(self, other: Input) -> bool:
        """Return whether two runs scaled images differently; normalisation cancels a fixed factor."""
        if self.scaling == other.scaling:
            return False
        return "each volume" in (self.scaling, other.scaling) or not (
            self.normalised_by or other.normalised_by
        )


SCALED = Input()


def recorded_input(content: Mapping[str, Any]) -> Input:
    """Return the input in a ``results.json``."""
    known = content["input"]
    return Input(
        str(known.get("scaling", "each volume")),
        str(known["normalised_by"]) if known.get("normalised_by") else None,
    )


@dataclass(frozen=True)
class Scores:
    """Test scores by one metric, of all classes together or of one class.

    Attributes:
        sites: score of each training site; ``None`` if nothing could be scored, or the site did not answer.
        unseen: score of each site that did not train.
        mean: mean over the training sites.
        cases: score of each case by site, if recorded.
    """

    sites: dict[str, float | None]
    unseen: dict[str, float | None]
    mean: float | None
    cases: dict[str, dict[str, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A finished run, by one of its metrics, with the fields of `Scores`.

    Attributes:
        path: the ``results.json``.
        config: the run's configuration.
        metric: name of the score (`medfedaug.metrics.registry.METRICS`); by default `chosen_by`.
        rounds: the record of each round, in order.
        selected_round: the round whose model was tested.
        cases: number of test cases by site, if recorded.
        patients: the number of the patient of each case by site, where the site named patients. Runs may
            number them in different orders.
        left_out: sites that could not take part, with the reason.
        suspected: sites whose steps went against the others' in most rounds, with the reason.
        untested: sites that could not be tested, with the reason.
        unscored: tested sites that sent no score, with their reason.
        options: options of the data, for example ``fold``.
        input: the network's input.
        chosen_by: the validation metric, which chose the round.
        test: the scores by metric and class; the class ``""`` stands for all classes together.
        missed: the number of cases and classes that were not predicted at all, by site.
        nothing_learned: the reason why the scores show that the model learned nothing
            (`medfedaug.metrics.registry`); empty where they do not.
        units: the unit of lengths, by site.
        scored: the model of the scores (`medfedaug.federation.composition.Composition.scored`), by
            ``validation`` and ``test``.
        in_turn: whether the run is one of several that each leave out another site; set by
            `medfedaug.analysis.grouping.group_runs`.
        context: further entries of the file: ``engine``, ``data``, ``seconds``, ``files`` (hashes by site),
            ``planned``, ``labelled`` (annotated classes, by site), and ``bytes_up_before_training``.
    """

    path: Path
    config: dict[str, Any]
    metric: str
    rounds: list[dict[str, Any]]
    selected_round: int
    sites: dict[str, float | None]
    unseen: dict[str, float | None]
    mean: float | None
    cases: dict[str, int] = field(default_factory=dict)
    case_scores: dict[str, dict[str, float | None]] = field(default_factory=dict)
    patients: dict[str, dict[str, int]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    suspected: dict[str, str] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)
    unscored: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    input: Input = SCALED
    chosen_by: str = ""
    test: dict[tuple[str, str], Scores] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    nothing_learned: str = ""
    units: dict[str, str] = field(default_factory=dict)
    scored: dict[str, str] = field(default_factory=dict)
    in_turn: bool = False
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> dict[str, Any]:
        """The requested settings, before the sites' fingerprints determined some."""
        settings: dict[str, Any] = self.context.get("planned", {}).get("asked", self.config)
        return settings

    @property
    def planned(self) -> dict[str, Any]:
        """The settings that the sites' fingerprints determined."""
        return {k: v for k, v in self.config.items() if k != "planning" and v != self.asked.get(k)}

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods; FedAvg, the basis of all others, is named only if it is the single one."""
        names = tuple(method["name"] for method in self.config["methods"])
        return tuple(name for name in names if name != BASELINE) or (BASELINE,)

    @property
    def label(self) -> str:
        """The methods in one string, such as ``"fedrdn + fedfa"``."""
        return " + ".join(self.methods)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def fold(self) -> str | None:
        """The tested fold of the patients; ``None`` without folds."""
        return str(self.options["fold"]) if self.options.get("folds") else None

    @property
    def data(self) -> str | None:
        """Name of the data; ``None`` if not recorded."""
        return str(self.context["data"]) if "data" in self.context else None

    @property
    def held_out(self) -> tuple[str, ...]:
        """The sites that were held out of training."""
        return tuple(self.config.get("holdout") or ())

    @property
    def tested(self) -> tuple[str, ...]:
        """The sites whose scores count: the training sites, or the site that was left out in turn."""
        return self.held_out if self.in_turn else tuple(self.sites)

    @property
    def model(self) -> str:
        """Name of the model of the scores of `tested`."""
        return UNSEEN if self.in_turn else self.scored.get("test", NOT_RECORDED)

    @property
    def part(self) -> tuple[str | None, str]:
        """Fold and held-out site (in turn), which distinguish the runs of one seed."""
        return self.fold, self.held_out[0] if self.in_turn else ""

    @property
    def repetition(self) -> tuple[int, str | None, str]:
        """Seed, fold and held-out site (in turn), which distinguish the runs of one experiment."""
        return self.seed, *self.part

    @property
    def name(self) -> str:
        """Seed, fold and held-out sites as text."""
        parts = [f"seed {self.seed}"]
        parts += [f"fold {self.fold}"] if self.fold is not None else []
        parts += [f"without {', '.join(self.held_out)}"] if self.held_out else []
        return ", ".join(parts)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the test."""
        return tuple(name for name, label in self.test if not label)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes with separate scores."""
        return tuple(dict.fromkeys(label for _, label in self.test if label))

    @property
    def title(self) -> str:
        """The metric's title, with its unit."""
        metric, units = find_metric(self.metric), set(self.units.values())
        return f"{metric.title} in {units.pop()}" if metric.has_unit and len(units) == 1 else metric.title

    def scored_by(self, metric: str, label: str = "") -> Run:
        """Return the run by another metric, or by one class; without scores if its file has none."""
        empty = Scores(dict.fromkeys(self.sites), dict.fromkeys(self.unseen), None)
        s = self.test.get((metric, label), empty)
        return replace(self, metric=metric, sites=s.sites, unseen=s.unseen, mean=s.mean, case_scores=s.cases)

    def validation(self, site: str | None = None) -> list[float | None]:
        """Return the validation score by round, of one site or (``None``) the mean over the sites."""
        key, names = f"val_{self.chosen_by}", [site] if site else sorted(self.sites)
        curves = [[number_or_none(r["sites"].get(name, {}).get(key)) for name in names] for r in self.rounds]
        return [mean_score(scores) for scores in curves]

    def gamma(self) -> dict[str, dict[str, list[tuple[int, float, float]]]]:
        """Return the range of γ over channels: ``{layer: {"gamma_mean": [(round, lowest, highest), ...]}}``.

        Empty where no method of the run exchanges feature statistics.
        """
        ranges: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
        for entry in self.rounds:
            for summary in entry.get("methods", {}).values():
                for layer, values in summary.items():
                    for name, span in values.items() if isinstance(values, dict) else ():
                        if not name.startswith("gamma") or not isinstance(span, list) or len(span) != 2:
                            continue
                        low, high = map(number_or_none, span)
                        if low is not None and high is not None:
                            by_name = ranges.setdefault(layer, {})
                            by_name.setdefault(name, []).append((entry["round"], low, high))
        return ranges


def compared_metric(runs: Sequence[Run]) -> Metric:
    """Return the metric of runs; its ``cases`` are patients if any run names patients."""
    metric = find_metric(runs[0].metric)
    return replace(metric, cases="patients") if any(any(run.patients.values()) for run in runs) else metric
