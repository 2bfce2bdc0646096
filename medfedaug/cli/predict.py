"""The command `predict`: a finished model on new images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from medfedaug.cli.archive_options import PANEL, ArchiveOptions, takes_archive
from medfedaug.cli.console import Table, out_console, say
from medfedaug.cli.options import Device, State, existing_run, named_pairs
from medfedaug.cli.progress import CaseProgress, resumable
from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    from medfedaug.runs.model_score import ModelScore
    from medfedaug.runs.prediction.ensemble import Ensemble
    from medfedaug.runs.prediction.studies import StudyPredictions

__all__ = ["predict"]

_MOST_ROWS = 20


@takes_archive
def predict(
    archive: ArchiveOptions,
    model: Annotated[
        list[Path],
        typer.Option(
            callback=lambda paths: [existing_run(path) for path in paths],
            help="The folder of a run, or its global_model.pt. Repeatable: the probabilities of several runs "
            "with the same settings are averaged. A folder of runs, as `benchmark --folds` makes it, stands "
            "for all of them.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to write to: a label map for each image on its own grid (NIfTI, MHA, NRRD in their "
            "own format, PNG of photographs, DICOM SEG of a DICOM series), pictures, and predictions.json."
        ),
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            help="An image; a folder of images or DICOM series, at any depth and with files of any name; one "
            "DICOM file, for the series that it is of, or a DICOMDIR; or a folder with a dataset.json, whose "
            "test cases are taken. No labels are needed."
        ),
    ] = None,
    studies: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Studies of the archive, in place of --images: a CSV with a column StudyInstanceUID, "
            "AccessionNumber or PatientID.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    store: Annotated[
        bool,
        typer.Option(
            "--store",
            help="Store DICOM SEG, contours and report in the archive. It is asked first: a study that has "
            "the objects of this model already gets no others.",
            rich_help_panel=PANEL,
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Store other objects where the archive has this model's already.",
            rich_help_panel=PANEL,
        ),
    ] = False,
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
    channel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REGEX|UID",
            help="In place of --series, a channel of the model and the series of each study that it is, "
            "'FLAIR=.*flair.*'; once for each channel. The objects refer to the first one, to whose grid the "
            "others are brought.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    pseudonyms: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder with the site's key of pseudonyms, such as data/site_A.state of an import: studies "
            "have the same names there and here, and patients who are withdrawn there are left out. By "
            "default that of --data, or else OUT.state.",
            rich_help_panel=PANEL,
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
    rtstruct: Annotated[
        bool, typer.Option("--rtstruct", help="Write an RTSTRUCT of each DICOM series, too: contours.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Write a DICOM structured report of each DICOM series, too: the volume of each class.",
        ),
    ] = False,
    flips: Annotated[
        bool,
        typer.Option(
            "--flips",
            help="Predict each image flipped, too (test-time augmentation): the agreement of all passes "
            "tells which cases are uncertain. The label map stays that of the image as it is. In 2D four "
            "passes in place of one, in 3D eight.",
        ),
    ] = False,
    uncertainty_map: Annotated[
        bool,
        typer.Option(
            "--uncertainty-map",
            help="Write a NIfTI to the folder uncertainty for each image: the standard deviation of the "
            "probabilities over the passes, 0 to 0.5. Needs --flips or several models.",
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The site's own data folder. Sizes are compared with those of its training label maps, and "
            "nothing of it leaves the site.",
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
    Example: medfedaug predict --model runs/fedrdn --images new --out predicted --site site_A.
    From an archive, and back: medfedaug predict --model runs/fedrdn --dicomweb
    https://pacs.example.org/dicom-web --studies studies.csv --store --out predicted
    """
    from medfedaug.analysis.page import check_page
    from medfedaug.analysis.predictions_page import PAGE, write_predictions_page
    from medfedaug.data.io.dicom_identity import ObjectKind
    from medfedaug.runs.prediction.ensemble import Ensemble
    from medfedaug.runs.prediction.predict import predict_images

    if (images is None) == (not archive.given):
        raise ConfigError("give one of --images PATH, --dicomweb URL and --dimse AET@HOST:PORT")
    if archive.given != (studies is not None):
        raise ConfigError("give --studies FILE together with --dicomweb URL or --dimse AET@HOST:PORT")
    for option, given in (("--channel", channel), ("--pseudonyms", pseudonyms)):
        if given and not archive.given:
            raise ConfigError(f"{option} goes with an archive: --dicomweb URL or --dimse AET@HOST:PORT")
    if store and not archive.given:
        raise ConfigError("--store needs an archive: --dicomweb URL or --dimse AET@HOST:PORT, with --studies")
    check_page(out / PAGE)
    models = Ensemble.open(model, state=state)
    settings = models.first.config
    options: dict[str, Any] = {
        "site": site,
        "statistics": statistics,
        "device": device,
        "probabilities": probabilities,
        "previews": previews,
        "codes": codes,
        "objects": [
            *([ObjectKind.RTSTRUCT] if rtstruct else []),
            *([ObjectKind.REPORT] if report else []),
        ],
        "flips": flips,
        "uncertainty_map": uncertainty_map,
        "data": data,
        "overwrite": overwrite,
    }
    with CaseProgress() as progress:
        if studies is not None:
            options |= {
                "series": series,
                "channels": named_pairs("--channel", "'FLAIR=.*flair.*'", channel, first=True),
                "pseudonyms": pseudonyms or key_folder(data),
                "store": store,
                "again": again,
            }
            found = _predict_studies(models, archive, studies, out, options, progress)
            cases, failed = found.cases, found.problems
        else:
            assert images is not None
            predicted = predict_images(models, images, out, series=series, on_event=progress.show, **options)
            cases = predicted.cases
            failed = {name: entry["error"] for name, entry in predicted.failed.items()}
    page = write_predictions_page(out)
    _print(cases, settings.task, settings.classes[1:], out, models.score(site or ""))
    if page is not None:
        say(f"page: {page}")
    if studies is not None:
        _print_stored(found, out)
    for name, error in sorted(failed.items()):
        say(f"failed: {name}: {error}", "red", err=True)
    if failed:
        raise typer.Exit(1)


