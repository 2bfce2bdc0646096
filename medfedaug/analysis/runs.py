"""`Run`: a finished run, read from its ``results.json`` and checked; runs grouped by what they compare."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from medfedaug.errors import ConfigError, DataError

__all__ = ["BASELINE", "Run", "Tested", "group_runs", "load_run", "pool_folds"]

RESULTS = "results.json"
BASELINE = "fedavg"

# Runs that differ in these alone are repetitions of one experiment.
_REPETITION = ("seed", "fold", "threads")
_FOLD = re.compile(r"(?P<data>.*?)[-_.]?fold[-_]?(?P<fold>\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        path: the ``results.json`` it was read from.
        config: the run's configuration.
        metric: name of the score, ``"dice"`` or ``"accuracy"``, taken from the file.
        rounds: the record of each round, in order.
        selected_round: the round whose model was tested.
        sites: test score of each training site; ``None`` where nothing could be scored, or the site did not
            answer.
        unseen: test score of each site that did not train.
        mean: mean test score over the training sites.
        cases: number of test cases by site, where the file tells.
        case_scores: test score of each case by site, where the file tells.
        left_out: sites that could not take part, with the reason.
        untested: sites that could not be tested, with the reason.
        context: what else the file says about the run: ``engine``, ``data``, ``seconds``.
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
    left_out: dict[str, str] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods; FedAvg, on which the others build, only where it is alone."""
        names = tuple(method["name"] for method in self.config["methods"])
        return tuple(name for name in names if name != BASELINE) or (BASELINE,)

    @property
    def label(self) -> str:
        """The methods in one string, as in ``"fedrdn + fedfa"``."""
        return " + ".join(self.methods)

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.config["seed"])

    @property
    def fold(self) -> str | None:
        """Which fold of the patients was tested: ``config.fold``, or 3 where the data are ``lgg_fold3``."""
        if self.config.get("fold") is not None:
            return str(self.config["fold"])
        named = _FOLD.fullmatch(str(self.context.get("data", "")))
        return named["fold"] if named else None

    @property
    def data(self) -> str | None:
        """Name of the data, without a fold's number; ``None`` where the file does not tell."""
        if "data" not in self.context:
            return None
        named = _FOLD.fullmatch(str(self.context["data"]))
        return named["data"] if named else str(self.context["data"])

    @property
    def repetition(self) -> tuple[int, str | None]:
        """Seed and fold: what tells apart the runs of one experiment."""
        return self.seed, self.fold

    @property
    def name(self) -> str:
        """Seed and fold, for a reader."""
        return f"seed {self.seed}" + (f", fold {self.fold}" if self.fold is not None else "")

    def validation(self, site: str | None = None) -> list[float | None]:
        """Validation score by round, of one site or (``None``) the mean over the sites."""
        key = f"val_{self.metric}"
        curves = [
            [_finite(r["sites"].get(name, {}).get(key)) for name in ([site] if site else sorted(self.sites))]
            for r in self.rounds
        ]
        known = [[value for value in values if value is not None] for values in curves]
        return [sum(values) / len(values) if values else None for values in known]

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


