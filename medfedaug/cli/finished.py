"""Commands for finished runs: `predict`, `evaluate`, `report`, `bundle` and `clean`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Option

from medfedaug.cli.app import has_layer
from medfedaug.cli.console import CaseProgress, Table, err_console, exit_if, out_console, print_scores, say
from medfedaug.cli.options import (
    Config,
    Device,
    Given,
    Limit,
    SiteNames,
    SiteOrSites,
    State,
    existing_file,
    existing_run,
    takes,
)
from medfedaug.errors import ConfigError
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.utils.plugins import added_module
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.analysis.text_table import TextTable
    from medfedaug.runs.finished_run import FinishedRun
    from medfedaug.runs.model_score import ModelScore
    from medfedaug.runs.prediction.predictions_file import Promise
    from medfedaug.runs.run import Run


_MOST_ROWS = 20

Calibration = Annotated[
    Path | None,
    Option(metavar="FILE", callback=existing_file, help="Calibration whose promises to state by site."),
]
Model = Annotated[Path, Option(callback=existing_run, help="Folder of a run, or its model.")]
Out = Annotated[Path, Option(help="Folder for label maps, DICOM SEG and pictures.")]
Images = Annotated[Path | None, Option(help="Image, folder, DICOM series, or dataset.json; no labels.")]


@takes(PredictionOptions)
def predict(
    model: Model, out: Out, *, given: Given, config: Config = None, images: Images = None, state: State = None
) -> None:
    """Predict new images with a finished model: label maps, or classes, of images without labels.

    The same command continues, also with more images. If an image cannot be predicted, the others are; the
    exit code is then 1.
    """
    if images is None:
        raise ConfigError("--images is missing: name an image, a folder or a dataset.json")
    run, options = open_run(model, out, state), PredictionOptions(**given[PredictionOptions])
    finish(run, out, options, *predict_files(run, images, out, options))


def open_run(model: Path, out: Path, state: Path | None) -> FinishedRun:
    """Open the run, after a check that the page can be written."""
    from medfedaug.analysis.page import check_page
    from medfedaug.analysis.predictions_page import PAGE
    from medfedaug.runs.finished_run import FinishedRun

    check_page(out / PAGE)
    return FinishedRun.open(model, state=state)


def predict_files(
    run: FinishedRun, images: Path, out: Path, options: PredictionOptions, promise: Promise | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Predict images in files, and return the cases and the errors of others by name."""
    from medfedaug.runs.prediction.predict import predict_images

    with CaseProgress("predicting") as progress:
        predicted = predict_images(run, images, out, options, on_event=progress.show, promise=promise)
    return predicted.cases, {name: entry["error"] for name, entry in predicted.failed.items()}


def finish(
    run: FinishedRun, out: Path, options: PredictionOptions, cases: dict[str, Any], failed: Mapping[str, str]
) -> None:
    """Write the page, and print cases and errors."""
    from medfedaug.analysis.predictions_page import write_predictions_page
    from medfedaug.runs.model_score import ModelScore

    page, settings = write_predictions_page(out), run.config
    score = ModelScore.of(run.record, options.site or "")
    _print(cases, settings.task, settings.classes[1:], out, score)
    if page is not None:
        say(f"page: {page}")
    for name, error in sorted(failed.items()):
        say(f"failed: {name}: {error}", "red", err=True)
    exit_if(failed)


def _print(cases: dict[str, Any], task: str, classes: Sequence[str], out: Path, test: ModelScore) -> None:
    from medfedaug.runs.prediction.predictions_file import look_first

    dense = task == "segmentation"
    ranked = dense and not test.warning
    millimetres = all("volume_ml" in entry for entry in cases.values())
    unit = "ml" if millimetres else "pixels"
    table = Table(
        "case", *(f"{name} ({unit})" for name in classes) if dense else ("class", "probability"), "unlike"
    )
    order = dict.fromkeys([*(look_first(cases) if ranked else ()), *sorted(cases)])
    for name in [*order][:_MOST_ROWS]:
        entry = cases[name]
        if dense:
            sizes = entry["volume_ml"] if millimetres else entry["voxels"]
            cells = [f"{sizes[name]:.2f}" if millimetres else str(sizes[name]) for name in classes]
        else:
            cells = [entry["class"], f"{entry['probabilities'][entry['class']]:.3f}"]
        table.add_row(Text(name), *map(Text, cells), "yes" if entry["warnings"] else "")
    if cases:
        out_console.print(table)
    if len(cases) > _MOST_ROWS:
        say(f"and {len(cases) - _MOST_ROWS} more in {out}/predictions.json")
    if len(cases) > 1 and ranked:
        say("check the first cases first: the model is least sure there")
    say(f"the model: {test.score}")
    if test.warning:
        say(f"do not rely on these predictions: {test.warning}", "yellow", err=True)
    say(f"{counted(len(cases), 'case')} in {out}")


