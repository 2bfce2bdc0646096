"""Commands on sites' images: `init`, `phantom`, `inspect`, `statistics` and `plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from medfedaug.cli.console import CaseProgress, Table, confirm, err_console, out_console, say
from medfedaug.cli.options import (
    Data,
    Given,
    Limit,
    PlanMemory,
    SiteOrSites,
    existing_folder,
    takes,
)
from medfedaug.config.plan import Plan, PlanningConfig
from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, config_errors
from medfedaug.utils.plugins import added_module
from medfedaug.utils.printable import counted
from medfedaug.utils.validation import named_pairs

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
    from medfedaug.data.layouts import LISTING, propose, write_proposal
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
        confirm("Write this?", "nothing is written: give --yes to write this")
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
    names = named_pairs("--labels", "0=background,255=lesion", parts, form="VALUE=NAME", first=True)
    with config_errors("--labels: a value is a whole number", ValueError):
        return {number: names[value] for number, value in sorted((int(value), value) for value in names)}


_MOST_ODD = 10  # lines a site; the page has more


class Stored(str, Enum):
    """Scale of images before their statistics are computed."""

    raw = "raw"
    scale = "scale"


def phantom(
    out: Annotated[Path, Option(help="A new or empty folder.")],
    sites: Annotated[int, Option(min=1, help="Number of sites, each with its own scanner.")] = 4,
    patients: Annotated[int, Option(min=3, help="Patients per site.")] = 10,
    seed: Annotated[int, Option(min=0, max=2**32 - 1, help="The same seed gives the same voxels.")] = 0,
    classes: Annotated[int, Option(min=2, max=5, help="Classes, with the background.")] = 2,
    spacing_varies: Annotated[bool, Option("--spacing-varies", help="Vary voxel sizes by site.")] = False,
    shift: Annotated[float, Option(min=0, max=3, help="Distance between scanners; 0 for none.")] = 1.0,
    inverted: Annotated[int, Option(min=0, help="Number of last sites whose brightness is inverted.")] = 0,
    labelled_apart: Annotated[
        bool, Option("--labelled-apart", help="Each site outlines other structures; truth/ has all.")
    ] = False,
    unlabelled: Annotated[list[str] | None, Option(metavar="SITE", help="Site without outlines.")] = None,
    sparse: Annotated[float, Option(min=0, max=1, help="Share of outlined slices in training.")] = 1.0,
) -> None:
    """Write a multi-site MRI phantom: NIfTI volumes, label maps and a dataset.json per site."""
    from medfedaug.data.phantom import SPACINGS, make_phantom

    folders = make_phantom(
        out,
        sites=sites,
        patients=patients,
        seed=seed,
        classes=classes,
        spacings=SPACINGS if spacing_varies else None,
        shift=shift,
        inverted=[k >= sites - inverted for k in range(sites)],
    )
    if labelled_apart or unlabelled or sparse != 1:
        partial_phantom = added_module("datasets.partial_phantom", "an annotation of parts")
        annotated = partial_phantom.annotate_apart(
            out, apart=labelled_apart, unlabelled=unlabelled or (), sparse=sparse
        )
        for site, structures in annotated.items():
            say(f"{site} has outlined: {', '.join(structures) or 'nothing'}")
    say(f"{len(folders)} sites with {patients} patients each in {out}")


def inspect(
    data: SiteOrSites,
    out: Annotated[Path, Option(help="Page to write, beside JSON without cases.")] = Path("inspect.html"),
    limit: Limit = None,
    intensity: Annotated[Stored, Option(help="Scale of the images, as --intensity of a run.")] = Stored.scale,
) -> None:
    """Inspect the data: geometry, classes, odd cases, and distances between sites.

    It comes after medfedaug init. Then medfedaug compare measures what a federation brings, and
    medfedaug plan prepares the training on volumes.
    """
    from medfedaug.data.sites import describe_federation
    from medfedaug.research.comparison.inspection import inspect_sites
    from medfedaug.research.comparison.inspection_page import (
        differing_sites,
        federation_shift,
        write_inspection,
    )

    with err_console.status("reading"):
        inspections = inspect_sites(data, limit, intensity.value)
    if opened := [site for site in inspections if site.task]:
        classes = list(dict.fromkeys(name for site in opened for name in site.classes))
        kind = "volumes" if any(site.scaling == "each volume" for site in opened) else "2D"
        tasks = " and ".join(dict.fromkeys(site.task for site in opened))
        say(describe_federation(tasks, kind, classes, [site.patients for site in inspections]))
    record = write_inspection(inspections, out, intensity.value)
    table = Table("site", "train", "val", "test", "patients", "channels", "odd")
    for site in inspections:
        counts = [str(site.splits.get(split, 0)) for split in ("training", "validation", "test")]
        channels = ", ".join(map(str, sorted(site.channels))) or "–"
        table.add_row(site.name, *counts, str(site.patients), channels, str(len(site.odd)))
    out_console.print(table)
    for site in inspections:
        for odd in site.odd[:_MOST_ODD]:
            where = f"{site.name}, {odd.case}" if odd.case else site.name
            say(f"odd: {where}: {odd.reason}")
        if len(site.odd) > _MOST_ODD:
            say(f"odd: {site.name}: and {len(site.odd) - _MOST_ODD} more")
    if (shift := federation_shift(inspections)) is not None:
        say(shift.sentence)
    for different in differing_sites(inspections):
        say(str(different))
    say(f"{out}, {record}")


def statistics(
    data: SiteOrSites,
    out: Annotated[Path | None, Option(help="JSON to write, by default statistics.json.")] = None,
    limit: Limit = None,
    intensity: Annotated[Stored, Option(help="raw: as stored; scale: volumes to [0, 1].")] = Stored.raw,
    image_size: Annotated[int | None, Option(min=16, help="The run's --image-size.")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an existing file.")] = False,
) -> None:
    """Compute the channel statistics of a site's training images."""
    from medfedaug.data.preparation.preparation import Preparation
    from medfedaug.data.sites import arrange, find_sites, is_federation, is_site, open_site, site_statistics
    from medfedaug.statistics import save_statistics

    target = out or Path("statistics.json")
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists; choose another file with --out, or --overwrite")
    single = data.is_dir() and is_site(data) and not is_federation(data)
    sites = [open_site(data, limit=limit)] if single else arrange(find_sites(data, limit=limit))
    computed, prepared = {}, Preparation(image_size=image_size)
    table = Table("site", "images", "channel", "mean", "std")
    for site in sites:
        with err_console.status(f"{site.name}: reading {len(site.cases['training'])} images"):
            computed[site.name] = pairs = site_statistics(site, intensity.value, prepared)
        for channel, (mean, std) in enumerate(zip(pairs.mean.tolist(), pairs.std.tolist(), strict=True)):
            deviation = "constant" if channel in pairs.constant else f"{std:.6g}"
            deviation = "missing" if channel in site.missing_channels else deviation
            table.add_row(site.name, str(pairs.count), str(channel), f"{mean:.6g}", deviation)
    out_console.print(table)
    save_statistics(target, computed, intensity.value)
    images = "images as stored" if intensity is Stored.raw else "images scaled to [0, 1]"
    say(f"saved to {target}: statistics of {images}")
    if intensity is Stored.raw:
        say("if your pipeline rescales intensities, compute the statistics with --intensity scale")