def load_run(path: str | Path) -> Run:
    """Read and check a run.

    Args:
        path: the run's folder, or its ``results.json``.

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
    metric = next(iter(mean))
    scores: dict[str, dict[str, float | None]] = {"sites": {}, "unseen": {}}
    cases: dict[str, int] = {}
    case_scores: dict[str, dict[str, float | None]] = {}
    for group, found in scores.items():
        for site, values in check.get(test, group, dict, "test", default={}).items():
            check.kind(values, dict, f"test.{group}.{site}")
            found[site] = check.score(values.get(metric), f"test.{group}.{site}.{metric}")
            if isinstance(values.get("cases"), dict | list):
                cases[site] = len(values["cases"])
            if isinstance(values.get("cases"), dict):
                case_scores[site] = {
                    case: check.score(value, f"test.{group}.{site}.cases.{case}")
                    for case, value in values["cases"].items()
                }
    untested = check.get(test, "missing", dict, "test", default={})
    for site in check.get(content, "sites", dict, default={}).keys() & untested.keys():
        scores["sites"].setdefault(site, None)  # it trained, and did not answer when it came to the test
    if not scores["sites"]:
        raise DataError("test.sites names no site", path=file)
    return Run(
        path=file,
        config=config,
        metric=metric,
        rounds=rounds,
        selected_round=check.get(content, "selected_round", int),
        sites=scores["sites"],
        unseen=scores["unseen"],
        mean=check.score(mean[metric], f"test.mean.{metric}"),
        cases=cases,
        case_scores=case_scores,
        left_out=_texts(check.get(content, "left_out", dict, default={})),
        untested=_texts(untested),
        context={key: content[key] for key in ("data", "engine", "seconds") if key in content},
    )


def _texts(reasons: dict[str, Any]) -> dict[str, str]:
    return {site: str(reason) for site, reason in reasons.items()}


_JSON_NAMES = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}


class _Checker:
    """Raises a `DataError` that names the file and the place in it."""

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
    """The number, or ``None`` for anything that is none (nothing to score, NaN)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def group_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Put together the runs that differ by seed or fold alone, FedAvg first.

    Where two groups use the same methods, their labels tell the settings that differ.

    Args:
        runs: runs of one metric.

    Returns:
        The runs of each label, by seed and fold.

    Raises:
        ConfigError: for no run, for different metrics, for one experiment given twice, or for a case of a
            training site that several folds of a seed have tested.
    """
    if not runs:
        raise ConfigError("no run given")
    first = runs[0]
    for run in runs:
        if run.metric != first.metric:
            raise ConfigError(f"{first.path} scores {first.metric}, {run.path} scores {run.metric}")
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_settings(run), sort_keys=True), []).append(run)
    labelled: dict[str, list[Run]] = {}
    for members in groups.values():
        members.sort(key=lambda run: (run.seed, run.fold or ""))
        for one, other in pairwise(members):
            if one.repetition == other.repetition:
                raise ConfigError(f"{one.path} and {other.path} are one experiment with the same {one.name}")
        _check_folds(members)
        alike = [group[0] for group in groups.values() if group[0].methods == members[0].methods]
        labelled[_label(members[0], alike)] = members
    order = sorted(labelled, key=lambda label: labelled[label][0].methods != (BASELINE,))
    return {label: labelled[label] for label in order}


def _check_folds(members: Sequence[Run]) -> None:
    tested: dict[tuple[int, str, str], Run] = {}
    for run in members:
        for site in run.sites:
            for case in run.case_scores.get(site, {}):
                other = tested.setdefault((run.seed, site, case), run)
                if other is not run:
                    raise ConfigError(
                        f"{other.path} and {run.path} both test case {case} of site {site}: folds test every "
                        "case once"
                    )


@dataclass(frozen=True)
class Tested:
    """The test scores of one seed: of its run, or of the runs of its folds, which test every case once.

    Attributes:
        seed: the seed.
        folds: the folds; ``(None,)`` for a run that is none of several.
        sites: score of each training site, over the cases of all folds.
        unseen: score of each unseen site, whose cases every fold tests: the mean over the folds.
        mean: mean over the training sites, unweighted.
        untested: training sites that could not be tested in some fold, with the reason.
    """

    seed: int
    folds: tuple[str | None, ...]
    sites: dict[str, float | None]
    unseen: dict[str, float | None]
    mean: float | None
    untested: dict[str, str]


def pool_folds(runs: Sequence[Run]) -> list[Tested]:
    """Test scores by seed, the folds of a seed pooled.

    Args:
        runs: those of one label of `group_runs`.
    """
    by_seed: dict[int, list[Run]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    return [_pool(seed, members) for seed, members in sorted(by_seed.items())]


def _pool(seed: int, members: Sequence[Run]) -> Tested:
    folds = tuple(run.fold for run in members)
    untested = {site: reason for run in members for site, reason in run.untested.items() if site in run.sites}
    if len(members) == 1:
        run = members[0]
        return Tested(seed, folds, run.sites, run.unseen, run.mean, untested)

    def pooled(site: str, unseen: bool) -> float | None:
        values: list[float | None] = []
        for run in members:
            score = (run.unseen if unseen else run.sites).get(site)
            scores = {} if unseen else run.case_scores.get(site, {})
            values += scores.values() if scores else [score]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    sites = {site: pooled(site, False) for site in sorted({s for run in members for s in run.sites})}
    unseen = {site: pooled(site, True) for site in sorted({s for run in members for s in run.unseen})}
    known = [score for score in sites.values() if score is not None]
    return Tested(seed, folds, sites, unseen, fmean(known) if known else None, untested)


def _settings(run: Run) -> dict[str, Any]:
    """Everything that makes two runs different experiments, flat."""
    settings = {key: value for key, value in run.config.items() if key not in (*_REPETITION, "methods")}
    settings.update(data=run.data, engine=run.context.get("engine"))
    for method in run.config["methods"]:
        if method["name"] in run.methods:
            settings[method["name"]] = True
            settings.update({f"{method['name']}.{k}": v for k, v in (method.get("args") or {}).items()})
    return settings


def _label(run: Run, alike: Sequence[Run]) -> str:
    own, others = _settings(run), [_settings(other) for other in alike]
    missing = "default"
    differing = [
        key
        for key in sorted({key for other in others for key in other})
        if any(other.get(key, missing) != own.get(key, missing) for other in others)
    ]
    told = ", ".join(f"{key}={own.get(key, missing)}" for key in differing)
    return f"{run.label} ({told})" if told else run.label
