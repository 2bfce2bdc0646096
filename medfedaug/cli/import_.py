"""The command `import`: studies of a PACS or a folder as a site's data folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from medfedaug.cli.archive_options import ArchiveOptions, takes_archive
from medfedaug.cli.console import Table, out_console, say
from medfedaug.cli.options import named_pairs
from medfedaug.cli.progress import ImportProgress, resumable
from medfedaug.config.storage import CACHE_VARIABLE
from medfedaug.errors import ConfigError
from medfedaug.utils.files import write_json

if TYPE_CHECKING:
    from medfedaug.data.pacs.choice import Planned

__all__ = ["import_"]


@takes_archive
def import_(
    archive: ArchiveOptions,
    out: Annotated[Path, typer.Option(help="The site's data folder.")],
    studies: Annotated[
        Path | None,
        typer.Option(help="CSV with a column StudyInstanceUID, AccessionNumber or PatientID."),
    ] = None,
    withdraw: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Remove the patients whose studies this CSV names, in place of an import: images, label "
            "maps, entries, and what is prepared of them in --cache. A later import leaves them out.",
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of DICOM files, at any depth.")] = None,
    series: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX|UID",
            help="Series of the image: its UID, or a regular expression for number, description, modality.",
        ),
    ] = None,
    channel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=REGEX|UID",
            help="In place of --series, a channel and the series that it is, 'FLAIR=.*flair.*'; once for "
            "each channel, in their order. Channels are brought to the grid of the first one, or of "
            "the one that label maps refer to.",
        ),
    ] = None,
    labels: Annotated[str, typer.Option(help="Label maps: seg, rtstruct or none.")] = "none",
    segments: Annotated[
        list[str] | None,
        typer.Option(help="Segment and its class, 'Tumour core=tumour'; once for each. * fits any text."),
    ] = None,
    overlap: Annotated[
        str,
        typer.Option(
            help="Segments of different classes that overlap: refuse, or priority, which gives the voxels to "
            "the class that --segments names first."
        ),
    ] = "refuse",
    threshold: Annotated[float, typer.Option(help="Share from which a fractional SEG counts.")] = 0.5,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --withdraw, the folder in which jobs keep prepared images; by default that of "
            "MEDFEDAUG_CACHE.",
        ),
    ] = None,
    anonymise: Annotated[
        bool,
        typer.Option(
            "--anonymise",
            help="Keep the objects, too, without identity, in OUT/dicom: the basic profile of PS3.15. Pixels "
            "stay as they are.",
        ),
    ] = False,
    allow_burned_in: Annotated[
        bool, typer.Option("--allow-burned-in", help="Take images that may hold text in their pixels.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the site's own list and key (who is who); by default OUT.state beside OUT."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the choice, and fetch nothing.")] = False,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the choice as JSON.")] = None,
) -> None:
    """Make a site's data folder of studies from a PACS or a folder of DICOM files.

    Called again, it goes on where it stopped. Example: medfedaug import --dicomweb
    https://pacs.example.org/dicom-web --studies studies.csv --labels seg --segments "Tumour core=tumour"
    --out data/site_A
    """
    from medfedaug.data.pacs.archive import require_pacs
    from medfedaug.data.pacs.studies_file import read_studies

    require_pacs("shapely")
    from medfedaug.data.pacs.choice import ImportSettings, plan_import
    from medfedaug.data.pacs.importer import import_studies
    from medfedaug.data.pacs.study_list import StudyList
    from medfedaug.data.pacs.withdrawal import withdraw as withdraw_patients
    from medfedaug.privacy.pseudonyms import Pseudonyms

    own = state or out.with_name(f"{out.name}.state")
    if withdraw is not None and studies is None:
        named = str(cache or os.environ.get(CACHE_VARIABLE, ""))
        caches = [Path(named)] if named else []

        def pseudonym(name: str, kind: str) -> str:  # the key is made where there is a list, not before
            return Pseudonyms.of_site(own).of(name, kind)

        wanted = read_studies(withdraw)
        found = withdraw_patients(wanted, out, own, pseudonym, caches)
        for patient, count in found.removed.items():
            say(f"withdrawn: {patient}: {_counted(count, 'case')}")
        say(f"{_counted(len(found.removed), 'patient')} withdrawn from {out}")
        if not caches:
            say("no cache was searched; where jobs keep prepared images, name their folder with --cache")
        if found.unmatched:
            say(
                f"{found.unmatched} of {len(wanted)} rows of {withdraw} belongs to no imported study, and "
                f"nothing was removed of it; look for it in {StudyList(own).path}",
                "red",
                err=True,
            )
            raise typer.Exit(1)
        return
    if studies is None or withdraw is not None:
        raise ConfigError("give one of --studies FILE and --withdraw FILE")
    settings = ImportSettings(
        series=series,
        channels=named_pairs("--channel", "'FLAIR=.*flair.*'", channel, first=True),
        labels=labels,
        segments=named_pairs("--segments", "'Tumour core=tumour'", segments),
        threshold=threshold,
        overlap=overlap,
        anonymise=anonymise,
        allow_burned_in=allow_burned_in,
        parallel=archive.parallel,
    )
    wanted = read_studies(studies)
    pseudonyms = Pseudonyms.of_site(own)
    with resumable(), archive.open(folder) as source:
        with ImportProgress() as progress:
            plans = plan_import(source, wanted, pseudonyms.of, settings, progress.show)
        _print(plans)
        if json is not None:
            write_json(json, [_row(plan) for plan in plans])
        if dry_run:
            return
        with ImportProgress() as progress:
            failed = import_studies(source, plans, out, own, settings, progress.show, new_uid=pseudonyms.uid)
    for case, problem in sorted(failed.items()):
        say(f"failed: {case}: {problem}", "red", err=True)
    say(f"{len(plans) - len(failed)} of {len(plans)} studies in {out}; who is who: {own}")
    if failed:
        raise typer.Exit(1)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _print(plans: Sequence[Planned]) -> None:
    table = Table("case", "series", "modality", "objects", "decision")
    for plan in plans:
        for row in plan.rows:
            shown = "" if row.objects is None else str(row.objects)
            table.add_row(*map(Text, (plan.case, row.number, row.modality, shown, row.decision)))
        if plan.problem:
            table.add_row(*map(Text, (plan.case, "", "", "", f"left out: {plan.problem}")))
    out_console.print(table)


def _row(plan: Planned) -> dict[str, Any]:
    return {"case": plan.case, "series": [asdict(row) for row in plan.rows], "problem": plan.problem}