_OTHERS = tuple(
    name for name in RunConfig.__dataclass_fields__ if name not in ("network", "network_args", "batch_size")
)


@takes(RunConfig, Plan, without=_OTHERS)
def plan(
    data: Data,
    out: Annotated[Path, Option(help="JSON file for the plan; the reasons are in a page of this name.")],
    *,
    given: Given,
    plan_memory: PlanMemory = None,
) -> None:
    """Make a plan of volumes from the sites' data: spacing, and sizes of patches and batches.

    It comes after inspect and compare. `simulate --plan auto` makes the same plan: only the summaries that a
    site would send enter it.
    """
    from medfedaug.analysis.plan_page import write_plan_page
    from medfedaug.config.plan import save_plan
    from medfedaug.data.sites import arrange, find_sites
    from medfedaug.federation.planning.fingerprint import fingerprint
    from medfedaug.federation.planning.planner import make_plan
    from medfedaug.simulate import configure

    sites = arrange(find_sites(data))
    planning = PlanningConfig.keeping((*given[Plan], *given[RunConfig]), plan_memory)
    config = configure(sites, **given[RunConfig], plan=Plan(**given[Plan]), planning=planning)
    prints = {}
    with CaseProgress() as progress:
        for site in (site for site in sites if site.trains):
            read = partial(progress.update, f"{site.name}: reading volumes")
            prints[site.name] = fingerprint(site, config.classes, on_read=read)
    planned = make_plan(prints, config)
    content = planned.to_dict()
    changes: dict[str, Any] = {name: value for name, value in content["changes"].items() if name != "plan"}
    save_plan(out, planned.changes["plan"], {"suggested": changes, "reasons": content["reasons"]})
    page = out.with_suffix(".html")
    write_plan_page(page, planned, prints)
    table = Table("decided", "why")
    for decision, reason in planned.reasons:
        table.add_row(decision, reason)
    out_console.print(table)
    options = " ".join(
        f"--{name.replace('_', '-')} {value if not isinstance(value, dict) else quote(json.dumps(value))}"
        for name, value in changes.items()
    )
    say(f"{out}, {page}")
    use = f"medfedaug simulate --data {quote(str(data))} --plan {quote(str(out))} {options} ..."
    say(f"use it with: {use}")
