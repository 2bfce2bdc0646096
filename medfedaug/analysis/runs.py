"""`Run`: a finished run, read from its ``results.json`` and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from medfedaug.analysis.inputs import SCALED, Input, recorded_input
from medfedaug.checks import is_number
from medfedaug.config import RunConfig, recorded_settings
from medfedaug.errors import DataError
from medfedaug.scores import UNSEEN, Metric, add_recorded, find_metric, mean_score

__all__ = [
    "BASELINE",
    "MODEL",
    "NOT_RECORDED",
    "Run",
    "Scores",
    "compared_metric",
    "find_runs",
    "load_run",
]

RESULTS = "results.json"
_GROUPS = ("sites", "unseen")
BASELINE = "fedavg"
MODEL, NOT_RECORDED = "model", "not recorded"
"""Heading of the column that says whose model a row's scores are of, and what it says of earlier releases."""

# The fold in the name of a folder that is not a benchmark's: lgg_fold3.
_FOLD = re.compile(r"(?P<data>.+)[-_.]fold[-_]?(?P<fold>\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Scores:
    """The test scores by one metric, of all classes together or of one class.

    Attributes:
        sites: score of each training site; ``None`` if nothing could be scored, or the site did not answer.
        unseen: score of each site that did not train.
        mean: mean over the training sites.
        cases: score of each case by site, if the file has it.
    """

    sites: dict[str, float | None]
    unseen: dict[str, float | None]
    mean: float | None
    cases: dict[str, dict[str, float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """A finished run, by one of its metrics.

    Attributes:
        path: the ``results.json`` it was read from.
        config: the run's configuration.
        metric: name of the score (`medfedaug.scores.METRICS`); first the one that chose the round.
        rounds: the record of each round, in order.
        selected_round: the round whose model was tested.
        sites: test score of each training site; ``None`` if nothing could be scored, or the site did not
            answer.
        unseen: test score of each site that did not train.
        mean: mean test score over the training sites.
        cases: number of test cases by site, if the file has it.
        case_scores: test score of each case by site, if the file has it.
        patients: the number of the patient of each case by site, where the site named patients. Another run
            may count them in another order.
        left_out: sites that could not take part, with the reason.
        untested: sites that could not be tested, with the reason.
        unscored: sites that were tested and told no score, with the reason that they gave.
        options: options of the data, for example ``fold``.
        input: the network's input.
        chosen_by: the validation metric, which chose the round.
        test: the scores by metric and class; the class ``""`` stands for all classes together.
        missed: the number of cases and classes that were not predicted at all, by site.
        units: the unit of lengths, by site.
        scored: whose model the scores are of (`medfedaug.federation.composition.Composition.scored`), by
            ``validation`` and ``test``; empty for earlier releases, which did not record it.
        in_turn: whether the run is one of several that each leave out another site; set by
            `medfedaug.analysis.grouping.group_runs`.
        context: further entries of the file: ``engine``, ``data``, ``seconds``, ``files`` (a hash of each
            site's), and the bytes of the methods' exchange before training.
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
    untested: dict[str, str] = field(default_factory=dict)
    unscored: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    input: Input = SCALED
    chosen_by: str = ""
    test: dict[tuple[str, str], Scores] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    scored: dict[str, str] = field(default_factory=dict)
    in_turn: bool = False
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods. FedAvg, which all others build on, is named only if it is alone."""
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
        """The fold of the patients that was tested; ``None`` if there are no folds."""
        return str(self.options["fold"]) if self.options.get("folds") else None

    @property
    def data(self) -> str | None:
        """Name of the data; ``None`` if the file does not have it."""
        return str(self.context["data"]) if "data" in self.context else None

    @property
    def held_out(self) -> tuple[str, ...]:
        """The sites that were held out of training."""
        return tuple(self.config.get("holdout") or ())

    @property
    def tested(self) -> tuple[str, ...]:
        """The sites that the run is about: those that trained, or the one that was left out in turn."""
        return self.held_out if self.in_turn else tuple(self.sites)

    @property
    def model(self) -> str:
        """Whose model the scores of `tested` are of."""
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
        """Seed, fold and held-out sites, for a reader."""
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
        """The classes that have scores of their own."""
        return tuple(dict.fromkeys(label for _, label in self.test if label))

    @property
    def title(self) -> str:
        """The metric for a reader, with its unit."""
        metric, units = find_metric(self.metric), set(self.units.values())
        return f"{metric.title} in {units.pop()}" if metric.has_unit and len(units) == 1 else metric.title

    def scored_by(self, metric: str, label: str = "") -> Run:
        """The run by another metric, or by one class; without scores if its file has none."""
        found = self.test.get((metric, label)) or Scores(
            dict.fromkeys(self.sites), dict.fromkeys(self.unseen), None
        )
        return replace(
            self,
            metric=metric,
            sites=found.sites,
            unseen=found.unseen,
            mean=found.mean,
            case_scores=found.cases,
        )

    def validation(self, site: str | None = None) -> list[float | None]:
        """Validation score by round, of one site or (``None``) the mean over the sites."""
        key = f"val_{self.chosen_by}"
        curves = [
            [_finite(r["sites"].get(name, {}).get(key)) for name in ([site] if site else sorted(self.sites))]
            for r in self.rounds
        ]
        return [mean_score(scores) for scores in curves]

    def gamma(self) -> dict[str, dict[str, list[tuple[int, float, float]]]]:
        """Range of γ over the channels: ``{layer: {"gamma_mean": [(round, lowest, highest), ...]}}``.

        Empty where no method of the run exchanges feature statistics.
        """
        found: dict[str, dict[str, list[tuple[int, float, float]]]] = {}
        for entry in self.rounds:
            for summary in entry.get("methods", {}).values():
                for layer, values in summary.items() if isinstance(summary, dict) else ():
                    for name, span in values.items() if isinstance(values, dict) else ():
                        if not name.startswith("gamma") or not isinstance(span, list) or len(span) != 2:
                            continue
                        low, high = (_finite(value) for value in span)
                        if low is not None and high is not None:
                            found.setdefault(layer, {}).setdefault(name, []).append(
                                (entry["round"], low, high)
                            )
        return found


def compared_metric(runs: Sequence[Run]) -> Metric:
    """The metric of runs, whose ``cases`` are patients where any run says which cases are of one.

    Args:
        runs: of one metric.
    """
    metric, named = find_metric(runs[0].metric), any(any(run.patients.values()) for run in runs)
    return replace(metric, cases="patients") if named else metric


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """The folders of runs: each path itself if it is a run's folder, otherwise all runs below it, sorted.

    Raises:
        DataError: when a path is not a finished run and contains none.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir() or (path / RESULTS).exists():
            found.append(path)
            continue
        # A run that is being moved to its final place is in a hidden folder.
        files = [file.relative_to(path) for file in sorted(path.rglob(RESULTS))]
        below = [path / f.parent for f in files if not any(part.startswith(".") for part in f.parts)]
        if not below:
            raise DataError("holds no finished run", path=path, hint=f"A finished run has a {RESULTS}.")
        found += below
    return list(dict.fromkeys(found))


def load_run(path: str | Path, metric: str | None = None) -> Run:
    """Read and check a run.

    Args:
        path: the run's folder, or its ``results.json``.
        metric: the test metric for comparisons; by default the one that chose the round.

    Raises:
        DataError: one line that names the file and what is wrong with it.
    """
    file = Path(path)
    if file.is_dir() or file.suffix != ".json":
        file = file / RESULTS
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("is not there", path=file, hint="Give the folder of a finished run.") from None
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", path=file) from error
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", path=file) from error

    check = _Checker(file)
    check.kind(content, dict, "the content")
    config = check.get(content, "config", dict)
    for method in check.get(config, "methods", list, "config"):
        check.kind(method, dict, "an entry of config.methods")
        check.get(method, "name", str, "config.methods")
    check.get(config, "seed", int, "config")
    rounds = check.get(content, "rounds", list)
    for index, entry in enumerate(rounds):
        where = f"rounds[{index}]"
        check.kind(entry, dict, where)
        check.get(entry, "round", int, where)
        for site, values in check.get(entry, "sites", dict, where).items():
            check.kind(values, dict, f"{where}.sites.{site}")
        for key in ("bytes_up", "bytes_down"):
            check.get(entry, key, int, where, default=0)
        check.get(entry, "methods", dict, where, default={})
        for part, sizes in check.get(entry, "bytes", dict, where, default={}).items():
            check.kind(sizes, dict, f"{where}.bytes.{part}")
        for key in ("refused", "missing"):
            for trouble in check.get(entry, key, list, where, default=[]):
                check.kind(trouble, dict, f"an entry of {where}.{key}")
    test = check.get(content, "test", dict)
    mean = check.get(test, "mean", dict, "test")
    if not mean:
        raise DataError("test.mean names no metric", path=file)
    entries = {
        (group, site): check.get(test[group], site, dict, f"test.{group}")
        for group in _GROUPS
        for site in check.get(test, group, dict, "test", default={})
    }
    untested = check.get(test, "missing", dict, "test", default={})
    for site in check.get(content, "sites", dict, default={}).keys() & untested.keys():
        entries.setdefault(("sites", site), {})  # it trained, but did not answer in the test
    if not any(group == "sites" for group, _ in entries):
        raise DataError("test.sites names no site", path=file)
    add_recorded(check.get(content, "metrics", dict, default={}))
    chosen_by = next(iter(mean))
    if metric is not None and metric not in mean:
        raise DataError(f"its test has no {metric}, but {', '.join(mean)}", path=file)
    scores = _scores(check, entries, mean)
    first = scores[chosen_by, ""]
    told = ("data", "engine", "seconds", "files", "bytes_up_before_training")
    context = {key: content[key] for key in told if key in content}
    if isinstance(content.get("planned"), dict):
        context["planned"] = content["planned"]
    for key in ("bytes_up_before_training", "files", "input"):
        check.get(content, key, dict, default={})
    options = check.get(content, "data_options", dict, default={})
    named = _FOLD.fullmatch(str(context.get("data", "")))
    if named and "data_options" not in content:
        context["data"], options = named["data"], {"folds": True, "fold": int(named["fold"])}
    for site in check.get(config, "holdout", list, "config", default=[]):
        check.kind(site, str, "an entry of config.holdout")
    run = Run(
        path=file,
        # Settings of later releases have their defaults, so that older runs stay comparable.
        config={**RunConfig().to_dict(), **recorded_settings(content)},
        input=recorded_input(content),
        metric=chosen_by,
        rounds=rounds,
        selected_round=check.get(content, "selected_round", int),
        sites=first.sites,
        unseen=first.unseen,
        mean=first.mean,
        cases={
            # A site that sends means alone names no case, but how many they are of.
            site: check.get(entry, "scored_cases", int, f"test.{group}.{site}", default=len(entry["cases"]))
            for (group, site), entry in entries.items()
            if isinstance(entry.get("cases"), dict | list)
        },
        case_scores=first.cases,
        patients={site: _patients(check, entry, f"test.{g}.{site}") for (g, site), entry in entries.items()},
        chosen_by=chosen_by,
        test=scores,
        missed={
            site: check.get(entry, "missed", int, f"test.{group}.{site}")
            for (group, site), entry in entries.items()
            if "missed" in entry
        },
        scored=_texts(check.get(content, "scored", dict, default={})),
        units={site: str(entry["unit"]) for (_, site), entry in entries.items() if entry.get("unit")},
        left_out=_texts(check.get(content, "left_out", dict, default={})),
        untested=_texts(untested),
        unscored={
            site: str(entry["note"])
            for (_, site), entry in entries.items()
            if entry.get("note") and entry.get(chosen_by) is None
        },
        options=options,
        context=context,
    )
    return run.scored_by(metric) if metric else run


def _scores(
    check: _Checker, entries: dict[tuple[str, str], dict[str, Any]], mean: dict[str, Any]
) -> dict[tuple[str, str], Scores]:
    """The test scores by metric and class, from the entries of the sites."""
    first = next(iter(mean))
    found: dict[tuple[str, str], Scores] = {}
    for metric in mean:
        total = Scores({}, {}, check.score(mean[metric], f"test.mean.{metric}"))
        found[metric, ""] = total
        for (group, site), entry in entries.items():
            where = f"test.{group}.{site}"
            getattr(total, group)[site] = check.score(entry.get(metric), f"{where}.{metric}")
            place, cases = f"{where}.cases", entry.get("cases")
            if metric != first:
                place = f"{where}.case_metrics.{metric}"
                cases = check.get(entry, "case_metrics", dict, where, default={}).get(metric)
            if isinstance(cases, dict):
                total.cases[site] = {
                    case: check.score(value, f"{place}.{case}") for case, value in cases.items()
                }
            for label, scores in check.get(entry, "classes", dict, where, default={}).items():
                check.kind(scores, dict, f"{where}.classes.{label}")
                if metric in scores:
                    own = found.setdefault((metric, label), Scores({}, {}, None))
                    value = check.score(scores[metric], f"{where}.classes.{label}.{metric}")
                    getattr(own, group)[site] = value
    return {
        (metric, label): replace(own, mean=mean_score(own.sites.values())) if label else own
        for (metric, label), own in found.items()
    }


def _patients(check: _Checker, entry: dict[str, Any], where: str) -> dict[str, int]:
    patients = check.get(entry, "patients", dict, where, default={})
    return {case: check.get(patients, case, int, f"{where}.patients") for case in patients}


def _texts(reasons: dict[str, Any]) -> dict[str, str]:
    return {site: str(reason) for site, reason in reasons.items()}


_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}


class _Checker:
    """Checks values, and raises a `DataError` that names the file and the place in it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def kind(self, value: Any, kind: type, where: str) -> None:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise DataError(f"{where} is not {_JSON_NAMES[kind]}", path=self.file)

    def get(self, parent: dict[str, Any], key: str, kind: type, where: str = "", default: Any = None) -> Any:
        place = f"{where}.{key}" if where else key
        if key not in parent and default is None:
            raise DataError(f"{place} is missing", path=self.file)
        value = parent.get(key, default)
        self.kind(value, kind, place)
        return value

    def score(self, value: Any, where: str) -> float | None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise DataError(f"{where} is not a number", path=self.file)
        return _finite(value)


def _finite(value: Any) -> float | None:
    """The number, or ``None`` for anything else (nothing to score, NaN)."""
    return float(value) if is_number(value) else None
