"""Compare the federation's models at a site with the model that the site trained alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfedaug.analysis.text_table import TextTable, number
from medfedaug.analysis.verdict import ENOUGH_PATIENTS
from medfedaug.errors import DataError, first_line, warn
from medfedaug.federation.job_folder import EVALUATION, RESULTS
from medfedaug.metrics.registry import GLOBAL, LOCAL, PERSONAL, UNSEEN, add_recorded, find_metric
from medfedaug.runs.results_schema import check_evaluation
from medfedaug.utils.files import parse_json


@dataclass(frozen=True)
class Worth:
    """Comparison of a federation's model with the local one, at one site.

    Attributes:
        site: its name.
        unseen: whether it did not train in the federation.
        model: ``"global"`` or ``"personal"``.
        scored: what the model is, such as ``"personal (own layers)"``.
        score: of this model; ``None`` where there is none.
        local: the score of the model that the site trained alone.
        difference: of the two, paired by patient: ``difference``, ``low``, ``high``, ``p``, and their number,
            ``patients``, or ``cases`` where the site names none; empty where there is no comparison.
        cases: the number of the site's scored cases, if it says so.
        higher_is_better: the direction of the score.
    """

    site: str
    unseen: bool
    model: str
    scored: str
    score: float | None
    local: float | None
    difference: Mapping[str, Any]
    cases: int | None
    higher_is_better: bool = True

    @property
    def pairs(self) -> tuple[int | None, str]:
        """The number of pairs of the comparison, and what they are."""
        unit = "patients" if "patients" in self.difference else "cases"
        return self.difference.get(unit), unit

    @property
    def nothing_learned(self) -> bool:
        """Return whether neither model found anything: both score 0, where higher is better."""
        return self.higher_is_better and self.score == 0 and self.local == 0

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, ``no difference shown``, ``open: ...``, or ``–`` without a comparison."""
        if not self.difference or self.nothing_learned:
            return "–"
        found, unit = self.pairs
        count = found or 0
        low, high = self.difference.get("low"), self.difference.get("high")
        if count < ENOUGH_PATIENTS or low is None or high is None:
            return f"open: {count} of {ENOUGH_PATIENTS} {unit}"
        # The ends that a site sends as a summary are rounded: one that is 0 may lie on either side of it.
        above, below = ("better", "worse") if self.higher_is_better else ("worse", "better")
        return above if low > 0 else below if high < 0 else "no difference shown"

    def sentence(self, metric: str) -> str:
        """Answer in words whether the federation is worth it for this site."""
        found, name = self.difference, find_metric(metric).in_text
        about = f"{self.site}, {self.model} model"
        if self.nothing_learned:
            return f"{about}: nothing was learned: both models have a {name} of 0 there."
        if not found and self.score is not None and self.local is not None:
            return (
                f"{about}: both models have a score there, but the site sends no comparison: it takes two "
                "patients, or cases where none is named, that both models have a score of."
            )
        if not found:
            lacking = "local" if self.local is None else self.model
            return f"{about}: nothing to compare, since the {lacking} model has no score there."
        count, unit = self.pairs
        if found.get("difference") is None:
            return f"{about}: {count} {unit} in common, of which this site sends no mean."
        text = f"{found['difference']:+.3f} {name} against its own local model on the same {count} {unit}"
        if found.get("low") is not None and found.get("high") is not None:
            text += f" (95% interval {found['low']:+.3f} to {found['high']:+.3f})"
        judged = {
            "better": "For this site the federation is worth it.",
            "worse": "This site is better off alone.",
            "no difference shown": "For this site it is shown neither to be worth it nor to be worse.",
        }
        few = f"Too few {unit} for a verdict: {count} of {ENOUGH_PATIENTS}."
        return f"{about}: {text}. {judged.get(self.verdict, few)}"


