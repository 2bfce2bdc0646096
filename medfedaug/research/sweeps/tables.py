"""The tables of a sweep: our scores, and published numbers."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medfedaug.analysis import Row, Score, metric_table, summary_table, write_report
from medfedaug.analysis.text_table import TextTable
from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError
from medfedaug.federation.job_folder import RESULTS
from medfedaug.methods import parse_methods
from medfedaug.research.comparison import patient_table
from medfedaug.research.datasets.benchmarks import find_benchmark
from medfedaug.research.papers.presets import Preset
from medfedaug.research.papers.published import PrintedScore, Published, published_rows
from medfedaug.research.sweeps.run_list import PlannedRun
from medfedaug.research.sweeps.sweep import difference
from medfedaug.runs.load_results import load_run
from medfedaug.runs.run import MODEL, Run


def _pair(ours: Score, theirs: PrintedScore | None) -> str:
    if theirs is None:
        return f"{ours} / –"
    spread = "" if theirs.spread is None else f" ± {theirs.spread:.3f}"
    return f"{ours} / {theirs.score:.3f}{spread}"


def reading_notes(preset: Preset, runs: Sequence[PlannedRun]) -> list[str]:
    """Return the notes of a sweep: the source of the protocol, and the differences from the paper's."""
    notes = []
    rounds = {run.config.rounds for run in runs}
    limits = {run.config.limit for run in runs} - {None}
    if not preset.source:  # the user's own experiment
        if limits:
            notes.append(f"REDUCED: at most {_join(limits)} cases per split and site.")
        network = preset.config["network"]
        return [*notes, f"Own experiment: {preset.schedule}, {network}; experiment.yml has all settings."]
    if rounds != {preset.config["rounds"]}:
        notes.append(
            f"REDUCED, not the paper's protocol: {_join(rounds)} instead of {preset.config['rounds']} "
            "rounds. Published numbers are of all rounds."
        )
    if limits:
        notes.append(f"REDUCED, not the paper's data: at most {_join(limits)} cases per split and site.")
    settings = set.intersection(*({f"{k}={v}" for k, v in run.settings} for run in runs))
    if settings:
        notes.append(f"Not the protocol's, in all runs: {_join(settings)}.")
    notes.append(f"Protocol {preset.name}: {preset.source}.")
    return [*notes, *preset.readings]


def _join(values: set[Any]) -> str:
    return ", ".join(map(str, sorted(values)))


def write_tables(
    runs: Sequence[PlannedRun],
    preset: Preset,
    out: str | Path,
    *,
    data: str | Path | None = None,
    device: str = "auto",
    failed: Collection[Path] = (),
    sentences: Sequence[str] = (),
) -> tuple[dict[str, TextTable], list[str]]:
    """Write the tables of the finished runs as Markdown and CSV, and ``report.html``.

    Args:
        runs: the planned runs; finished ones with other data or settings are left out.
        data: the folder with the data set's files, or its parent, for images in the report.
        failed: folders of failed runs, which are left out too: they may hold an earlier run with other files.
        sentences: for the beginning of the page.
    """
    out = Path(out)
    loaded, notes = _finished(runs, preset, out, failed)
    finished = [run for _, run in loaded]
    tables: dict[str, TextTable] = {
        "table": summary_table(finished),
        "patients": patient_table(finished),
        "metrics": metric_table(finished),
        "published": _published(loaded, preset),
    }
    tables = {name: table for name, table in tables.items() if table.body}
    for name, table in tables.items():
        replace(table, notes=(*table.notes, *notes)).save(out / name)
    first = [*sentences, *notes]
    write_report(finished, out / "report.html", data=data, device=device, notes=first)
    return tables, notes


