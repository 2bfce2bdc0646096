"""The command `predict`: a finished model on new images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from medfedaug.cli.console import Table, out_console, say
from medfedaug.cli.options import Device, State
from medfedaug.cli.progress import CaseProgress

__all__ = ["predict"]

_MOST_ROWS = 20


def predict(
    model: Annotated[
        list[Path],
        typer.Option(
            help="The folder of a run, or its global_model.pt. Repeatable: the probabilities of several runs "
            "with the same settings are averaged. A folder of runs, as `benchmark --folds` makes it, stands "
            "for all of them."
        ),
    ],
    images: Annotated[
        Path,
        typer.Option(
            help="An image; a folder of images or DICOM series, at any depth and with files of any name; one "
            "DICOM file, for the series that it is of, or a DICOMDIR; or a folder with a dataset.json, whose "
            "test cases are taken. No labels are needed."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write to: a label map for each image on its own grid (NIfTI, MHA, NRRD in their "
            "own format, PNG of photographs, DICOM SEG of a DICOM series), pictures, and predictions.json."
        ),
    ],
    site: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The site of the federation that the images come from: its own statistics and layers are "
            "used, where the run's methods have any. By default the images come from a place that took no "
            "part, and statistics are those of the images given.",
        ),
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Statistics to normalise with, in place of those of the images given: a JSON file of "
            "`medfedaug statistics`, or the statistics.json of an earlier prediction.",
        ),
    ] = None,
    series: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX|UID",
            help="DICOM series to predict, where a study has several: a SeriesInstanceUID, or a regular "
            "expression that is searched for in number, description, echo or phase, modality and UID of a "
            "series. The others are left out.",
        ),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Write the probabilities of the classes, too.")
    ] = False,
    previews: Annotated[
        bool, typer.Option("--previews/--no-previews", help="Write a picture of each case, or not.")
    ] = True,
    codes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Codes of the classes for DICOM SEG, such as those of SNOMED CT: a JSON file with category, "
            "type and, where wanted, anatomic_region of each class. Without it a class has its name as code.",
        ),
    ] = None,
    state: State = None,
    device: Device = "auto",
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Delete what an earlier prediction wrote to --out, and start anew."),
    ] = False,
) -> None:
    """Predict new images with a finished model: label maps, or classes, of images without labels.

    Called again, it goes on where it stopped, also with more images. An image that cannot be
    predicted does not stop the others: it is named at the end, and the exit code is 1. Files, folders
    and DICOM series that are left out are named with the reason, also in predictions.json.
    Example: medfedaug predict --model runs/fedrdn --images new --out predicted --site site_A
    """
    from medfedaug.runs.ensemble import Ensemble
    from medfedaug.runs.predict import predict_images

    models = Ensemble.open(model, state=state)
    with CaseProgress() as progress:
        found = predict_images(
            models,
            images,
            out,
            site=site,
            statistics=statistics,
            series=series,
            device=device,
            probabilities=probabilities,
            previews=previews,
            codes=codes,
            overwrite=overwrite,
            on_event=progress.show,
        )
    settings = models.first.config
    _print(found.cases, settings.task, settings.classes[1:], out)
    for name, entry in sorted(found.failed.items()):
        say(f"failed: {name}: {entry['error']}", "red", err=True)
    if found.failed:
        raise typer.Exit(1)


def _print(cases: dict[str, Any], task: str, classes: Sequence[str], out: Path) -> None:
    dense = task == "segmentation"
    millimetres = all("volume_ml" in entry for entry in cases.values())
    unit = "ml" if millimetres else "pixels"
    table = Table(
        "case", *(f"{name} ({unit})" for name in classes) if dense else ("class", "probability"), "unlike"
    )
    for name, entry in sorted(cases.items())[:_MOST_ROWS]:
        if dense:
            found = entry["volume_ml"] if millimetres else entry["voxels"]
            cells = [f"{found[name]:.2f}" if millimetres else str(found[name]) for name in classes]
        else:
            cells = [entry["class"], f"{entry['probabilities'][entry['class']]:.3f}"]
        table.add_row(Text(name), *map(Text, cells), "yes" if entry["warnings"] else "")
    if cases:
        out_console.print(table)
    if len(cases) > _MOST_ROWS:
        say(f"and {len(cases) - _MOST_ROWS} more in {out}/predictions.json")
    say(f"{len(cases)} case{'s' if len(cases) != 1 else ''} in {out}")