@dataclass(frozen=True)
class WorthTable(TextTable):
    """Table with a row for each site of an evaluation and each model that the federation has for it."""

    metric: str
    rows: tuple[Worth, ...]
    notes: tuple[str, ...] = ()
    reduced: str = ""

    @property
    def header(self) -> list[str]:
        """Headings of the columns."""
        name = find_metric(self.metric).title
        return ["site", "model", name, f"{name}, local", "difference [95% CI]", "p", "cases", "worth it"]

    @property
    def body(self) -> list[list[str]]:
        """The cells as text."""
        lines = []
        for row in self.rows:
            p = row.difference.get("p")
            lines.append(
                [
                    row.site,
                    f"{row.scored}, {UNSEEN}" if row.unseen else row.scored,
                    number(row.score),
                    number(row.local),
                    _interval(row.difference),
                    "–" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}",
                    "–" if row.cases is None else str(row.cases),
                    row.verdict,
                ]
            )
        return lines

    def records(self) -> list[dict[str, Any]]:
        """Every number in a column of its own."""
        return [
            {
                "site": row.site,
                "trained": not row.unseen,
                "model": row.scored,
                "score": row.score,
                "local": row.local,
                **{name: row.difference.get(name) for name in ("difference", "low", "high", "p")},
                "cases": row.cases,
                "verdict": row.verdict,
            }
            for row in self.rows
        ]


@dataclass(frozen=True)
class ExchangeTable(TextTable):
    """The models of each site, scored at every site.

    Attributes:
        kind: ``local`` or ``personal``.
        metric: name of the score.
        scores: by the site that the model is of, and there by the site that scored it.
        targets: the sites that scored.
        notes: see `medfedaug.analysis.text_table.TextTable`.
        reduced: see there.
    """

    kind: str
    metric: str
    scores: Mapping[str, Mapping[str, float | None]]
    targets: tuple[str, ...]
    notes: tuple[str, ...] = ()
    reduced: str = ""

    @property
    def header(self) -> list[str]:
        """Headings of the columns."""
        return [f"{self.kind} model of", *(f"at {target}" for target in self.targets)]

    @property
    def body(self) -> list[list[str]]:
        """The cells as text."""
        return [
            [source, *(number(row.get(target)) for target in self.targets)]
            for source, row in self.scores.items()
        ]

    def records(self) -> list[dict[str, Any]]:
        """Return a row for each model, with a column for each site."""
        return [
            {"model": self.kind, "model_of": source, **{target: row.get(target) for target in self.targets}}
            for source, row in self.scores.items()
        ]


def load_evaluation(path: str | Path) -> dict[str, Any]:
    """Read the results of an evaluation."""
    file = Path(path)
    file = file / EVALUATION if file.is_dir() else file
    try:
        content = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot be read as the results of an evaluation ({first_line(error)})", path=file
        ) from error
    try:
        check_evaluation(content)
    except ValueError as error:
        raise DataError(f"is not the results of an evaluation ({error})", path=file) from error
    found: dict[str, Any] = content
    return found


def find_evaluations(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[Path]]:
    """The evaluations among some paths, and the paths of runs.

    Args:
        paths: files of evaluations, folders with ``evaluation.json``, and folders of runs, which may have
            one. An evaluation beside the results of a run that it is not of, which replaced the one that it
            was of, is left out with a warning.
    """
    evaluations, others = [], []
    for path in paths:
        file = path / EVALUATION if path.is_dir() else path
        evaluated = file.is_file() and (path.is_dir() or path.name != RESULTS)
        if evaluated and not _of_another_run(found := load_evaluation(file), file):
            evaluations.append(found)
        if not evaluated or (path.is_dir() and any(path.rglob(RESULTS))):
            others.append(path)
    return evaluations, others


