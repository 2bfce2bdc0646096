"""Commands about data: `phantom`, `inspect` and `statistics`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from medfedaug.cli.console import Table, err_console, out_console, say
from medfedaug.cli.loading import importing
from medfedaug.cli.options import Limit, SiteOrSites
from medfedaug.errors import ConfigError

_MOST_ODD = 10  # lines a site; the page has more


class Stored(str, Enum):
    """Scale of images before their statistics are computed."""

    raw = "raw"
    scale = "scale"


def phantom(
    out: Annotated[Path, typer.Option(help="A new or empty folder.")],
    sites: Annotated[int, typer.Option(min=1, help="Number of sites, each with its own scanner.")] = 4,
    patients: Annotated[int, typer.Option(min=3, help="Patients per site.")] = 10,
    seed: Annotated[int, typer.Option(help="The same seed gives the same voxels.")] = 0,
    classes: Annotated[
        int,
        typer.Option(
            min=2,
            max=5,
            help="Classes of the label maps: background, lesion, ventricles, deep grey matter, white matter.",
        ),
    ] = 2,
    spacing_varies: Annotated[
        bool,
        typer.Option(
            "--spacing-varies",
            help="Voxels of 1 mm at the first site, of 3 mm at the second, slices of 6 mm at the third, and "
            "so on, in place of one number of voxels.",
        ),
    ] = False,
    shift: Annotated[
        float,
        typer.Option(
            min=0,
            max=3,
            help="Distance between the scanners: 0 for the same scanner at all sites, 1 as usual.",
        ),
    ] = 1.0,
    inverted: Annotated[
        int,
        typer.Option(min=0, help="The last so many sites store dark what the others store bright."),
    ] = 0,
    labelled_apart: Annotated[
        bool,
        typer.Option(
            "--labelled-apart",
            help="Each site has outlined about half of the structures, and each site others; all of them are "
            "in the folder truth, for measuring.",
        ),
    ] = False,
    unlabelled: Annotated[
        list[str] | None, typer.Option(metavar="SITE", help="A site without outlines; repeatable.")
    ] = None,
    sparse: Annotated[
        float, typer.Option(help="Share of the slices of a training volume that are outlined.")
    ] = 1.0,
    test_outlined: Annotated[
        bool,
        typer.Option("--test-outlined", help="Leave test cases complete, to score borrowed structures."),
    ] = False,
) -> None:
    """Write a multi-site MRI phantom: NIfTI volumes, label maps and a dataset.json per site."""
    from medfedaug.data.datasets.partial_phantom import annotate_apart
    from medfedaug.data.datasets.phantom import SPACINGS, make_phantom

    spacings = SPACINGS if spacing_varies else None
    if inverted > sites:
        raise ConfigError(f"--inverted {inverted} is more than the {sites} sites")
    try:
        folders = make_phantom(
            out,
            sites=sites,
            patients=patients,
            seed=seed,
            classes=classes,
            spacings=spacings,
            shift=shift,
            inverted=[k >= sites - inverted for k in range(sites)],
        )
        if labelled_apart or unlabelled or sparse != 1:
            told = annotate_apart(
                out, apart=labelled_apart, unlabelled=unlabelled or (), sparse=sparse, measured=test_outlined
            )
            for site, structures in told.items():
                say(f"{site} has outlined: {', '.join(structures) or 'nothing'}")
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    say(f"{len(folders)} sites with {patients} patients each in {out}")


def inspect(
    data: SiteOrSites,
    out: Annotated[
        Path,
        typer.Option(help="The page to write; the same as JSON, without names of cases, goes beside it."),
    ] = Path("inspect.html"),
    limit: Limit = None,
    intensity: Annotated[
        Stored,
        typer.Option(help="Scale of the images, as --intensity of a run; the shift is of these."),
    ] = Stored.scale,
) -> None:
    """Look at the data before training: geometry, classes, odd cases, and how far the sites are apart."""
    with importing():
        from medfedaug.analysis.inspection_page import (
            federation_shift,
            foreign_note,
            foreign_sites,
            write_inspection,
        )
        from medfedaug.analysis.prospect_page import sentences
        from medfedaug.data.quality.inspection import inspect_sites
        from medfedaug.errors import ConfigError, DataError
        from medfedaug.experiments.prospective import prospect_of, training_sites

    with err_console.status("reading"):
        found = inspect_sites(data, limit, intensity.value)
    expected = []
    if len(found) > 1:
        with err_console.status("comparing"):
            try:
                expected = sentences(prospect_of(training_sites(data, limit)))
            except (ConfigError, DataError) as error:
                expected = [f"The sites were not compared: {error}"]
    record = write_inspection(found, out, intensity.value, expected)
    table = Table("site", "train", "val", "test", "patients", "channels", "odd")
    for site in found:
        counts = [str(site.splits.get(split, 0)) for split in ("training", "validation", "test")]
        channels = ", ".join(map(str, sorted(site.channels))) or "–"
        table.add_row(site.name, *counts, str(site.patients), channels, str(len(site.odd)))
    out_console.print(table)
    for site in found:
        for odd in site.odd[:_MOST_ODD]:
            where = f"{site.name}, {odd.case}" if odd.case else site.name
            say(f"odd: {where}: {odd.reason}")
        if len(site.odd) > _MOST_ODD:
            say(f"odd: {site.name}: and {len(site.odd) - _MOST_ODD} more")
    if (shift := federation_shift(found)) is not None:
        say(shift.sentence)
    for sentence in expected:
        say(sentence)
    if note := foreign_note(foreign_sites(found)):
        say(note, "yellow", err=True)
    say(f"{out}, {record}")


def statistics(
    data: SiteOrSites,
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON file to write, by default statistics.json in the working folder; "
            "other sites that it holds already are kept."
        ),
    ] = None,
    limit: Limit = None,
    intensity: Annotated[
        Stored, typer.Option(help="raw: images as stored; scale: each volume scaled to [0, 1].")
    ] = Stored.raw,
    image_size: Annotated[
        int | None, typer.Option(min=16, help="The run's --image-size, to which images are resized first.")
    ] = None,
) -> None:
    """Compute the channel statistics of a site's training images."""
    from medfedaug.data.benchmarks import is_federation
    from medfedaug.data.folders import is_site
    from medfedaug.data.preparation.preparation import Preparation
    from medfedaug.data.quality.intensity_scales import uneven_sites
    from medfedaug.data.sites import arrange, find_sites, open_site, site_statistics
    from medfedaug.statistics import other_statistics, save_statistics

    target = out or Path("statistics.json")
    try:
        kept = other_statistics(target, intensity.value)
    except ValueError as error:
        raise ConfigError(f"{error}; it is not replaced: choose another file with --out") from error
    single = data.is_dir() and is_site(data) and not is_federation(data)
    sites = [open_site(data, limit=limit)] if single else arrange(find_sites(data, limit=limit))
    found = {}
    prepared = Preparation(image_size=image_size)
    table = Table("site", "images", "channel", "mean", "std")
    for site in sites:
        with err_console.status(f"{site.name}: reading {len(site.cases['training'])} images"):
            found[site.name] = site_statistics(site, intensity.value, prepared)
        own = found[site.name]
        for channel, (mean, std) in enumerate(zip(own.mean.tolist(), own.std.tolist(), strict=True)):
            deviation = "constant" if channel in own.constant else f"{std:.6g}"
            deviation = "missing" if channel in site.missing_channels else deviation
            table.add_row(site.name, str(own.count), str(channel), f"{mean:.6g}", deviation)
    out_console.print(table)
    for scales in uneven_sites(sites).values():
        say(scales.sentence(intensity.value))
    try:
        save_statistics(target, {**kept, **found}, intensity.value)
    except ValueError as error:
        raise ConfigError(f"{target}: {error}; choose another file with --out") from error
    of = "images as stored" if intensity is Stored.raw else "images scaled to [0, 1]"
    also = ", ".join(name for name in kept if name not in found)
    told = f"{target}, which also has {also}" if also else str(target)
    say(f"saved to {told}: of {of}, as FedRDNd must receive them")
    if intensity is Stored.raw:
        say("for a pipeline that scales before FedRDNd: --intensity scale, or its own by channel_statistics")
