"""The commands of archives: `import` makes a site's data folder, `predict` also reads images of a PACS."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Option

from medfedaug.cli.console import CaseProgress, Table, exit_if, out_console, resumable, say
from medfedaug.cli.finished import Images, Model, Out, finish, open_run, predict_files
from medfedaug.cli.options import Config, Given, State, existing_file, takes
from medfedaug.config.machine import Machine
from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import Access, read_studies
from medfedaug.hospital.pacs.settings import ImportSettings, StudyOptions
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.utils.files import write_json
from medfedaug.utils.plugins import import_extra
from medfedaug.utils.printable import counted
from medfedaug.utils.validation import named_pairs

if TYPE_CHECKING:
    from medfedaug.hospital.pacs.choice import StudyPlan
    from medfedaug.hospital.pacs.import_folder import StudyList
    from medfedaug.hospital.pacs.predict_studies import StudyPredictions
    from medfedaug.runs.finished_run import FinishedRun
    from medfedaug.runs.prediction.predictions_file import Promise


archive_option = partial(Option, rich_help_panel=Access.PANEL)
DicomWeb = Annotated[str | None, archive_option(metavar="URL", help="DICOMweb service.")]
Dimse = Annotated[str | None, archive_option(metavar="AET@HOST:PORT", help="DIMSE archive.")]


def archive_access(given: Given) -> Access:
    """Return the access to an archive, with the secrets of the environment.

    They are never on the command line, which every user may see.
    """
    secrets = {name: os.environ.get(f"MEDFEDAUG_PACS_{name.upper()}") for name in ("password", "token")}
    return Access(**{**given[Access], **{name: secret for name, secret in secrets.items() if secret}})


@takes(Access, ImportSettings)
def import_(
    out: Annotated[Path, Option(help="The site's data folder.")],
    *,
    given: Given,
    dicomweb: DicomWeb = None,
    dimse: Dimse = None,
    config: Config = None,
    studies: Annotated[
        Path | None, Option(help="CSV with a column StudyInstanceUID, AccessionNumber or PatientID.")
    ] = None,
    withdraw: Annotated[Path | None, Option(metavar="FILE", help="CSV of patients to remove.")] = None,
    folder: Annotated[Path | None, Option(help="Folder of DICOM files, at any depth.")] = None,
    channel: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=REGEX|UID",
            help="A channel's series, 'FLAIR=.*flair.*', instead of --series; repeatable. Channels are "
            "resampled to the grid of the first one, or of the one that label maps refer to.",
        ),
    ] = None,
    segments: Annotated[list[str] | None, Option(help="Segment and class: 'Tumour core=tumour'.")] = None,
    cache: Annotated[
        Path | None,
        Option(metavar="DIR", help="With --withdraw: the jobs' cache, or MEDFEDAUG_CACHE.", hidden=True),
    ] = None,
    state: Annotated[Path | None, Option(help="Folder of list and key; by default OUT.state.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the choice, and fetch nothing.")] = False,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the choice as JSON.")] = None,
) -> None:
    """Make a site's data folder from studies of a PACS or a folder of DICOM files.

    The same command continues an interrupted import.
    """
    import_extra("shapely", "pacs", "medfedaug import")
    from medfedaug.hospital.pacs.choice import plan_import
    from medfedaug.hospital.pacs.importer import import_studies
    from medfedaug.hospital.privacy.pseudonyms import Pseudonyms

    state_folder = state or out.with_name(f"{out.name}.state")
    if withdraw is not None and studies is None:
        _withdraw(withdraw, out, state_folder, cache)
        return
    if studies is None or withdraw is not None:
        raise ConfigError("give either --studies FILE or --withdraw FILE")
    if channel:
        given[ImportSettings]["channels"] = named_pairs("--channel", "'FLAIR=.*flair.*'", channel, first=True)
    if segments:
        given[ImportSettings]["segments"] = named_pairs("--segments", "'Tumour core=tumour'", segments)
    settings = ImportSettings(**given[ImportSettings])
    from medfedaug.hospital.pacs.open_archive import open_archive

    wanted = read_studies(studies)
    pseudonyms = Pseudonyms.of_site(state_folder)
    access = archive_access(given)
    with resumable(), open_archive(dicomweb=dicomweb, dimse=dimse, folder=folder, access=access) as source:
        with CaseProgress("importing") as progress:
            plans = plan_import(source, wanted, pseudonyms.of, settings, progress.show)
        _print(plans)
        if json is not None:
            write_json(json, [_row(plan) for plan in plans])
        if dry_run:
            return
        with CaseProgress("importing") as progress:
            outcome = import_studies(
                source, plans, out, state_folder, settings, pseudonyms.uid, progress.show
            )
    for case in sorted(outcome.taken_out):
        say(f"taken out of the data: {case}")
    for case, problem in sorted(outcome.problems.items()):
        say(f"failed: {case}: {problem}", "red", err=True)
    say(f"{len(plans) - len(outcome.problems)} of {len(plans)} studies in {out}; who is who: {state_folder}")
    _print_folder(out, state_folder, settings)
    exit_if(outcome.problems)


def _withdraw(file: Path, out: Path, state: Path, cache: Path | None) -> None:
    """Remove the patients of a CSV file from a site's data and from the caches of its jobs."""
    from medfedaug.hospital.pacs.import_folder import StudyList, withdraw
    from medfedaug.hospital.privacy.pseudonyms import Pseudonyms

    prepared = cache or os.environ.get(f"{Machine.VARIABLES}CACHE")
    caches = [Path(prepared)] if prepared else []

    def pseudonym(name: str, kind: str) -> str:  # the key is made only if the site has a list
        return Pseudonyms.of_site(state).of(name, kind)

    wanted = read_studies(file)
    withdrawal = withdraw(wanted, out, state, pseudonym, caches)
    for patient, count in withdrawal.removed.items():
        say(f"withdrawn: {patient}: {counted(count, 'case')}")
    say(f"{counted(len(withdrawal.removed), 'patient')} withdrawn from {out}")
    _print_next_job(out, state)
    if not caches:
        say("no cache was searched; if jobs keep prepared images, name their folder with --cache")
    if withdrawal.unmatched:
        text = f"{file}: {withdrawal.unmatched} of {len(wanted)} rows match no imported study; nothing was "
        say(f"{text}removed for them. Compare with {StudyList(state).path}", "red", err=True)
    exit_if(withdrawal.unmatched)