def _finished(
    runs: Sequence[PlannedRun], preset: Preset, out: Path, failed: Collection[Path] = ()
) -> tuple[list[tuple[PlannedRun, Run]], list[str]]:
    """Load the finished runs, with the notes below every table."""
    loaded = [
        (run, _as_planned(run, preset, load_run(out / run.folder)))
        for run in runs
        if run.folder not in failed
        and (results := out / run.folder / RESULTS).exists()
        and not difference(results, preset.benchmark, run)
    ]
    if not loaded:
        raise ConfigError(f"{out}: no run is finished")
    notes = reading_notes(preset, runs)
    if len(loaded) < len(runs):
        notes.insert(0, f"UNFINISHED: {len(loaded)} of {len(runs)} runs.")
    return loaded, notes


def _as_planned(planned: PlannedRun, preset: Preset, run: Run) -> Run:
    """Give a run the data and settings of its plan, completed by the defaults."""
    options = {**find_benchmark(preset.benchmark).options, **planned.data}
    context = {**run.context, "data": preset.benchmark}
    if "planned" in context:
        context["planned"] = {**context["planned"], "asked": RunConfig.from_dict(run.asked).to_dict()}
    return replace(
        run,
        config=RunConfig.from_dict(run.config).to_dict(),
        options=options,
        in_turn=bool(planned.held_out),
        context=context,
    )


_Loaded = Sequence[tuple[PlannedRun, Run]]


def _groups(loaded: _Loaded) -> Iterator[tuple[PlannedRun, list[Run]]]:
    """Group runs that differ only by seed, fold and held-out site, each group with its first plan."""
    groups: dict[tuple[str, str], list[tuple[PlannedRun, Run]]] = {}
    for planned, run in loaded:
        groups.setdefault((planned.methods, planned.variant), []).append((planned, run))
    for members in groups.values():
        yield members[0][0], [run for _, run in members]


def _published(loaded: _Loaded, preset: Preset) -> TextTable:
    """Return our scores and published ones, one row per combination that a paper has too."""
    rows: list[tuple[str, Row, Published]] = [
        (
            f"{run.methods} ({run.variant})" if run.variant else run.methods,
            summary_table(runs).rows[0],
            published,
        )
        for run, runs in _groups(loaded)
        for published in _of_run(run, preset)
    ]
    sites = [*dict.fromkeys(site for _, ours, theirs in rows if theirs.sites for site in ours.sites)]
    body, records = [], []
    for label, ours, published in rows:
        pairs = {site: (ours.sites.get(site, Score()), published.sites.get(site)) for site in sites}
        # Some sites may not have been left out yet.
        whole = not published.sites or published.sites.keys() <= ours.sites.keys()
        mean, theirs = ours.mean if whole else Score(), published.mean
        difference = "–" if mean.mean is None or theirs is None else f"{mean.mean - theirs.score:+.3f}"
        pairs["mean"] = (mean, theirs)
        body.append(
            [label, ours.model, *(_pair(*pair) for pair in pairs.values()), difference, published.source]
        )
        record: dict[str, Any] = {"method": label, "model": ours.model}
        for name, (score, printed) in pairs.items():
            record |= {name: score.mean, f"{name}_std": score.std}
            record[f"{name}_published"] = printed.score if printed else None
            record[f"{name}_published_std"] = printed.spread if printed else None
        records.append({**record, "published_in": published.source})
    notes = dict.fromkeys(f"{p.source}, {p.row}: {p.note}." for _, _, p in rows if p.note)
    header = ["method", MODEL, *sites, "mean", "difference", "published in"]
    return TextTable(header, body, records, ("Ours / published.", *notes))


def _of_run(run: PlannedRun, preset: Preset) -> Iterator[Published]:
    for published in published_rows(preset):
        same = published.variant == run.variant and published.held_out == bool(run.held_out)
        # Folds test other patients than the papers' split.
        if same and not run.folds and _combination(published.methods) == _combination(run.methods):
            yield published


def _combination(methods: str) -> frozenset[str]:
    """Return the methods of a combination in any order; FedAvg counts only on its own."""
    parts = {str(sorted(spec.items())) for spec in parse_methods(methods)}
    plain = {str(sorted(spec.items())) for spec in parse_methods("fedavg")}
    return frozenset(parts - plain or parts)
