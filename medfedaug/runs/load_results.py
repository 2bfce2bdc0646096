"""Read finished runs from their ``results.json``, whose structure is checked wherever one is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfedaug._version import other_version
from medfedaug.config.run import RunConfig, asked_settings
from medfedaug.errors import ConfigError, DataError, first_line, translated
from medfedaug.federation.job_folder import LEVELS, RESULTS
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.registry import GLOBAL, add_recorded, nothing_learned_in
from medfedaug.metrics.segmentation import oversized_in
from medfedaug.runs.run import Run, Scores, recorded_input
from medfedaug.utils.files import parse_json
from medfedaug.utils.structure import (
    anything,
    both,
    count,
    entries,
    kind,
    list_of,
    map_of,
    number,
    optional,
    plain,
    row_of,
    score,
    text,
)


def find_runs(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders of runs: each path that is a run's folder, otherwise all runs below it, sorted."""
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
    """
    file = Path(path)
    if file.is_dir() or file.suffix != ".json":
        file = file / RESULTS
    content = read_record(file)
    test = content["test"]
    mean, untested = test["mean"], test.get("missing", {})
    if not mean:
        raise DataError("test.mean names no metric", path=file)
    if metric is not None and metric not in mean:
        raise DataError(f"its test has no {metric}, but {', '.join(mean)}", path=file)
    entries = {**test.get("unseen", {}), **test["sites"]}
    # A training site that did not answer in the test has no entry.
    trained = {*test["sites"], *(content.get("sites", {}).keys() & untested.keys())}
    if not trained:
        raise DataError("test.sites names no site", path=file)
    add_recorded(content.get("metrics", {}))
    chosen_by = next(iter(mean))
    scores = _scores(test, sorted(trained - entries.keys()))
    first = scores[chosen_by, ""]
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
        # A site that sends only means names no case, but their number.
        cases={s: e.get("scored_cases", len(e["cases"])) for s, e in entries.items() if "cases" in e},
        case_scores=first.cases,
        patients={site: entry.get("patients", {}) for site, entry in entries.items()},
        chosen_by=chosen_by,
        test=scores,
        missed={site: entry["missed"] for site, entry in entries.items() if "missed" in entry},
        nothing_learned=nothing_learned_in(test),
        scored=content.get("scored", {}),
        units={site: entry["unit"] for site, entry in entries.items() if entry.get("unit")},
        left_out=content.get("left_out", {}),
        suspected=content.get("suspected", {}),
        untested=untested,
        unscored={
            site: entry["note"]
            for site, entry in entries.items()
            if entry.get("note") and entry.get(chosen_by) is None
        },
        options=content.get("data_options", {}),
        context={**_context(content), "oversized": oversized_in(test)},
    )
    return run.scored_by(metric) if metric else run


def read_record(file: Path, *checks: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Read the record of a finished run; further ``checks`` raise errors, as `check_finished` does."""
    content: Any = None

    def named(error: Exception) -> DataError:
        problem = f"is no record of a finished run ({first_line(error)}{other_version(content)})"
        return DataError(problem, path=file, hint="Give the folder of a finished run.")

    with translated(OSError, ConfigError, TypeError, ValueError, to=named):
        content = parse_json(file.read_text(encoding="utf-8"))
        for check in (check_finished, *checks):
            check(content)
    return dict(content)


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, comparable with those of other releases.

    Settings of later releases get their defaults. Settings that ended are left out.
    """
    defaults = RunConfig().to_dict()
    known = {name: value for name, value in settings.items() if name in defaults}
    return {**defaults, **known, "plan": {**defaults["plan"], **settings.get("plan", {})}}


def _context(content: dict[str, Any]) -> dict[str, Any]:
    names = ("data", "engine", "seconds", "files", "bytes_up_before_training", "labelled", "stalled")
    context = {name: content[name] for name in names if name in content}
    if planned := content.get("planned"):
        context["planned"] = {**planned, "asked": _complete(asked_settings(content))}
    return context


def _scores(test: dict[str, Any], silent: Sequence[str]) -> dict[tuple[str, str], Scores]:
    """Return the test scores by metric and class; training sites that did not answer have none."""
    first = next(iter(test["mean"]))
    by_class: dict[tuple[str, str], Scores] = {}
    for metric, mean in test["mean"].items():
        total = by_class[metric, ""] = Scores({}, {}, mean)
        for group in ("sites", "unseen"):
            for site, entry in test.get(group, {}).items():
                getattr(total, group)[site] = entry.get(metric)
                cases = entry.get("cases") if metric == first else entry.get("case_metrics", {}).get(metric)
                if cases is not None:
                    total.cases[site] = cases
                for label, scores in entry.get("classes", {}).items():
                    if metric in scores:
                        of_class = by_class.setdefault((metric, label), Scores({}, {}, None))
                        getattr(of_class, group)[site] = scores[metric]
                        if metric == first and label in entry.get("case_classes", {}):
                            of_class.cases[site] = entry["case_classes"][label]
        total.sites.update(dict.fromkeys(silent))
    return {
        (metric, label): replace(scores, mean=mean_score(scores.sites.values())) if label else scores
        for (metric, label), scores in by_class.items()
    }


def check_record(record: Any) -> None:
    """Check that a record has the structure of this release; unknown entries pass.

    Raises:
        ValueError: naming the first entry of another kind, such as ``test.mean.dice``.

    Example:
        >>> check_record({"selected_round": "one"})
        Traceback (most recent call last):
        ValueError: selected_round is 'one', expected a whole number from 0 on
    """
    _RECORD(record, "")


def check_finished(record: Any) -> None:
    """Check that a record has all entries of a finished run."""
    _FINISHED(record, "")
    check_record(record)


def check_evaluation(content: Any) -> None:
    """Check that the results of an evaluation have the structure of this release."""
    _EVALUATION(content, "")
    for site, scores in content["sites"].items():
        for model in scores:
            if model not in content["models"]:
                raise ValueError(f"sites.{site} has scores of a model '{model}', which models does not name")


_TROUBLE = list_of(entries({"site": text, "reason": text, "task": text}))
_ROUND = entries(
    {
        **dict.fromkeys(("round", "bytes_up", "bytes_down"), count),
        **dict.fromkeys(("refused", "missing"), _TROUBLE),
        **dict.fromkeys(("seconds", "hours"), number),
        "sites": map_of(map_of(plain)),
        "bytes": map_of(map_of(count)),
        "methods": map_of(map_of(anything)),
        "shares": map_of(number),
        "cosines": map_of(number),
    }
)
_SCORES = entries(
    {
        "cases": map_of(score),
        **dict.fromkeys(("case_metrics", "case_classes", "classes"), map_of(map_of(score))),
        "patients": map_of(count),
        **dict.fromkeys(("scored_cases", "missed", "undivided"), count),
        **dict.fromkeys(("note", "unit"), text),
    },
    score,
)
_WORST = entries({"site": text, "value": number}, needed=("site", "value"))
_TEST = entries(
    {
        "sites": map_of(_SCORES),
        "unseen": map_of(_SCORES),
        "mean": map_of(score),
        "worst": map_of(optional(_WORST)),
        "missing": map_of(text),
    }
)
_FINGERPRINT = entries(
    {"spacing": row_of(row_of(number, 3), 3), "intensity": list_of(row_of(number, 2))},
    needed=("spacing", "intensity"),
)
_RECORD = entries(
    {
        "config": entries(
            {
                "methods": list_of(entries({"name": text, "args": map_of(anything)})),
                "holdout": list_of(text),
                "plan": map_of(anything),
                "seed": kind("a whole number", lambda value: type(value) is int),
            }
        ),
        **dict.fromkeys(("run", "job", "date", "engine", "data"), text),
        **dict.fromkeys(("left_out", "suspected", "scored", "versions", "sha256"), map_of(text)),
        **dict.fromkeys(("sites", "bytes_up_before_training"), map_of(count)),
        **dict.fromkeys(("input", "execution", "files", "metrics", "data_options", "init"), map_of(anything)),
        "rounds": list_of(_ROUND),
        "selected_round": count,
        "stalled": entries({"round": count, "reason": text}, needed=("round", "reason")),
        "unseen": list_of(text),
        "shares": map_of(map_of(number)),
        "labelled": map_of(list_of(text)),
        "counts": map_of(map_of(count)),
        "test": _TEST,
        "seconds": number,
        "planned": entries({"fingerprints": map_of(_FINGERPRINT), "asked": map_of(anything)}),
        "spacing": map_of(entries(dict.fromkeys(LEVELS, row_of(number, 3)), needed=LEVELS)),
    }
)
_FINISHED = entries(
    {
        "config": entries({"methods": list_of(entries({}, needed=("name",)))}, needed=("methods", "seed")),
        "rounds": list_of(entries({}, needed=("round", "sites"))),
        "test": entries({}, needed=("sites", "mean")),
        "planned": entries({}, needed=("asked",)),
    },
    needed=("config", "input", "rounds", "selected_round", "test"),
)
_DIFFERENCE = entries({"patients": count, "cases": count}, score)
_COMPARED = both(
    entries({"against": map_of(_DIFFERENCE)}),
    lambda value, where: _SCORES({k: v for k, v in value.items() if k != "against"}, where),
)
_MODEL = entries(
    {"scored": text, "methods": list_of(text), "runs": list_of(entries({"run": text}))}, needed=("scored",)
)
_EVALUATION = entries(
    {
        "metric": text,
        "metrics": map_of(map_of(plain)),
        "models": both(map_of(_MODEL), entries({}, needed=(GLOBAL,))),
        "unseen": list_of(text),
        "sites": map_of(map_of(_COMPARED)),
        "mean": map_of(map_of(score)),
        "missing": map_of(map_of(text)),
    },
    needed=("metric", "models", "sites"),
)