class Split(str, Enum):
    """Cases that are scored."""

    test = "test"
    validation = "validation"


def evaluate(
    model: Annotated[Path, Option(callback=existing_run, help="Folder of a run, or its model.")],
    data: SiteOrSites,
    split: Annotated[Split, Option(help="Cases to score.")] = Split.test,
    out: Annotated[Path | None, Option(help="JSON file to write, with the score of each case.")] = None,
    limit: Limit = None,
    device: Device = "auto",
    state: State = None,
    local: Annotated[Path | None, Option(metavar="RUN", help="Run of the sites' own models.")] = None,
) -> None:
    """Score a trained model on the images of one site or of several, or compare it with local models."""
    from medfedaug.runs.evaluate import evaluate_model
    from medfedaug.runs.folder import check_replaces
    from medfedaug.utils.files import write_json

    if out is not None:
        check_replaces(out, "an evaluation", "sites")
    if local is not None:
        if split is not Split.test or limit is not None:
            raise ConfigError("--local tests all test cases: leave out --split and --limit")
        _compare(out, model, data, local=local, device=device, state=state)
        return
    with err_console.status("evaluating"):
        scores = evaluate_model(model, data, split=split.value, limit=limit, device=device, state=state)
    print_scores(scores, split.value, scores["scored"])
    if out is not None:
        write_json(out, scores)


def _compare(out: Path | None, model: Path, data: Path, **options: Any) -> None:
    from medfedaug.research.comparison.local_vs_global import worth_table
    from medfedaug.runs.evaluate import evaluate_sites
    from medfedaug.utils.files import write_json

    with err_console.status("evaluating"):
        result = evaluate_sites(model, data, **options)
    print_worth(worth_table(result))
    if out is not None:
        write_json(out, result)
        say(f"{out}; for a page: medfedaug report {quote(str(out))}")


def print_worth(worth: TextTable) -> None:
    out_console.print(worth)
    for row in worth.rows:
        say(row.sentence)


def report(
    runs: Annotated[list[Path], Argument(help="Folders of runs, and files evaluation.json.")],
    out: Annotated[
        Path | None,
        Option(help="The page, by default report.html; with --card a folder, by default the run's."),
    ] = None,
    data: Annotated[Path | None, Option(help="Sites' images, for pictures of cases.")] = None,
    tables: Annotated[Path | None, Option(help="Folder for the tables as Markdown and CSV.")] = None,
    metric: Annotated[str | None, Option(help="Metric to compare, such as dice or hd95.")] = None,
    reference: Annotated[str, Option(help="Methods to compare the others with.")] = "fedavg",
    device: Device = "auto",
    card: Annotated[bool, Option("--card", help="Write the model card of one run.")] = False,
    calibration: Calibration = None,
    site_names: SiteNames = False,
) -> None:
    """Show a run or compare several on one self-contained page.

    With --card, write a run's model card: training data, scores, and known gaps of the model.
    """
    if card:
        _write_card(runs, out, calibration, site_names=site_names)
        return
    page = out or Path("report.html")
    from medfedaug.analysis import write_report
    from medfedaug.runs.load_results import find_runs, load_run
    from medfedaug.runs.run import BASELINE

    if reference != BASELINE:
        from medfedaug.methods.registry import parse_methods  # imports PyTorch

        reference = ",".join(spec["name"] for spec in parse_methods(reference))
    evaluated: list[dict[str, Any]] = []
    others = runs
    if has_layer("research"):
        from medfedaug.research.comparison.local_vs_global import find_evaluations

        evaluated, others = find_evaluations(runs)
    loaded = [load_run(run, metric) for run in find_runs(others)]
    with err_console.status("drawing"):
        write_report(loaded, page, data=data, device=device, evaluations=evaluated, reference=reference)
    saved = _print_tables(loaded, evaluated, reference)
    if tables is not None:
        for name, table in saved.items():
            table.save(tables / name)
        say(", ".join(f"{tables}/{name}.*" for name in saved))
    say(str(page))


