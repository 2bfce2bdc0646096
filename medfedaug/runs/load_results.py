"""Read and check finished runs from their ``results.json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfedaug._version import other_version
from medfedaug.config.run import RunConfig, asked_settings
from medfedaug.errors import DataError, first_line
from medfedaug.federation.job_folder import RESULTS
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.nothing_learned import nothing_learned_in
from medfedaug.metrics.registry import add_recorded
from medfedaug.metrics.segmentation import oversized_in
from medfedaug.runs.results_schema import check_finished
from medfedaug.runs.run import Run, Scores, recorded_input
from medfedaug.utils.files import parse_json

__all__ = ["find_runs", "load_run"]


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
    content = _content(file)
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


def _content(file: Path) -> dict[str, Any]:
    """Read a file, and check its structure."""
    content: Any = None
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
        check_finished(content)
    except (OSError, ValueError) as error:
        problem = f"is no record of a finished run ({first_line(error)}{other_version(content)})"
        raise DataError(problem, path=file, hint="Give the folder of a finished run.") from error
    return dict(content)


def _complete(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, comparable with those of other releases.

    Settings of later releases get their defaults. Settings that ended are left out.
    """
    defaults = RunConfig().to_dict()
    known = {name: value for name, value in settings.items() if name in defaults}
    return {**defaults, **known, "plan": {**defaults["plan"], **settings.get("plan", {})}}


def _context(content: dict[str, Any]) -> dict[str, Any]:
    """Return further entries of the file (`Run.context`)."""
    names = ("data", "engine", "seconds", "files", "bytes_up_before_training", "labelled")
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
