"""The command `import`: studies of a PACS or a folder as a site's data folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from medfedaug.cli.archive_options import ArchiveOptions, takes_archive
from medfedaug.cli.console import Table, err_console, out_console, say
from medfedaug.cli.progress import resumable
from medfedaug.errors import ConfigError
from medfedaug.utils.files import write_json

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
            "maps, entries. A later import leaves them out.",
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
    labels: Annotated[str, typer.Option(help="Label maps: seg, rtstruct or none.")] = "none",
    segments: Annotated[
        list[str] | None,
        typer.Option(help="Segment and its class, 'Tumour core=tumour'; once for each. * fits any text."),
    ] = None,
    threshold: Annotated[float, typer.Option(help="Share from which a fractional SEG counts.")] = 0.5,
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
    parallel: Annotated[int, typer.Option(min=1, help="Studies at a time.")] = 2,
) -> None:
    """Make a site's data folder of studies from a PACS or a folder of DICOM files.

    Called again, it goes on where it stopped. Example: medfedaug import --dicomweb
    https://pacs.example.org/dicom-web --studies studies.csv --labels seg --segments "Tumour core=tumour"
    --out data/site_A
    """
    from medfedaug.data.pacs.archive import require_pacs
    from medfedaug.data.pacs.studies_file import read_studies

    require_pacs("shapely")
    from medfedaug.data.pacs.importer import ImportSettings, import_studies, plan_import
    from medfedaug.data.pacs.importer import withdraw as withdraw_patients
    from medfedaug.privacy.pseudonyms import Pseudonyms

    own = state or out.with_name(f"{out.name}.state")
    if withdraw is not None and studies is None:
        removed = withdraw_patients(read_studies(withdraw), out, own)
        for patient, count in removed.items():
            say(f"withdrawn: {patient}: {count} case{'s' if count != 1 else ''}")
        say(f"{len(removed)} patients withdrawn from {out}")
        return
    if studies is None or withdraw is not None:
        raise ConfigError("give one of --studies FILE and --withdraw FILE")
    pairs = [one.rpartition("=") for one in segments or ()]
    if not all(name.strip() and found.strip() for name, _, found in pairs):
        raise ConfigError("--segments takes NAME=CLASS, such as 'Tumour core=tumour'")
    settings = ImportSettings(
        series=series,
        labels=labels,
        segments={name.strip(): found.strip() for name, _, found in pairs},
        threshold=threshold,
        allow_burned_in=allow_burned_in,
        parallel=parallel,
    )
    wanted = read_studies(studies)
    pseudonym = Pseudonyms.of_site(own).of
    with (
        resumable(),
        archive.open(folder) as source,
        err_console.status("looking") as status,
    ):
        plans = plan_import(
            source, wanted, pseudonym, settings, lambda done, of: status.update(f"looking: {done} of {of}")
        )
        table = Table("case", "series", "modality", "objects", "decision")
        for plan in plans:
            for modality, number, objects, decision in plan.rows:
                shown = "" if objects is None else str(objects)
                table.add_row(plan.case, number, modality, shown, decision)
            if plan.problem:
                table.add_row(plan.case, "", "", "", f"left out: {plan.problem}")
        out_console.print(table)
        if json is not None:
            write_json(json, [{"case": p.case, "series": p.rows, "problem": p.problem} for p in plans])
        if dry_run:
            return
        done: list[str] = []

        def tell(case: str, problem: str) -> None:
            done.append(case)
            status.update(f"importing: {len(done)} of {len(plans)}")

        failed = import_studies(source, plans, out, own, settings, tell)
    for case, problem in sorted(failed.items()):
        say(f"failed: {case}: {problem}", "red", err=True)
    say(f"{len(plans) - len(failed)} of {len(plans)} studies in {out}; who is who: {own}")
    if failed:
        raise typer.Exit(1)
