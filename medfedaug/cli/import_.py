"""The command `import` makes a site's data folder from studies of a PACS or a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from typer import Option

from medfedaug.cli.archive_options import DicomWeb, Dimse, archive_access
from medfedaug.cli.console import Table, out_console, say
from medfedaug.cli.options import Config, Given, named_pairs, takes
from medfedaug.cli.progress import CaseProgress, resumable
from medfedaug.config.machine import Machine
from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import Access
from medfedaug.hospital.pacs.settings import ImportSettings
from medfedaug.utils.files import write_json
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.hospital.pacs.choice import StudyPlan
    from medfedaug.hospital.pacs.import_folder import StudyList
    from medfedaug.hospital.pacs.importer import ImportOutcome


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
    from medfedaug.hospital.pacs.archive import read_studies, require_pacs

    require_pacs("shapely")
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
                source,
                plans,
                out,
                state_folder,
                settings,
                pseudonyms.uid,
                progress.show,
            )
    _print_outcome(outcome)
    say(f"{len(plans) - len(outcome.problems)} of {len(plans)} studies in {out}; who is who: {state_folder}")
    _print_folder(out, state_folder, settings)
    if outcome.problems:
        raise typer.Exit(1)


def _withdraw(file: Path, out: Path, state: Path, cache: Path | None) -> None:
    """Remove the patients of a CSV file from a site's data and from the caches of its jobs."""
    from medfedaug.hospital.pacs.archive import read_studies
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
        raise typer.Exit(1)


def _print_outcome(outcome: ImportOutcome) -> None:
    for case in sorted(outcome.taken_out):
        say(f"taken out of the data: {case}")
    for case, problem in sorted(outcome.problems.items()):
        say(f"failed: {case}: {problem}", "red", err=True)


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
