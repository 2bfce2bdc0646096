"""Reads finished runs from their ``results.json``, and checks each of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfedaug.config.run import RunConfig, asked_settings, recorded_settings
from medfedaug.errors import DataError
from medfedaug.federation.job_folder import RESULTS
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.nothing_learned import nothing_learned_in
from medfedaug.metrics.registry import add_recorded
from medfedaug.runs.input_scaling import recorded_input
from medfedaug.runs.results_schema import check_record
from medfedaug.runs.run import Run, Scores
from medfedaug.utils.files import parse_json
from medfedaug.utils.validation import number_or_none

_GROUPS = ("sites", "unseen")

# The fold in the name of a folder that is not a benchmark's: lgg_fold3.
_FOLD = re.compile(r"(?P<data>.+)[-_.]fold[-_]?(?P<fold>\d+)", re.IGNORECASE)

# The test of a site, by the group that it is in and its name.
_Entries = dict[tuple[str, str], dict[str, Any]]


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
    content, check = _content(file), _Checker(file)
    check.kind(content, dict, "the content")
    config, rounds = _config(check, content), _rounds(check, content)
    test = check.get(content, "test", dict)
    mean = check.get(test, "mean", dict, "test")
    if not mean:
        raise DataError("test.mean names no metric", path=file)
    untested = check.get(test, "missing", dict, "test", default={})
    entries = _entries(check, content, test, untested)
    add_recorded(check.get(content, "metrics", dict, default={}))
    chosen_by = next(iter(mean))
    if metric is not None and metric not in mean:
        raise DataError(f"its test has no {metric}, but {', '.join(mean)}", path=file)
    scores = _scores(check, entries, mean)
    first, (context, options) = scores[chosen_by, ""], _surroundings(check, content)
    run = Run(
        path=file,
        config=_complete(config),
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
        nothing_learned=nothing_learned_in(test),
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
    try:  # all but the scores, of which one beyond the range of a float is none
        check_record({key: value for key, value in content.items() if key != "test"})
    except ValueError as error:
        raise DataError(f"is damaged ({error})", path=file) from error
    return run.scored_by(metric) if metric else run


def _content(file: Path) -> Any:
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("is not there", path=file, hint="Give the folder of a finished run.") from None
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", path=file) from error
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", path=file) from error


def _config(check: _Checker, content: dict[str, Any]) -> dict[str, Any]:
    """The settings that the run had."""
    config = check.get(content, "config", dict)
    for method in check.get(config, "methods", list, "config"):
        check.kind(method, dict, "an entry of config.methods")
        check.get(method, "name", str, "config.methods")
    check.get(config, "seed", int, "config")
    for site in check.get(config, "holdout", list, "config", default=[]):
        check.kind(site, str, "an entry of config.holdout")
    check.get(config, "plan", dict, "config", default={})
    return recorded_settings(content)


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings, with the defaults of those that later releases added, so that older runs stay comparable."""
    defaults = RunConfig().to_dict()
    return {**defaults, **settings, "plan": {**defaults["plan"], **settings.get("plan", {})}}


def _rounds(check: _Checker, content: dict[str, Any]) -> list[dict[str, Any]]:
    rounds: list[dict[str, Any]] = check.get(content, "rounds", list)
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
        for key in ("refused", "missing", "suspected"):
            for trouble in check.get(entry, key, list, where, default=[]):
                check.kind(trouble, dict, f"an entry of {where}.{key}")
    return rounds


def _entries(
    check: _Checker, content: dict[str, Any], test: dict[str, Any], untested: dict[str, Any]
) -> _Entries:
    """The test of each site; empty for one that trained and did not answer in the test."""
    entries = {
        (group, site): check.get(test[group], site, dict, f"test.{group}")
        for group in _GROUPS
        for site in check.get(test, group, dict, "test", default={})
    }
    for site in check.get(content, "sites", dict, default={}).keys() & untested.keys():
        entries.setdefault(("sites", site), {})
    if not any(group == "sites" for group, _ in entries):
        raise DataError("test.sites names no site", path=check.file)
    return entries


def _surroundings(check: _Checker, content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Further entries of the file (`Run.context`), and the options of the data."""
    told = ("data", "engine", "seconds", "files", "bytes_up_before_training", "labelled")
    context = {key: content[key] for key in told if key in content}
    if planned := check.get(content, "planned", dict, default={}):
        check.get(planned, "asked", dict, "planned")
        context["planned"] = {**planned, "asked": _complete(asked_settings(content))}
    for key in ("bytes_up_before_training", "files", "input"):
        check.get(content, key, dict, default={})
    options = check.get(content, "data_options", dict, default={})
    named = _FOLD.fullmatch(str(context.get("data", "")))
    if named and "data_options" not in content:
        context["data"], options = named["data"], {"folds": True, "fold": int(named["fold"])}
    return context, options


def _scores(check: _Checker, entries: _Entries, mean: dict[str, Any]) -> dict[tuple[str, str], Scores]:
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
                total.cases[site] = _case_scores(check, cases, place)
            for label, scores in check.get(entry, "classes", dict, where, default={}).items():
                check.kind(scores, dict, f"{where}.classes.{label}")
                if metric in scores:
                    own = found.setdefault((metric, label), Scores({}, {}, None))
                    value = check.score(scores[metric], f"{where}.classes.{label}.{metric}")
                    getattr(own, group)[site] = value
                    of_cases = check.get(entry, "case_classes", dict, where, default={}).get(label, {})
                    if metric == first and isinstance(of_cases, dict):
                        own.cases[site] = _case_scores(check, of_cases, f"{where}.case_classes.{label}")
    return {
        (metric, label): replace(own, mean=mean_score(own.sites.values())) if label else own
        for (metric, label), own in found.items()
    }


def _case_scores(check: _Checker, cases: dict[str, Any], where: str) -> dict[str, float | None]:
    return {case: check.score(value, f"{where}.{case}") for case, value in cases.items()}


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
        return number_or_none(value)
