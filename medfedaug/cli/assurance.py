"""The commands `calibrate`, what a model may promise, and `monitor`, whether it still holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from medfedaug.cli.archive import Channels, DicomWeb, Dimse, Source, Studies
from medfedaug.cli.console import CaseProgress, Table, exit_if, out_console, say
from medfedaug.cli.options import Given, JsonFile, SiteOrSites, State, existing_file, existing_run, takes
from medfedaug.errors import ConfigError
from medfedaug.hospital.assurance.options import CalibrationOptions
from medfedaug.hospital.pacs.archive import Access
from medfedaug.hospital.pacs.settings import StudyOptions
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.utils.prometheus import write_metrics

if TYPE_CHECKING:
    from medfedaug.hospital.assurance.monitoring import Monitor


@takes(CalibrationOptions)
def calibrate(
    run: Annotated[Path, Argument(metavar="RUN", callback=existing_run, help="A run, or its model.")],
    data: SiteOrSites,
    *,
    given: Given,
    statistics: Annotated[
        Path | None, Option(callback=existing_file, help="Statistics of a site that took no part in the run.")
    ] = None,
    out: Annotated[Path | None, Option(help="File to write, by default calibration.json of the run.")] = None,
    json_file: JsonFile = None,
    state: State = None,
) -> None:
    """Find, on a site's own cases, the threshold at which a structure's map misses no more than promised.

    The file stays at the site, where `medfedaug predict` applies it. A folder of several sites is calibrated
    site by site.
    """
    options = CalibrationOptions(**given[CalibrationOptions])
    from medfedaug.hospital.assurance.calibrate import calibrate as calibrated
    from medfedaug.hospital.assurance.calibration import CALIBRATION, sentence
    from medfedaug.runs.finished_run import FinishedRun
    from medfedaug.runs.folder import check_replaces
    from medfedaug.utils.files import write_json

    opened = FinishedRun.open(run, state=state)
    target = out or opened.model.parent / CALIBRATION
    check_replaces(target, "a calibration", "format", "model", "sites")
    with CaseProgress("calibrating") as progress:
        content = calibrated(opened, data, options, statistics=statistics, on_event=progress.show)
    _print(content)
    for site, entry in content["sites"].items():
        for name, structure in entry["structures"].items():
            promised = "threshold" in structure
            text = sentence(content, site, name) if promised else f"no promise: {structure['reason']}"
            say(f"{site}: {name}: {text}", None if promised else "yellow")
    write_json(target, content, private=True)
    if json_file is not None:
        write_json(json_file, content)
    say(f"{target}: stays at the site; medfedaug predict applies it")


def _print(content: Mapping[str, Any]) -> None:
    for name in next(iter(content["sites"].values()))["structures"]:
        pooled = content.get("pooled", {}).get(name, {}).get("loss", {})
        units = {entry["structures"][name].get("unit") for entry in content["sites"].values()} - {None}
        heads = ["site", "patients", "threshold", "missed", "by the plain map", f"extra {', '.join(units)}"]
        table = Table(*heads, *(["missed if pooled"] if pooled else []), title=name)
        for site, entry in content["sites"].items():
            one = entry["structures"][name]
            cells = [site, str(one["patients"])] + ["–"] * 4
            if "loss" in one:
                middle, low, high = one["extra"]
                cells[2] = f"{one['threshold']:.3g}" if "threshold" in one else "–"
                cells[3:5] = [f"{100 * one[key]:.1f}%" for key in ("loss", "plain_loss")]
                cells[5] = f"{middle:+.4g} ({low:+.4g} to {high:+.4g})"
            table.add_row(
                *cells, *([f"{100 * pooled[site]:.1f}%" if site in pooled else "–"] if pooled else [])
            )
        out_console.print(table)


_RATES = {"case": 10.0, "drift": 1.0}
_ALARM = 3  # exit code
_MOST_ROWS = 20  # the page has the others
_OF_PREDICT = ("probabilities", "previews", "rtstruct", "report", "overwrite", "store")


def _rate(rule: str, default: float) -> Any:
    text = f"With --accept: false alarms per thousand cases, {rule}. By default {default:g}."
    return Option(min=0.001, max=500, metavar="X", help=text)


@takes(PredictionOptions, StudyOptions, Access, without=_OF_PREDICT)
def monitor(
    run: Annotated[Path, Argument(metavar="RUN", callback=existing_run, help="A run, or its model.")],
    out: Annotated[Path, Option(help="Folder for reference, course and page; the same one in each call.")],
    *,
    given: Given,
    data: Annotated[
        Path | None, Option(help="Image, folder, DICOM series, or dataset.json; no labels.")
    ] = None,
    accept: Annotated[bool, Option("--accept", help="Make the reference of these accepted images.")] = False,
    reference: Annotated[
        Path | None, Option(metavar="FILE", help="Reference and course. By default OUT/monitor.json.")
    ] = None,
    case_rate: Annotated[float | None, _rate("by case", _RATES["case"])] = None,
    drift_rate: Annotated[float | None, _rate("over time", _RATES["drift"])] = None,
    metrics: Annotated[Path | None, Option(metavar="FILE", help="NAME.prom for node_exporter.")] = None,
    json_: JsonFile = None,
    studies: Studies = None,
    channel: Channels = None,
    dicomweb: DicomWeb = None,
    dimse: Dimse = None,
    state: State = None,
) -> None:
    """Check whether new images still look like those for which a model was accepted.

    Make the reference with --accept, then give new images each month. The exit code is 3 for an alarm, 1 if a
    case cannot be compared, otherwise 0.
    """
    source = Source(given, "--data", data, studies, channel, dicomweb, dimse)
    file = reference or out / "monitor.json"
    if accept and file.exists():
        raise ConfigError(f"{file} exists: remove it to accept other cases, or name another file")
    if not accept and (case_rate or drift_rate):
        raise ConfigError("--case-rate and --drift-rate are chosen with --accept, before the first new case")
    from medfedaug.analysis.page import check_page
    from medfedaug.hospital.assurance.monitor_page import PAGE, conclusions, write_monitor_page
    from medfedaug.hospital.assurance.monitoring import Monitor, fixed_inputs
    from medfedaug.runs.finished_run import FinishedRun

    check_page(out / PAGE)
    opened, options = FinishedRun.open(run, state=state), PredictionOptions(**given[PredictionOptions])
    inputs = fixed_inputs(opened, options)
    rates = {"case": case_rate or _RATES["case"], "drift": drift_rate or _RATES["drift"]}
    watched = Monitor(inputs, rates) if accept else Monitor.read(file, inputs)
    cases, problems = source.predict(opened, out / "predicted", options)
    if data is not None:
        cases = _of_this_call(cases, opened, data, out, options)
    if not (accept and problems):
        problems |= watched.accept(cases) if accept else watched.add(cases)
    for name, error in sorted(problems.items()):
        say(f"failed: {name}: {error}", "red", err=True)
    if accept and problems:
        raise ConfigError("nothing is accepted: correct or remove the failed cases, and call again")
    watched.write(file)
    page = write_monitor_page(out, watched, cases)
    say(f"{page}, {file}")
    for text in conclusions(watched):
        say(text)
    _finish(watched, problems, json_, metrics)


def _finish(watched: Monitor, problems: dict[str, str], json_: Path | None, metrics: Path | None) -> None:
    """Print the cases that stand out, write the files, and set the exit code."""
    from medfedaug.hospital.assurance.monitor_page import conclusions
    from medfedaug.utils.files import write_json

    outside = watched.outside(watched.shown)
    table = Table("case", "p", "what differs most")
    for case in outside[:_MOST_ROWS]:
        table.add_row(case.name, f"{case.p:.3g}", watched.differences(case))
    if outside:
        out_console.print(table)
    if json_ is not None:
        rows = {case.name: {**asdict(case), "stands_out": case in outside} for case in watched.shown}
        drift = watched.drift and asdict(watched.drift)
        content = {"conclusions": conclusions(watched), "drift": drift, "cases": rows, "failed": problems}
        write_json(json_, content)
    if metrics is not None:
        _write_metrics(metrics, watched)
    exit_if(outside or watched.drift, _ALARM)
    exit_if(problems)


def _of_this_call(
    cases: dict[str, Any], run: Any, data: Path, out: Path, options: PredictionOptions
) -> dict[str, Any]:
    """Return the cases of a folder: the record of predictions keeps those of earlier calls."""
    from medfedaug.data.unlabelled import open_given

    listed = open_given(data, run.config, options.site or "", leave_out=out, series=options.series)
    return {case.name: cases[case.name] for case in listed.folder.cases["test"] if case.name in cases}


def _write_metrics(file: Path, watched: Monitor) -> None:
    evidence = max(watched.shares.values())
    metrics: dict[str, tuple[float, str]] = {
        "monitor_cases_total": (len(watched.cases), "Cases since the reference."),
        "monitor_cases_outside_total": (len(watched.outside(watched.cases)), "Cases that stand out."),
        "monitor_drift_evidence": (evidence, "Evidence for a drift after the last case; 1 is an alarm."),
        "monitor_drift": (watched.drift is not None, "1 since the rule over time gave an alarm."),
        "monitor_written_timestamp_seconds": (time.time(), "Time of writing of these numbers."),
    }
    labels = {"site": watched.inputs["site"]}
    texts = {name: text for name, (_, text) in metrics.items()}
    write_metrics(file, texts, [(name, value, labels) for name, (value, _) in metrics.items()])