def _recorded_run(file: Path) -> str | None:
    try:
        return str(parse_json(file.read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no run, or what its own reader finds fault with


def _of_another_run(evaluation: Mapping[str, Any], file: Path) -> bool:
    """True where the file lies in the folder of a run, and none of its models is that run's."""
    own = _recorded_run(file.parent / RESULTS)
    made = {run.get("run") for model in evaluation["models"].values() for run in model.get("runs", ())}
    if own is None or not made or own in made:
        return False
    warn(
        f"{file} is of another run than the results beside it, and is left out",
        hint="Evaluate again, or move it elsewhere if it is still needed.",
    )
    return True


def worth_table(evaluation: Mapping[str, Any]) -> WorthTable:
    """Make the table that compares the federation's models with the local one, for each site.

    A site has compared the global model, and its personal one where the run leaves something at the sites,
    with the model that it trained alone, on its own test cases, patient by patient
    (`medfedaug.metrics.significance.compare_patients`).
    """
    metric, models = _metric(evaluation), evaluation["models"]
    unseen = set(evaluation.get("unseen", ()))
    shown = [
        model
        for model in (GLOBAL, PERSONAL)
        if any(found.get(model, {}).get(metric) is not None for found in evaluation["sites"].values())
    ]
    rows = []
    for site, scores in evaluation["sites"].items():
        for model in shown or [GLOBAL]:
            found = scores.get(model, {})
            if model == PERSONAL and found.get(metric) is None and not found.get("against"):
                continue  # a site that has nothing of its own
            rows.append(
                Worth(
                    site=site,
                    unseen=site in unseen,
                    model=model,
                    scored=models[model]["scored"],
                    score=found.get(metric),
                    local=scores.get(LOCAL, {}).get(metric),
                    difference=found.get("against", {}).get(LOCAL, {}),
                    cases=_cases(found),
                    higher_is_better=find_metric(metric).higher_is_better,
                )
            )
    name = find_metric(metric).title
    lower = "" if find_metric(metric).higher_is_better else " (lower is better)"
    notes = [
        f"{name}{lower} on each site's own test cases. Global: the model that all sites share, with nothing "
        "of the site's own. Personal: with what the run left at the site. Local: the model that the site "
        "trained alone.",
        "Difference: of the model to the local one, paired by patient, or by case where a site names no "
        "patients, with the 95% interval of a randomisation test; a verdict takes "
        f"{ENOUGH_PATIENTS} of them. It is about these trainings: others of the same methods may differ.",
    ]
    if GLOBAL not in shown:
        notes.append("The global model is not whole without what sites keep, and has no score of its own.")
    for site, missing in evaluation.get("missing", {}).items():
        reasons = dict.fromkeys(missing.values())
        notes.append(f"{site}, not scored ({', '.join(missing)}): {'; '.join(reasons)}.")
    for site, scores in evaluation["sites"].items():
        said: dict[str, list[str]] = {}
        for model, found in scores.items():
            if found.get(metric) is None and isinstance(found.get("note"), str):
                said.setdefault(found["note"], []).append(model)
        notes += [f"{site}, no score ({', '.join(of)}): {note}." for note, of in said.items()]
    return WorthTable(metric, tuple(rows), tuple(notes))


def exchange_tables(evaluation: Mapping[str, Any]) -> list[ExchangeTable]:
    """The models of each site at every site, for each kind of model that sites lent."""
    metric, tables = _metric(evaluation), []
    for kind, rows in evaluation.get("cross_site", {}).items():
        scores = {
            source: {target: found.get(metric) for target, found in row.items()}
            for source, row in rows.items()
        }
        targets = tuple(dict.fromkeys(target for row in scores.values() for target in row))
        notes = [
            f"{find_metric(metric).title} of the {kind} model of each site (row) on the test cases of each "
            "site (column), whose images are normalised as there. On the diagonal the site itself."
        ]
        kept = evaluation.get("kept", {}).get(kind, {})
        notes += [f"{site}: not lent ({reason})." for site, reason in sorted(kept.items())]
        tables.append(ExchangeTable(kind, metric, scores, tuple(sorted(targets)), tuple(notes)))
    return tables


def _metric(evaluation: Mapping[str, Any]) -> str:
    """The name of the metric, whose direction is known from here on."""
    add_recorded(evaluation.get("metrics") or {})
    return str(evaluation["metric"])


def _cases(found: Mapping[str, Any]) -> int | None:
    if "scored_cases" in found:
        return int(found["scored_cases"])
    cases: Mapping[str, Any] | Sequence[Any] = found.get("cases", {})
    if not isinstance(cases, Mapping):
        return None
    return sum(score is not None for score in cases.values()) or None


def _interval(found: Mapping[str, Any]) -> str:
    if found.get("difference") is None:
        return "–"
    text = f"{found['difference']:+.3f}"
    if found.get("low") is None or found.get("high") is None:
        return text
    return f"{text} [{found['low']:+.3f}, {found['high']:+.3f}]"