def _predict_studies(
    models: Ensemble,
    archive: ArchiveOptions,
    studies: Path,
    out: Path,
    options: Mapping[str, Any],
    progress: CaseProgress,
) -> StudyPredictions:
    from medfedaug.data.pacs.archive import require_pacs
    from medfedaug.data.pacs.studies_file import read_studies

    require_pacs("shapely", "highdicom")
    from medfedaug.runs.prediction.studies import predict_studies

    wanted = read_studies(studies)
    with resumable(), archive.open() as source:
        return predict_studies(
            models,
            source,
            wanted,
            out,
            parallel=archive.parallel,
            on_event=progress.show,
            **options,
        )


def key_folder(data: Path | None) -> Path | None:
    """The folder of a site's key beside its data, where `import` made one."""
    from medfedaug.privacy.pseudonyms import PSEUDONYM_KEY

    folder = None if data is None else data.with_name(f"{data.name}.state")
    return folder if folder is not None and (folder / PSEUDONYM_KEY).is_file() else None


def _print_stored(found: StudyPredictions, out: Path) -> None:
    for case, kinds in sorted(found.there.items()):
        if case not in found.stored:
            say(f"already there: {case}: {', '.join(kinds)}")
    objects = sum(map(len, found.stored.values()))
    if found.stored:
        say(f"stored {objects} objects of {len(found.stored)} studies")
    say(f"who is who: {out.with_name(f'{out.name}.state')}")


def _print(cases: dict[str, Any], task: str, classes: Sequence[str], out: Path, test: ModelScore) -> None:
    from medfedaug.runs.prediction.case_quality import look_first

    dense = task == "segmentation"
    ranked = dense and not test.warning
    millimetres = all("volume_ml" in entry for entry in cases.values())
    unit = "ml" if millimetres else "pixels"
    measures = ["agreement"] if any("agreement" in entry for entry in cases.values()) else []
    table = Table(
        "case",
        *(*(f"{name} ({unit})" for name in classes), *measures) if dense else ("class", "probability"),
        "unlike",
    )
    order = dict.fromkeys([*(look_first(cases) if ranked else ()), *sorted(cases)])
    for name in [*order][:_MOST_ROWS]:
        entry = cases[name]
        if dense:
            found = entry["volume_ml"] if millimetres else entry["voxels"]
            cells = [f"{found[name]:.2f}" if millimetres else str(found[name]) for name in classes]
            cells += [f"{min(entry[name].values()):.3f}" if entry.get(name) else "" for name in measures]
        else:
            cells = [entry["class"], f"{entry['probabilities'][entry['class']]:.3f}"]
        table.add_row(Text(name), *map(Text, cells), "yes" if entry["warnings"] else "")
    if cases:
        out_console.print(table)
    if len(cases) > _MOST_ROWS:
        say(f"and {len(cases) - _MOST_ROWS} more in {out}/predictions.json")
    if len(cases) > 1 and ranked:
        say("look at the first ones first: the model is least sure of them")
    say(f"the model: {test.score}")
    if test.warning:
        say(f"do not rely on these predictions: {test.warning}", "yellow", err=True)
    say(f"{len(cases)} case{'s' if len(cases) != 1 else ''} in {out}")
