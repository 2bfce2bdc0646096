"""Read and check finished runs from their ``results.json``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfedaug.config.run import RunConfig, asked_settings
from medfedaug.errors import DataError
from medfedaug.federation.job_folder import RESULTS
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.nothing_learned import nothing_learned_in
from medfedaug.metrics.registry import add_recorded
from medfedaug.runs.input_scaling import recorded_input
from medfedaug.runs.results_schema import check_finished
from medfedaug.runs.run import Run, Scores
from medfedaug.utils.files import parse_json
from medfedaug.utils.validation import number_or_none

__all__ = ["find_runs", "load_run"]

_GROUPS = ("sites", "unseen")

# The fold in the name of a custom folder: lgg_fold3.
_FOLD = re.compile(r"(?P<data>.+)[-_.]fold[-_]?(?P<fold>\d+)", re.IGNORECASE)

# The test of a site, by group and name.
_Entries = dict[tuple[str, str], dict[str, Any]]


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders of runs: each path that is a run's folder, otherwise all runs below it, sorted.

    Raises:
        DataError: when a path is no finished run and contains none.
    """
    folders: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir() or (path / RESULTS).exists():
            folders.append(path)
            continue
        # A run that is being moved to its final place is in a hidden folder.
        files = [file.relative_to(path) for file in sorted(path.rglob(RESULTS))]
        below = [path / f.parent for f in files if not any(part.startswith(".") for part in f.parts)]
        if not below:
            raise DataError("holds no finished run", path=path, hint=f"A finished run has a {RESULTS}.")
        folders += below
    return list(dict.fromkeys(folders))


def load_run(path: str | Path, metric: str | None = None) -> Run:
    """Read and check a run from its folder or its ``results.json``.

    Without a test metric for comparisons, the run has the one that chose the round.

    Raises:
        DataError: naming the file and the error.
    """
    file = Path(path)
    if file.is_dir() or file.suffix != ".json":
        file = file / RESULTS
    content, check = _content(file), _Checker(file)
    test = content["test"]
    mean = check.get(test, "mean", dict, "test")
    if not mean:
        raise DataError("test.mean names no metric", path=file)
    untested = check.get(test, "missing", dict, "test", default={})
    entries = _entries(check, content, test, untested)
    add_recorded(content.get("metrics", {}))
    chosen_by = next(iter(mean))
    if metric is not None and metric not in mean:
        raise DataError(f"its test has no {metric}, but {', '.join(mean)}", path=file)
    scores = _scores(check, entries, mean)
    first, (context, options) = scores[chosen_by, ""], _context(check, content)
    run = Run(
        path=file,
        config=_complete(content["config"]),
        input=recorded_input(content),
        metric=chosen_by,
        rounds=content["rounds"],
        selected_round=content["selected_round"],
        sites=first.sites,
        unseen=first.unseen,
        mean=first.mean,
        cases={
            # A site that sends only means names no case, but their number.
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
        scored=content.get("scored", {}),
        units={site: str(entry["unit"]) for (_, site), entry in entries.items() if entry.get("unit")},
        left_out=content.get("left_out", {}),
        untested={site: str(reason) for site, reason in untested.items()},
        unscored={
            site: str(entry["note"])
            for (_, site), entry in entries.items()
            if entry.get("note") and entry.get(chosen_by) is None
        },
        options=options,
        context=context,
    )
    return run.scored_by(metric) if metric else run


def _content(file: Path) -> dict[str, Any]:
    """Read a file, and check all but its scores (`_Checker`)."""
    try:
        content: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError("is not there", path=file, hint="Give the folder of a finished run.") from None
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", path=file) from error
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", path=file) from error
    try:
        check_finished(content, scores=False)
    except ValueError as error:
        raise DataError(f"is damaged ({error})", path=file) from error
    return content


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, comparable with those of other releases.

    Settings of later releases get their defaults. Settings that ended are left out where they were off.
    """
    defaults = RunConfig().to_dict()
    known = {name: value for name, value in settings.items() if value or name in defaults}
    return {**defaults, **known, "plan": {**defaults["plan"], **settings.get("plan", {})}}


def _entries(
    check: _Checker, content: dict[str, Any], test: dict[str, Any], untested: dict[str, Any]
) -> _Entries:
    """Return the test of each site; empty for a training site that did not answer in the test."""
    entries = {
        (group, site): check.get(test[group], site, dict, f"test.{group}")
        for group in _GROUPS
        for site in check.get(test, group, dict, "test", default={})
    }
    for site in content.get("sites", {}).keys() & untested.keys():
        entries.setdefault(("sites", site), {})
    if not any(group == "sites" for group, _ in entries):
        raise DataError("test.sites names no site", path=check.file)
    return entries


def _context(check: _Checker, content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return further entries of the file (`Run.context`), and the options of the data."""
    names = ("data", "engine", "seconds", "files", "bytes_up_before_training", "labelled")
    context = {name: content[name] for name in names if name in content}
    if planned := content.get("planned"):
        check.get(planned, "asked", dict, "planned")
        context["planned"] = {**planned, "asked": _complete(asked_settings(content))}
    options = content.get("data_options", {})
    match = _FOLD.fullmatch(context.get("data", ""))
    if match and "data_options" not in content:
        context["data"], options = match["data"], {"folds": True, "fold": int(match["fold"])}
    return context, options


def _scores(check: _Checker, entries: _Entries, mean: dict[str, Any]) -> dict[tuple[str, str], Scores]:
    """Return the test scores by metric and class, from the entries of the sites."""
    first = next(iter(mean))
    by_class: dict[tuple[str, str], Scores] = {}
    for metric in mean:
        total = Scores({}, {}, check.score(mean[metric], f"test.mean.{metric}"))
        by_class[metric, ""] = total
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
                    of_class = by_class.setdefault((metric, label), Scores({}, {}, None))
                    value = check.score(scores[metric], f"{where}.classes.{label}.{metric}")
                    getattr(of_class, group)[site] = value
                    of_cases = check.get(entry, "case_classes", dict, where, default={}).get(label, {})
                    if metric == first and isinstance(of_cases, dict):
                        of_class.cases[site] = _case_scores(check, of_cases, f"{where}.case_classes.{label}")
    return {
        (metric, label): replace(scores, mean=mean_score(scores.sites.values())) if label else scores
        for (metric, label), scores in by_class.items()
    }


def _case_scores(check: _Checker, cases: dict[str, Any], where: str) -> dict[str, float | None]:
    return {case: check.score(value, f"{where}.{case}") for case, value in cases.items()}


def _patients(check: _Checker, entry: dict[str, Any], where: str) -> dict[str, int]:
    patients = check.get(entry, "patients", dict, where, default={})
    return {case: check.get(patients, case, int, f"{where}.patients") for case in patients}


_JSON_NAMES = {dict: "an object", int: "a whole number"}


class _Checker:
    """Checks values of the test, and raises a `DataError` with the file and the place in it."""

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
