"""The command `init` writes the list of a site's cases."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from medfedaug.cli.console import Table, err_console, out_console, say
from medfedaug.cli.options import existing_folder, split_pairs
from medfedaug.errors import ConfigError
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.data.base import SiteFolder
    from medfedaug.data.layouts import Proposal

_ROWS, _ERRORS = 2, 20


def init(
    folder: Annotated[Path, Argument(callback=existing_folder, help="Folder of a site, or of several.")],
    patient: Annotated[str | None, Option(metavar="REGEX", help="Patient in a case's name: '(.+)_'.")] = None,
    labels: Annotated[
        str | None, Option(help="Classes, background first: names, or 0=background,255=lesion.")
    ] = None,
    seed: Annotated[int, Option(help="Seed of the split.")] = 0,
    replace: Annotated[bool, Option("--replace", help="Replace an existing dataset.json.")] = False,
    yes: Annotated[bool, Option("--yes", help="Write without asking.")] = False,
) -> None:
    """Write the dataset.json of a folder with images and label maps, split by patient.

    An image is a file, or a folder with one file or one DICOM series. All images are checked as a run checks
    them. Without --labels, classes come from an existing dataset.json, or are class_1, ...
    """
    names = _classes(labels.split(",")) if labels else ()
    from medfedaug.data.dataset_json import find_layout
    from medfedaug.data.layouts import LISTING, check_same_classes, propose, write_proposal
    from medfedaug.data.sites import is_site

    inside = sorted(path for path in folder.iterdir() if path.is_dir())
    folders = [folder] if find_layout(folder) else [path for path in inside if find_layout(path)]
    of_classes = [path for path in (folder, *inside) if is_site(path) and not (path / LISTING).exists()]
    if not folders and of_classes:
        return _welcome(of_classes, folder)
    folders = folders or [folder]
    proposals = []
    for site in folders:
        with err_console.status(f"{site.name}: reading label maps"):
            proposals.append(propose(site, patient=patient, labels=names, seed=seed))
    check_same_classes(proposals)
    _check([proposal.site for proposal in proposals])
    _show(proposals)
    if len(proposals) == 1 and folders != [folder]:
        say(f"note: {folders[0].name} is the only site of {folder}: simulate and compare need two", "yellow")
    existing = [path for proposal in proposals if (path := proposal.site.path / LISTING).exists()]
    if existing and not replace:
        raise ConfigError(
            f"{existing[0]} exists already; nothing is written. --replace keeps it as dataset.before.json"
        )
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError("nothing is written: give --yes to write this")
        typer.confirm("Write this?", abort=True)
    for proposal in proposals:
        say(str(write_proposal(proposal)))
    say(f"next: medfedaug inspect --data {quote(str(folder))}")


def _welcome(folders: Sequence[Path], data: Path) -> None:
    """Check sites with a folder of images for each class, which need no list."""
    from medfedaug.data.sites import open_folder

    sites = [open_folder(path) for path in folders]
    _check(sites)
    for site in sites:
        say(f"{site.name}: classification of {', '.join(site.classes)}, {len([*site.listed_cases])} images")
    root = data if data not in folders else data.resolve().parent
    say("a folder per class needs no dataset.json: nothing is written")
    say(f"next: medfedaug inspect --data {quote(str(root))}")


def _check(sites: Sequence[SiteFolder]) -> None:
    """Check sites as a run does, and name all files that it would refuse."""
    from medfedaug.data.sites import check_before_listing, unusable_cases

    with err_console.status("reading every image and label map"):
        errors = list(unusable_cases(sites))
        if not errors:
            return check_before_listing(sites)
    for error in errors[:_ERRORS]:
        say(str(error), err=True)
    number = counted(len(errors), "case")
    raise ConfigError(f"{number} cannot be used, and nothing is written: mend or remove the files")


def _show(proposals: Sequence[Proposal]) -> None:
    """Print the proposals: a table, and a few rows and the notes of each site."""
    table = Table("site", "found in", "train", "val", "test", "files per image", "classes")
    for column in (table.columns[0], table.columns[-1]):
        column.overflow = "fold"  # names are not cut
    for proposal in proposals:
        rows = [row for split in proposal.counts for row in proposal.content[split]]
        files = rows[0]["image"]
        table.add_row(
            proposal.site.path.resolve().name,
            proposal.layout,
            *map(str, proposal.counts.values()),
            str(len(files) if isinstance(files, list) else 1),
            ", ".join(proposal.content["labels"].values()),
        )
    out_console.print(table)
    for proposal in proposals:
        for split in proposal.counts:
            for row in proposal.content[split][:_ROWS]:
                say(f"{proposal.site.path.name}: {split}: {json.dumps(row)}")
        for note in proposal.notes:
            say(f"note: {proposal.site.path.name}: {note}")


def _classes(parts: Sequence[str]) -> Sequence[str] | Mapping[int, str]:
    """Read the classes of ``--labels``: only names, or names by value."""
    if not any("=" in part for part in parts):
        return [part.strip() for part in parts]
    pairs = split_pairs("--labels", "0=background,255=lesion", parts, form="VALUE=NAME", first=True)
    try:
        names = {int(value): name for value, name in sorted(pairs, key=lambda pair: int(pair[0]))}
    except ValueError as error:
        raise ConfigError(f"--labels: a value is a whole number ({error})") from error
    if len(names) < len(pairs):
        raise ConfigError("--labels names one value twice")
    return names
