"""Compare the federation's models at a site with the model that the site trained by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfedaug.analysis.text_table import TextTable, number
from medfedaug.errors import data_errors
from medfedaug.federation.job_folder import EVALUATION, RESULTS
from medfedaug.metrics.base import Metric
from medfedaug.metrics.registry import GLOBAL, LOCAL, PERSONAL, UNSEEN, add_recorded, find_metric
from medfedaug.research.comparison.verdict import ENOUGH_PATIENTS
from medfedaug.runs.load_results import check_evaluation
from medfedaug.utils.files import parse_json


@dataclass(frozen=True)
class Worth:
    """Comparison of a federation's model with the local one, at one site."""

    site: str
    unseen: bool  # marks a site that did not train in the federation
    model: str
    scored: str  # description of the model, such as "personal (own layers)"
    score: float | None
    local: float | None  # score of the model that the site trained by itself, if any
    # The two paired by patient: `difference`, `low`, `high`, `p`, and their number, `patients`, or `cases` if
    # the site names no patients; empty without a comparison.
    difference: Mapping[str, Any]
    cases: int | None  # the number of the site's scored cases, if known
    metric: Metric

    @property
    def pairs(self) -> tuple[int | None, str]:
        """Number and unit of the pairs of the comparison."""
        unit = "patients" if "patients" in self.difference else "cases"
        return self.difference.get(unit), unit

    @property
    def nothing_learned(self) -> bool:
        """True if both models score 0 and higher is better."""
        return self.metric.higher_is_better and self.score == 0 and self.local == 0

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``no difference shown``, ``open: ...``, or ``–`` without a comparison."""
        if not self.difference or self.nothing_learned:
            return "–"
        count, unit = self.pairs
        low, high = self.difference.get("low"), self.difference.get("high")
        if not count or count < ENOUGH_PATIENTS or low is None or high is None:
            return f"open: {count or 0} of {ENOUGH_PATIENTS} {unit}"
        above, below = ("better", "worse") if self.metric.higher_is_better else ("worse", "better")
        return above if low > 0 else below if high < 0 else "no difference shown"

    @property
    def sentence(self) -> str:
        """Return in words the worth of the federation for this site."""
        difference, name = self.difference, self.metric.in_text
        subject = f"{self.site}, {self.model} model"
        if self.nothing_learned:
            return f"{subject}: nothing was learned: both models have a {name} of 0 there."
        if not difference and self.score is not None and self.local is not None:
            return (
                f"{subject}: both models have a score there, but the site sends no comparison: it takes two "
                "patients, or cases without names of patients, that both models scored."
            )
        if not difference:
            lacking = "local" if self.local is None else self.model
            return f"{subject}: nothing to compare, since the {lacking} model has no score there."
        count, unit = self.pairs
        if difference.get("difference") is None:
            return f"{subject}: {count} {unit} in common; this site sends no mean of them."
        text = (
            f"{difference['difference']:+.3f} {name} against its own local model on the same {count} {unit}"
        )
        if difference.get("low") is not None and difference.get("high") is not None:
            text += f" (95% interval {difference['low']:+.3f} to {difference['high']:+.3f})"
        judged = {
            "better": "For this site the federation is worth it.",
            "worse": "This site is better off by itself.",
            "no difference shown": "For this site it is shown neither to be worth it nor to be worse.",
        }
        few = f"Too few {unit} for a verdict: {count} of {ENOUGH_PATIENTS}."
        return f"{subject}: {text}. {judged.get(self.verdict, few)}"


def load_evaluation(path: str | Path) -> dict[str, Any]:
    """Read the results of an evaluation."""
    file = Path(path)
    file = file / EVALUATION if file.is_dir() else file
    with data_errors("cannot be read as the results of an evaluation", OSError, ValueError, path=file):
        content: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))
        check_evaluation(content)
    return content


def find_evaluations(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[Path]]:
    """Return the evaluations among some paths, and the paths of runs.

    The paths are files of evaluations, folders with ``evaluation.json``, and folders of runs, which may have
    one.
    """
    evaluations, others = [], []
    for path in paths:
        file = path / EVALUATION if path.is_dir() else path
        evaluated = file.is_file() and (path.is_dir() or path.name != RESULTS)
        evaluations += [load_evaluation(file)] if evaluated else []
        others += [path] if not evaluated or (path.is_dir() and any(path.rglob(RESULTS))) else []
    return evaluations, others


def worth_table(evaluation: Mapping[str, Any]) -> TextTable:
    """Make the table that compares the federation's models with the local one, for each site.

    A site compares the global model, and its personal one if the run leaves something at the sites, with the
    model that it trained by itself, on its own test cases, patient by patient
    (`medfedaug.hospital.privacy.score_release.released_difference`).
    """
    add_recorded(evaluation.get("metrics") or {})
    name, sites = str(evaluation["metric"]), evaluation["sites"]
    metric = find_metric(name)
    scored = [
        model
        for model in (GLOBAL, PERSONAL)
        if any(scores.get(model, {}).get(name) is not None for scores in sites.values())
    ]
    rows = []
    for site, scores in sites.items():
        for model in scored or [GLOBAL]:
            entry = scores.get(model, {})
            if model == PERSONAL and entry.get(name) is None and not entry.get("against"):
                continue  # a site without a personal model
            rows.append(
                Worth(
                    site=site,
                    unseen=site in evaluation.get("unseen", ()),
                    model=model,
                    scored=evaluation["models"][model]["scored"],
                    score=entry.get(name),
                    local=scores.get(LOCAL, {}).get(name),
                    difference=entry.get("against", {}).get(LOCAL, {}),
                    cases=_cases(entry),
                    metric=metric,
                )
            )
    lower = "" if metric.higher_is_better else " (lower is better)"
    notes = [
        f"{metric.title}{lower} on each site's own test cases. Global: the model that all sites share, "
        "without parts of the site. Personal: with the parts that the run left at the site. Local: the model "
        "that the site trained by itself.",
        "Difference: the model minus the local one, paired by patient, or by case if a site names no "
        "patients, with the 95% interval of a paired t-test; a verdict takes "
        f"{ENOUGH_PATIENTS} of them. It is about these trainings: others of the same methods may differ.",
    ]
    if GLOBAL not in scored:
        notes.append("The global model is incomplete without the parts at the sites, and has no score.")
    for site, missing in evaluation.get("missing", {}).items():
        reasons = dict.fromkeys(missing.values())
        notes.append(f"{site}, not scored ({', '.join(missing)}): {'; '.join(reasons)}.")
    for site, scores in sites.items():
        models: dict[str, list[str]] = {}
        for model, entry in scores.items():
            if entry.get(name) is None and isinstance(entry.get("note"), str):
                models.setdefault(entry["note"], []).append(model)
        notes += [f"{site}, no score ({', '.join(names)}): {note}." for note, names in models.items()]
    title = metric.title
    header = ["site", "model", title, f"{title}, local", "difference [95% CI]", "p", "cases", "worth it"]
    body = [_line(row) for row in rows]
    return TextTable(header, body, [_record(row) for row in rows], tuple(notes), rows=tuple(rows))


def _line(row: Worth) -> list[str]:
    p = row.difference.get("p")
    return [
        row.site,
        f"{row.scored}, {UNSEEN}" if row.unseen else row.scored,
        number(row.score),
        number(row.local),
        _interval(row.difference),
        "–" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}",
        "–" if row.cases is None else str(row.cases),
        row.verdict,
    ]


def _record(row: Worth) -> dict[str, Any]:
    return {
        "site": row.site,
        "trained": not row.unseen,
        "model": row.scored,
        "score": row.score,
        "local": row.local,
        **{name: row.difference.get(name) for name in ("difference", "low", "high", "p")},
        "cases": row.cases,
        "verdict": row.verdict,
    }


def _cases(entry: Mapping[str, Any]) -> int | None:
    if "scored_cases" in entry:
        return int(entry["scored_cases"])
    cases: Mapping[str, Any] | Sequence[Any] = entry.get("cases", {})
    if not isinstance(cases, Mapping):
        return None
    return sum(score is not None for score in cases.values()) or None


def _interval(difference: Mapping[str, Any]) -> str:
    if difference.get("difference") is None:
        return "–"
    text = f"{difference['difference']:+.3f}"
    if difference.get("low") is None or difference.get("high") is None:
        return text
    return f"{text} [{difference['low']:+.3f}, {difference['high']:+.3f}]"
