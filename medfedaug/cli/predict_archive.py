"""The command `predict` of a copy with archives: a finished model on new images, also of a PACS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    from medfedaug.runs.finished_run import FinishedRun
    from medfedaug.runs.prediction.promise import Promise


Studies = Annotated[
    Path | None, archive_option(help="CSV with a column StudyInstanceUID, AccessionNumber or PatientID.")
]
Channels = Annotated[
    list[str] | None,
    archive_option(metavar="NAME=REGEX|UID", help="A channel's series, instead of --series; repeatable."),
]


@dataclass(frozen=True)
class Source:
    """Images in files, or studies in an archive, as options name them; ``option`` is that of the files."""

    given: Given
    option: str
    images: Path | None
    studies: Path | None
    channel: list[str] | None
    dicomweb: str | None
    dimse: str | None

    def __post_init__(self) -> None:
        in_archive = bool(self.dicomweb or self.dimse)
        if (self.images is None) != in_archive or (self.studies is None) == in_archive:
            raise ConfigError(
                f"give {self.option} PATH, or --studies FILE with --dicomweb URL or --dimse AET@HOST:PORT"
            )
        for option, value in (
            ("--channel", self.options.channels),
            ("--volume", self.options.volume),
            ("--store", self.options.store),
        ):
            if value and not in_archive:
                raise ConfigError(f"{option} needs an archive: --dicomweb URL or --dimse AET@HOST:PORT")

    @property
    def options(self) -> StudyOptions:
        given = dict(self.given[StudyOptions])
        if self.channel:
            given["channels"] = named_pairs("--channel", "'FLAIR=.*flair.*'", self.channel, first=True)
        return StudyOptions(**given)

    def predict(
        self, run: FinishedRun, out: Path, options: PredictionOptions, promise: Promise | None = None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Predict, and return the cases and the errors of others by name."""
        if self.images is not None:
            return predict_files(run, self.images, out, options, promise)
        assert self.studies is not None
        require_pacs("shapely", "highdicom")
        from medfedaug.hospital.pacs.archive import read_studies
        from medfedaug.hospital.pacs.open_archive import open_archive
        from medfedaug.hospital.pacs.predict_studies import predict_studies

        wanted, access = read_studies(self.studies), archive_access(self.given)
        with (
            CaseProgress("predicting") as progress,
            resumable(),
            open_archive(dicomweb=self.dicomweb, dimse=self.dimse, access=access) as source,
        ):
            result = predict_studies(
                run, source, wanted, out, options, self.options, on_event=progress.show, promise=promise
            )
        _print_stored(result, out)
        return result.cases, result.problems


@takes(PredictionOptions, StudyOptions, Access)
def predict(
    model: Model,
    out: Out,
    *,
    given: Given,
    config: Config = None,
    images: Images = None,
    studies: Studies = None,
    channel: Channels = None,
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
    source = Source(given, "--images", images, studies, channel, dicomweb, dimse)
    run, options = open_run(model, out, state), PredictionOptions(**given[PredictionOptions])
    from medfedaug.hospital.assurance.calibration import find_promise
    from medfedaug.runs.finished_run import Origin

    promise = find_promise(run, calibration, Origin.of(run, options.site, options.statistics))
    for name, text in (promise.sentences if promise else {}).items():
        say(f"promise, {name}: {text}")
    finish(run, out, options, *source.predict(run, out, options, promise))


def _print_stored(result: StudyPredictions, out: Path) -> None:
    for case, kinds in sorted(result.existing.items()):
        if case not in result.stored:
            say(f"already there: {case}: {', '.join(kinds)}")
    objects = sum(map(len, result.stored.values()))
    if result.stored:
        say(f"stored {objects} objects of {len(result.stored)} studies")
    say(f"who is who: {out.with_name(f'{out.name}.state')}")
