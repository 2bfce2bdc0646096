"""The sites in a folder, and the check that they make a federation."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from medfedaug.data.base import SPLITS, Case, SiteFolder, plain_name
from medfedaug.data.benchmarks import is_federation, open_federation
from medfedaug.data.checks.duplicates import check_copies
from medfedaug.data.checks.site_checks import check_classes, check_folders_of_classes, compare_axes
from medfedaug.data.dataset_json import UNNAMED, named_classes
from medfedaug.data.folders import MARKER, is_site, open_folder, site_folders
from medfedaug.data.images import ImageFolder
from medfedaug.data.preparation.preparation import Preparation
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError
from medfedaug.statistics import ChannelStatistics, average_moments

__all__ = [
    "SPLITS",
    "Case",
    "ImageFolder",
    "SiteFolder",
    "VolumeFolder",
    "arrange",
    "check_federation",
    "check_voxels",
    "checked_statistics",
    "federation_channels",
    "federation_classes",
    "federation_settings",
    "find_sites",
    "is_federation",
    "is_site",
    "open_site",
    "site_folders",
    "site_statistics",
]


_READ: dict[Hashable, frozenset[int]] = {}
"""Cases that this process has read, with the classes that the label maps of a partial site show."""


def open_site(
    path: str | Path, name: str | None = None, limit: int | None = None, check: bool = True
) -> SiteFolder:
    """Open a site's folder, which holds volumes with label maps or images in one folder per class.

    Args:
        path: the folder, or that of a benchmark (`medfedaug.data.benchmarks`), from which ``name`` is
            opened.
        name: the site's name; by default the folder's.
        limit: at most so many cases of each split.
        check: whether to check the splits (`SiteFolder.check_splits`), or to leave that to the caller.

    Raises:
        DataError: naming site and file, where it cannot be used.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataError("no such folder", site=name, path=path)
    if is_federation(path):
        sites = open_federation(path, limit)
        if name not in sites:
            some = ", ".join(list(sites)[:6]) + (", ..." if len(sites) > 6 else "")
            raise DataError(f"no such site; there are {some}", site=name, path=path / MARKER)
        return sites[name]
    return open_folder(path, name, limit, check)


def find_sites(data_dir: str | Path, limit: int | None = None) -> list[SiteFolder]:
    """The sites in ``data_dir``, sorted by name, or those of the benchmark that its marker names.

    Raises:
        DataError: when there is none, or one cannot be used.
    """
    root = Path(data_dir)
    if is_federation(root):
        return list(open_federation(root, limit).values())
    return [open_site(path, limit=limit) for path in site_folders(root)]


def site_statistics(
    site: SiteFolder,
    intensity: str = "raw",
    preparation: Preparation | None = None,
    over: str = "image",
) -> ChannelStatistics:
    """The site's channel statistics (FedRDN Eq. 5-6) over its training images, as the network sees them.

    An unseen site has no training images; its own statistics come from its test images, without their
    labels: that is all that such a site has to go by.

    Args:
        site: the site.
        intensity: ``"raw"`` or ``"scale"``, see `medfedaug.config.run.RunConfig.input_intensity`.
        preparation: that of the run. Resampling averages voxels, so that the deviation of a resampled image
            is smaller than that of its file.
        over: ``"image"`` or ``"foreground"``, see
            `medfedaug.data.preparation.preparation.Preparation.moments`.

    Raises:
        DataError: when an image cannot be read, or a channel is constant in all of them.
    """
    split, prepared = "training" if site.trains else "test", preparation or Preparation()
    images = site.images(split, intensity, prepared)
    return checked_statistics(site, lambda: average_moments(prepared.moments(x, over) for x in images))


def checked_statistics(site: SiteFolder, compute: Callable[[], ChannelStatistics]) -> ChannelStatistics:
    """A site's statistics, if images can be normalised with them.

    Raises:
        DataError: naming the site.
    """
    try:
        return compute().validate(site.name)
    except ValueError as error:
        raise DataError(
            str(error).removeprefix(f"site '{site.name}': "), site=site.name, path=site.path
        ) from error


def federation_channels(sites: Sequence[SiteFolder]) -> tuple[str, ...]:
    """The names of a federation's channels: those of the first site that has the most.

    A site may lack some, but has none that this one does not have: a channel under another name would
    silently be another channel.

    Returns:
        The names, in that site's order; none where no site names its channels.

    Raises:
        DataError: naming a site and its channel.
    """
    complete = max(sites, key=lambda site: len(site.channel_names))
    known = set(map(plain_name, complete.channel_names))
    for site in sites:
        for name in site.channel_names:
            if plain_name(name) not in known:
                raise DataError(
                    f"has the channel {name!r}, and the {len(known)} of site {complete.name} are "
                    f"{', '.join(complete.channel_names)}",
                    site=site.name,
                    path=site.path / site.listing,
                    hint="Name a channel alike at all sites; one site has to have them all.",
                )
    return complete.channel_names


def check_voxels(sites: Iterable[SiteFolder]) -> None:
    """Decode every image and label map of the sites' own data, which shows what no header does.

    A file that this process has read before is read again only where it was written anew. Published data sets
    are not read: their files are known.

    Raises:
        DataError: naming site and file, and for a class that ``labelled`` names and no label map shows.
    """
    for site in sites:
        if site.benchmark and site.benchmark != "phantom":
            continue
        shown = frozenset[int]()
        for case in site.listed_cases:
            known = (site.classes, *site.identity(case))
            if known not in _READ:
                site.load_image(case)
                there: list[int] = []
                if isinstance(site, VolumeFolder):
                    label = site.load_label(case)
                    there = label.unique().tolist() if site.partial else []
                _READ[known] = frozenset(there)
            shown |= _READ[known]
        lacking = [name for i, name in enumerate(site.classes) if name in site.annotated() and i not in shown]
        if lacking and site.partial:
            raise DataError(
                f"lists {lacking[0]!r} as annotated, and no label map has {lacking[0]!r}",
                site=site.name,
                path=site.path / site.listing,
                hint="Take it out of labelled where nobody looked for it, or list a case that shows it.",
            )