def _write_card(
    runs: Sequence[Path], out: Path | None, calibration: Path | None, *, site_names: bool
) -> None:
    if len(runs) > 1:
        raise ConfigError("--card takes one run: name one folder")
    existing_run(runs[0])
    from medfedaug.analysis.model_card import write_model_card
    from medfedaug.runs.recorded_run import RecordedRun

    opened = RecordedRun.open(runs[0])
    promises: dict[str, str] = {}
    if calibration is not None:
        module = added_module("assurance.calibration", "--calibration")
        promises = module.sentences(module.read_calibration(calibration, opened))
    files = write_model_card(opened, out or opened.model.parent, site_names=site_names, promises=promises)
    say(", ".join(map(str, files)))


def _print_tables(
    runs: Sequence[Run], evaluations: Sequence[Mapping[str, Any]], reference: str
) -> dict[str, TextTable]:
    """Print the tables of evaluations and of runs, and return them by the names of their files."""
    from medfedaug.analysis import metric_table, summary_table

    tables: dict[str, TextTable] = {}
    for index, content in enumerate(evaluations):
        from medfedaug.research.comparison.local_vs_global import worth_table

        worth = worth_table(content)
        print_worth(worth)
        tables[f"worth_{index + 1}" if index else "worth"] = worth
    if runs:
        tables["scores"] = summary_table(runs, reference)
        if has_layer("research"):
            from medfedaug.research.comparison import patient_table

            tables["patients"] = patient_table(runs, reference)
        tables["metrics"] = metric_table(runs)
        for name, table in tables.items():
            if table.body and not name.startswith("worth"):
                out_console.print(table)
    return tables


def clean(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run, or of several runs.")],
    yes: Annotated[bool, Option("--yes", help="Free it; without this option only list.")] = False,
) -> None:
    """List what finished runs no longer need, and free it with --yes: models of the last round, leftovers.

    Results, pages, the selected model, statistics and the sites' own layers stay. A run whose last model is
    freed can no longer be the start of another one (--init). For a kit: medfedaug site clean.
    """
    from medfedaug.runs.folder import free, spare_files
    from medfedaug.runs.load_results import find_runs
    from medfedaug.utils.event_text import size_text

    runs = find_runs([run])
    spare = [(path, size) for folder in runs for path, size in spare_files(folder).items()]
    for path, size in spare:
        say(f"{'freed' if yes else 'would free'}: {path} ({size_text(size)})")
        if yes:
            free(path)
    total = f"{size_text(sum(size for _, size in spare))} of {len(runs)} run{'s' if len(runs) > 1 else ''}"
    say(f"freed: {total}" if yes else f"would free: {total}" + ("; --yes frees it" if spare else ""))


def bundle(
    run: Annotated[Path, Argument(metavar="RUN", callback=existing_run, help="A run, or its model.")],
    out: Annotated[Path, Option(help="A new or empty folder.")],
    site: Annotated[str | None, Option(help="Site whose statistics or layers are used.")] = None,
    statistics: Annotated[Path | None, Option(help="Statistics of the place of use.")] = None,
    calibration: Calibration = None,
    state: State = None,
    site_names: SiteNames = False,
) -> None:
    """Write the model as a MONAI Bundle, which runs with MONAI alone and gives the same label maps."""
    from medfedaug.analysis.model_card import write_model_card
    from medfedaug.runs.bundle.export import write_bundle
    from medfedaug.runs.finished_run import FinishedRun, Origin

    opened = FinishedRun.open(run, state=state)
    origin = Origin.of(opened, site, statistics)

    thresholds: dict[str, float] = {}
    promises: dict[str, str] = {}
    if calibration is not None:
        find = added_module("assurance.calibration", "--calibration").find_promise
        promise = find(opened, calibration, origin)
        thresholds, promises = promise.thresholds, promise.sentences

    def write_card(folder: Path) -> None:
        write_model_card(opened, folder, site_names=site_names, promises=promises)

    with err_console.status("comparing with MONAI's network"):
        write_bundle(opened, out, origin, card=write_card, thresholds=thresholds)
    config, meta = (quote(f"{out}/configs/{name}.json") for name in ("inference", "metadata"))
    call = f"python -m monai.bundle run --bundle_root {quote(str(out))} --config_file {config}"
    say(f"{out}: run it with")
    say(f"{call} --meta_file {meta} --dataset_dir IMAGES --output_dir PREDICTIONS")
