"""The command `predict` of a copy with archives: a finished model on new images, also of a PACS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from medfedaug.cli.archive_options import DicomWeb, Dimse, archive_access, archive_option
from medfedaug.cli.console import say
from medfedaug.cli.options import Config, Given, State, existing_file, named_pairs, takes
from medfedaug.cli.predict import Images, Model, Out, finish, open_run, predict_files
from medfedaug.cli.progress import CaseProgress, resumable
from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import Access, require_pacs
from medfedaug.hospital.pacs.settings import StudyOptions
from medfedaug.runs.prediction.options import PredictionOptions

if TYPE_CHECKING:
    from medfedaug.hospital.pacs.predict_studies import StudyPredictions


@takes(PredictionOptions, StudyOptions, Access)
def predict(
    model: Model,
    out: Out,
    *,
    given: Given,
    config: Config = None,
    images: Images = None,
    studies: Annotated[
        Path | None,
        archive_option(help="CSV with a column StudyInstanceUID, AccessionNumber or PatientID."),
    ] = None,
    channel: Annotated[
        list[str] | None,
        archive_option(metavar="NAME=REGEX|UID", help="A channel's series, instead of --series; repeatable."),
    ] = None,
    calibration: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            callback=existing_file,
            help="File of medfedaug calibrate, by default calibration.json of the run, if any.",
        ),
    ] = None,
    dicomweb: DicomWeb = None,
    dimse: Dimse = None,
    state: State = None,
) -> None:
    """Predict new images with a finished model: label maps, or classes, of images without labels.

    The same command continues, also with more images. If an image cannot be predicted, the others are; the
    exit code is then 1. From an archive and back: medfedaug predict --model runs/fedrdn --dicomweb URL
    --studies studies.csv --store --out predicted
    """
    in_archive = bool(dicomweb or dimse)
    if (images is None) != in_archive or (studies is None) == in_archive:
        raise ConfigError(
            "give --images PATH, or --studies FILE with --dicomweb URL or --dimse AET@HOST:PORT"
        )
    if channel:
        given[StudyOptions]["channels"] = named_pairs("--channel", "'FLAIR=.*flair.*'", channel, first=True)
    of_studies = StudyOptions(**given[StudyOptions])
    for option, value in (
        ("--channel", of_studies.channels),
        ("--volume", of_studies.volume),
        ("--store", of_studies.store),
    ):
        if value and not in_archive:
            raise ConfigError(f"{option} needs an archive: --dicomweb URL or --dimse AET@HOST:PORT")
    run, options = open_run(model, out, state), PredictionOptions(**given[PredictionOptions])
    from medfedaug.hospital.assurance.calibration import find_promise
    from medfedaug.runs.finished_run import Origin

    promise = find_promise(run, calibration, Origin.of(run, options.site, options.statistics))
    for name, text in (promise.sentences if promise else {}).items():
        say(f"promise, {name}: {text}")
    if images is not None:
        finish(run, out, options, *predict_files(run, images, out, options, promise))
        return
    assert studies is not None
    require_pacs("shapely", "highdicom")
    from medfedaug.hospital.pacs.archive import read_studies
    from medfedaug.hospital.pacs.open_archive import open_archive
    from medfedaug.hospital.pacs.predict_studies import predict_studies

    wanted, access = read_studies(studies), archive_access(given)
    with (
        CaseProgress("predicting") as progress,
        resumable(),
        open_archive(dicomweb=dicomweb, dimse=dimse, access=access) as source,
    ):
        result = predict_studies(
            run, source, wanted, out, options, of_studies, on_event=progress.show, promise=promise
        )
    _print_stored(result, out)
    finish(run, out, options, result.cases, result.problems)


def _print_stored(result: StudyPredictions, out: Path) -> None:
    for case, kinds in sorted(result.existing.items()):
        if case not in result.stored:
            say(f"already there: {case}: {', '.join(kinds)}")
    objects = sum(map(len, result.stored.values()))
    if result.stored:
        say(f"stored {objects} objects of {len(result.stored)} studies")
    say(f"who is who: {out.with_name(f'{out.name}.state')}")