def arrange(
    sites: Sequence[SiteFolder], channels: Sequence[str] | None = None, classes: Sequence[str] | None = None
) -> list[SiteFolder]:
    """The sites with the channels and classes of the federation, in one order.

    Args:
        sites: the sites.
        channels: of the federation; by default those of the sites (`federation_channels`).
        classes: the same (`federation_classes`).

    Raises:
        DataError: as `SiteFolder.with_channels` and `SiteFolder.with_classes`.
    """
    names = federation_channels(sites) if channels is None else channels
    known = federation_classes(sites) if classes is None else classes
    return [site.with_channels(names).with_classes(known, sites) for site in sites]


def federation_classes(sites: Sequence[SiteFolder]) -> tuple[str, ...]:
    """The names of a federation's classes, background first.

    Where some site has not annotated all of them, they are those that any site names, each once
    (`medfedaug.data.base.plain_name`): in the order of a site without ``labelled``, and then site by site.
    """
    complete = [site for site in sites if not site.partial]
    if len(complete) == len(sites):
        return next((site for site in sites if site.classes != UNNAMED), sites[0]).classes
    found: dict[str, str] = {}
    for site in [*complete, *(site for site in sites if site.partial)]:
        found |= {plain_name(name): found.get(plain_name(name), name) for name in named_classes(site)}
    return (sites[0].classes[0], *found.values())


def federation_settings(sites: Sequence[SiteFolder], holdout: Sequence[str] = ()) -> dict[str, Any]:
    """The fields of `medfedaug.config.run.RunConfig` that follow from the sites' data.

    Raises:
        MedFedAugError: as `check_federation`.
    """
    task, channels, classes = check_federation(sites, holdout)
    names = federation_channels(sites)
    return {"task": task, "in_channels": channels, "channel_names": names, "classes": classes}


def check_federation(
    sites: Sequence[SiteFolder], holdout: Sequence[str] = ()
) -> tuple[str, int, tuple[str, ...]]:
    """Check that the sites' data fit each other, by the headers alone.

    Args:
        sites: the sites.
        holdout: sites that do not train.

    Returns:
        The task, channels of the images, and the classes: of volumes in the order of their labels, of
        photographs all that any site has.

    Raises:
        DataError: naming site and file.
        ConfigError: for a held-out site that is not there.
    """
    names = [site.name for site in sites]
    for site in sites:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", site.name):
            raise DataError(
                "not a name for a site",
                site=repr(site.name),
                path=site.path,
                hint="Name the folder in letters, digits, '.', '_' and '-': its name travels with messages.",
            )
        if names.count(site.name) > 1:
            raise DataError(
                "two sites have this name",
                site=site.name,
                path=site.path,
                hint="Rename the folder of one of them.",
            )
    for name in holdout:
        if name not in names:
            raise ConfigError(f"cannot hold out {name!r}; the sites are {', '.join(names)}")
    training = [site.name for site in sites if site.trains and site.name not in holdout]
    if len(training) < 2:
        raise DataError(
            f"a federation needs two sites with training cases, found {len(training)}"
            + (f" ({training[0]})" if training else ""),
            path=sites[0].path.parent,
        )
    first = sites[0]
    classes = federation_classes(sites)
    named = next((site for site in sites if not site.partial and site.classes == classes), first)
    for site in sites[1:]:
        if site.task != first.task:
            raise DataError(
                f"is for {site.task}, site {first.name} for {first.task}", site=site.name, path=site.path
            )
    for site in sites:
        if site.task == "segmentation":
            whose = f"site {named.name}" if named.classes == classes else "the federation"
            check_classes(site.with_classes(classes), classes, whose)
        if site.scaling != first.scaling:
            fixed, own = ("photographs", "volumes") if site.scaling == "fixed" else ("volumes", "photographs")
            raise DataError(
                f"its images are {fixed}, {first.name}'s are {own}: their intensities do not compare",
                site=site.name,
                path=site.path,
                hint="Bring the images of all sites to one kind.",
            )
    # Archives have no folders: in letters, a and A are two classes.
    check_folders_of_classes([site for site in sites if isinstance(site, ImageFolder)])
    arranged = arrange(sites, classes=classes)
    channels = {site.name: site.check_files() for site in arranged}
    for site in sites[1:]:
        if channels[site.name] != channels[first.name]:
            raise DataError(
                f"its images have {channels[site.name]} channels, {first.name}'s have {channels[first.name]}",
                site=site.name,
                path=site.path,
                hint="All sites need the same channels, or channel_names in their dataset.json.",
            )
    check_copies(sites)
    _check_axes(sites)
    if first.task == "segmentation":
        return first.task, channels[first.name], classes
    return first.task, channels[first.name], tuple(sorted({c for site in sites for c in site.classes}))


def _check_axes(sites: Sequence[SiteFolder]) -> None:
    known = [(site.name, axes) for site in sites if (axes := site.upright_axes())]
    for name, axes in known[1:]:
        compare_axes(name, axes, (known[0][0], *next(iter(known[0][1].items()))))