def _print_folder(out: Path, state: Path, settings: ImportSettings) -> None:
    """Print the classes, and a note if the patients are too few for scores."""
    from medfedaug.hospital.pacs.import_folder import CaseFiles, StudyList

    content = CaseFiles(out, state).content()
    if not content:
        return
    studies = StudyList(state)
    if len(units := studies.units()) > 1 and len(settings.channels) < 2:
        counts = ", ".join(f"{count} in {unit}" for unit, count in sorted(units.items()))
        say(f"images in several units ({counts}): their intensities do not compare", "yellow", err=True)
    if settings.outlined:
        _print_classes(settings, content, studies)
    _print_patients(content)


def _print_patients(content: Mapping[str, Any]) -> int:
    """Print the patients of each split, and a note if they are too few; return the number that trains."""
    from medfedaug.data.base import SPLITS
    from medfedaug.hospital.privacy.policy import PrivacyPolicy

    patients = {split: len({row["patient"] for row in content[split]}) for split in SPLITS}
    least = PrivacyPolicy().min_images
    say(f"patients: {', '.join(f'{count} {split}' for split, count in patients.items())}")
    if few := [split for split in SPLITS if patients[split] < least]:
        say(
            f"fewer than {least} patients in {', '.join(few)}: with the default policy (site configure "
            f"--min-images {least}) their scores and statistics stay at the site"
        )
    return patients["training"]


def _print_next_job(out: Path, state: Path) -> None:
    """Print whether the next job is possible after a withdrawal, and what a withdrawal does not undo."""
    from medfedaug.hospital.pacs.import_folder import CaseFiles
    from medfedaug.hospital.privacy.policy import PrivacyPolicy

    content = CaseFiles(out, state).content()
    training, least = _print_patients(content) if content else 0, PrivacyPolicy().min_images
    if training >= least:
        say("the next job is possible with the default rules; medfedaug site doctor KIT checks a kit's own")
    else:
        text = f"the site is left out of the next job: {counted(training, 'patient')} would train, and the "
        say(f"{text}default of min_images is {least}", "yellow", err=True)
    say("models that were trained keep what they learned; what to write to the patient: docs/howto/ethics.md")


def _print_classes(settings: ImportSettings, content: Mapping[str, Any], studies: StudyList) -> None:
    """Print the numbers of the classes, and which of them count as outlined here."""
    from medfedaug.data.dataset_json import LABELLED, unseen_note

    say(f"classes: {', '.join(f'{number} {name}' for number, name in enumerate(settings.classes))}")
    shown = {name for entry in studies.studies.values() for name in entry.get("shown", ())}
    labelled = content.get(LABELLED, settings.classes[1:])
    absent = [name for name in settings.classes[1:] if name not in shown]
    if left_out := [name for name in absent if name not in labelled]:
        say(
            f"no label map shows {', '.join(left_out)}: counts as not outlined here, and is not learned as "
            f"background ({LABELLED} in dataset.json); --labelled says otherwise"
        )
    if claimed := [name for name in absent if name in labelled]:
        say(unseen_note(claimed), "yellow", err=True)
    if lacking := sorted(shown.difference(labelled)):
        say(
            f"label maps show {', '.join(lacking)}, which {LABELLED!r} in dataset.json lacks: training "
            f"refuses them; give --labelled {','.join([*labelled, *lacking])}",
            "yellow",
            err=True,
        )


def _print(plans: Sequence[StudyPlan]) -> None:
    table = Table("case", "series", "modality", "objects", "decision")
    for plan in plans:
        for row in plan.rows:
            count = "" if row.objects is None else str(row.objects)
            table.add_row(*map(Text, (plan.case, row.number, row.modality, count, row.decision)))
        if plan.problem:
            table.add_row(*map(Text, (plan.case, "", "", "", f"left out: {plan.problem}")))
    out_console.print(table)


def _row(plan: StudyPlan) -> dict[str, Any]:
    return {"case": plan.case, "series": [asdict(row) for row in plan.rows], "problem": plan.problem}


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
        for package in ("shapely", "highdicom"):
            import_extra(package, "pacs", "a prediction of studies")
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
