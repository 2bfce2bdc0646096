"""The command `predict`: a finished model on new images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from medfedaug.cli.archive_options import DicomWeb, Dimse, TokenFile, archive_access
from medfedaug.cli.console import Table, out_console, say
from medfedaug.cli.options import Config, Given, State, existing_run, named_pairs, takes
from medfedaug.cli.progress import CaseProgress, resumable
from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import Access, require_pacs
from medfedaug.runs.prediction.options import PredictionOptions, StudyOptions
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.hospital.pacs.predict_studies import StudyPredictions
    from medfedaug.runs.model_score import ModelScore

_MOST_ROWS = 20


@takes(PredictionOptions, StudyOptions, Access)
def predict(
    model: Annotated[
        list[Path],
        typer.Option(
            callback=lambda paths: [existing_run(path) for path in paths],
            help="Run, model or folder of runs; repeatable: several are averaged.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for label maps, DICOM SEG and pictures.")],
    *,
    given: Given,
    config: Config = None,
    images: Annotated[
        Path | None, typer.Option(help="Image, folder, DICOM series, or dataset.json; no labels.")
    ] = None,
    studies: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="CSV with a column StudyInstanceUID, AccessionNumber or PatientID.",
            rich_help_panel=Access.PANEL,
        ),
    ] = None,
    channel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REGEX|UID",
            help="A channel's series, instead of --series; repeatable.",
            rich_help_panel=Access.PANEL,
        ),
    ] = None,
    dicomweb: DicomWeb = None,
    dimse: Dimse = None,
    token_file: TokenFile = None,
    state: State = None,
) -> None:
    """Predict new images with a finished model: label maps, or classes, of images without labels.

    The same command continues, also with more images. If an image cannot be predicted, the others are; the
    exit code is then 1. From an archive and back: medfedaug predict --model runs/fedrdn --dicomweb URL
    --studies studies.csv --store --out predicted
    """
    from medfedaug.analysis.page import check_page
    from medfedaug.analysis.predictions_page import PAGE, write_predictions_page
    from medfedaug.runs.prediction.ensemble import Ensemble
    from medfedaug.runs.prediction.predict import predict_images

    in_archive = bool(dicomweb or dimse)
    if (images is None) != in_archive:
        raise ConfigError("give one of --images PATH, --dicomweb URL and --dimse AET@HOST:PORT")
    if in_archive != (studies is not None):
        raise ConfigError("give --studies FILE together with --dicomweb URL or --dimse AET@HOST:PORT")
    if channel:
        given[StudyOptions]["channels"] = named_pairs("--channel", "'FLAIR=.*flair.*'", channel, first=True)
    of_studies = StudyOptions(**given[StudyOptions])
    for option, value in (("--channel", of_studies.channels), ("--pseudonyms", of_studies.pseudonyms)):
        if value and not in_archive:
            raise ConfigError(f"{option} goes with an archive: --dicomweb URL or --dimse AET@HOST:PORT")
    if of_studies.store and not in_archive:
        raise ConfigError("--store needs an archive: --dicomweb URL or --dimse AET@HOST:PORT, with --studies")
    check_page(out / PAGE)
    models = Ensemble.open(model, state=state)
    settings = models.first.config
    options = PredictionOptions(**given[PredictionOptions])
    with CaseProgress() as progress:
        if studies is not None:
            require_pacs("shapely", "highdicom")
            from medfedaug.hospital.pacs.open_archive import open_archive
            from medfedaug.hospital.pacs.predict_studies import predict_studies
            from medfedaug.hospital.pacs.studies_file import read_studies

            of_studies = replace(of_studies, pseudonyms=of_studies.pseudonyms or key_folder(options.data))
            wanted, access = read_studies(studies), archive_access(given, token_file)
            with resumable(), open_archive(dicomweb=dicomweb, dimse=dimse, access=access) as source:
                result = predict_studies(
                    models, source, wanted, out, options, of_studies, on_event=progress.show
                )
            cases, failed = result.cases, result.problems
        else:
            assert images is not None
            predicted = predict_images(models, images, out, options, on_event=progress.show)
            cases = predicted.cases
            failed = {name: entry["error"] for name, entry in predicted.failed.items()}
    page = write_predictions_page(out)
    _print(cases, settings.task, settings.classes[1:], out, models.score(options.site or ""))
    if page is not None:
        say(f"page: {page}")
    if studies is not None:
        _print_stored(result, out)
    for name, error in sorted(failed.items()):
        say(f"failed: {name}: {error}", "red", err=True)
    if failed:
        raise typer.Exit(1)


def key_folder(data: Path | None) -> Path | None:
    """Return the folder of a site's key next to its data, if `import` made one."""
    from medfedaug.hospital.privacy.pseudonyms import PSEUDONYM_KEY

    folder = None if data is None else data.with_name(f"{data.name}.state")
    return folder if folder is not None and (folder / PSEUDONYM_KEY).is_file() else None


def _print_stored(result: StudyPredictions, out: Path) -> None:
    for case, kinds in sorted(result.existing.items()):
        if case not in result.stored:
            say(f"already there: {case}: {', '.join(kinds)}")
    objects = sum(map(len, result.stored.values()))
    if result.stored:
        say(f"stored {objects} objects of {len(result.stored)} studies")
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
            sizes = entry["volume_ml"] if millimetres else entry["voxels"]
            cells = [f"{sizes[name]:.2f}" if millimetres else str(sizes[name]) for name in classes]
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
    say(f"{counted(len(cases), 'case')} in {out}")
