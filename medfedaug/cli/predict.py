"""The command `predict`: a finished model on new images in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer import Option

from medfedaug.cli.console import Table, out_console, say
from medfedaug.cli.options import Config, Given, State, existing_run, takes
from medfedaug.cli.progress import CaseProgress
from medfedaug.errors import ConfigError
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.runs.finished_run import FinishedRun
    from medfedaug.runs.model_score import ModelScore
    from medfedaug.runs.prediction.promise import Promise

_MOST_ROWS = 20

Model = Annotated[Path, Option(callback=existing_run, help="Folder of a run, or its model.")]
Out = Annotated[Path, Option(help="Folder for label maps, DICOM SEG and pictures.")]
Images = Annotated[Path | None, Option(help="Image, folder, DICOM series, or dataset.json; no labels.")]


@takes(PredictionOptions)
def predict(
    model: Model,
    out: Out,
    *,
    given: Given,
    config: Config = None,
    images: Images = None,
    state: State = None,
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
    if failed:
        raise typer.Exit(1)


def _print(cases: dict[str, Any], task: str, classes: Sequence[str], out: Path, test: ModelScore) -> None:
    from medfedaug.runs.prediction.predictions_file import look_first

    dense = task == "segmentation"
    ranked = dense and not test.warning
    millimetres = all("volume_ml" in entry for entry in cases.values())
    unit = "ml" if millimetres else "pixels"
    table = Table(
        "case",
        *(f"{name} ({unit})" for name in classes) if dense else ("class", "probability"),
        "unlike",
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
