"""Find and open the folders of sites, check that they make a federation, and compute their statistics."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from medfedaug.data.base import SiteFolder, plain_name
from medfedaug.data.checks import check_classes, check_copies, check_folders_of_classes, compare_axes
from medfedaug.data.dataset_json import UNNAMED, find_layout, named_classes
from medfedaug.data.images import ImageFolder, visible_folders
from medfedaug.data.io.formats import is_photograph
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError, translated
from medfedaug.utils.plugins import added_module
from medfedaug.utils.printable import counted, printable
from medfedaug.utils.validation import first_of

if TYPE_CHECKING:
    from medfedaug.data.preparation.preparation import Preparation
    from medfedaug.statistics import ChannelStatistics

MANIFEST = "phantom.json"  # file with the arguments of a phantom, beside its sites

MARKER = "federation.json"
"""File of a folder that stands for a published data set (`medfedaug.research.datasets.benchmarks`)."""

_READ: dict[Hashable, frozenset[int]] = {}
"""Classes in the label maps of a partial site, by case that this process has read."""


def open_site(
    path: str | Path, name: str | None = None, limit: int | None = None, check: bool = True
) -> SiteFolder:
    """Open a site's folder, which holds volumes with label maps or images in one folder per class."""
    path = Path(path)
    if not path.is_dir():
        raise DataError("no such folder", site=name, path=path)
    if is_federation(path):
        sites = _open_federation(path, limit)
        if name not in sites:
            problem = f"no such site; there are {first_of(list(sites), 6)}"
            raise DataError(problem, site=name, path=path / MARKER)
        return sites[name]
    return open_folder(path, name, limit, check)


def _open_federation(folder: Path, limit: int | None) -> dict[str, SiteFolder]:
    benchmarks = added_module("datasets.benchmarks", f"{folder / MARKER}")
    sites: dict[str, SiteFolder] = benchmarks.open_federation(folder, limit)
    return sites


def find_sites(data_dir: str | Path, limit: int | None = None) -> list[SiteFolder]:
    """Open the sites in ``data_dir``, sorted by name, or the sites of the benchmark that its marker names."""
    root = Path(data_dir)
    if is_federation(root):
        return list(_open_federation(root, limit).values())
    return [open_site(path, limit=limit) for path in site_folders(root)]


def site_statistics(
    site: SiteFolder, intensity: str = "raw", preparation: Preparation | None = None, over: str = "image"
) -> ChannelStatistics:
    """Compute the site's channel statistics (FedRDN Eq. 5-6) over its prepared training images.

    The statistics of an unseen site are of its test images.

    Args:
        intensity: ``"raw"`` or ``"scale"``, see `medfedaug.config.run.RunConfig.input_intensity`.
        preparation: the run's preparation. Resampling averages voxels, which makes standard deviations
            smaller.
        over: ``"image"`` or ``"foreground"``, see
            `medfedaug.data.preparation.preparation.Preparation.moments`.
    """
    from medfedaug.data.preparation.preparation import Preparation
    from medfedaug.statistics import average_moments

    cases, prepared = site.cases["training"] or site.cases["test"], preparation or Preparation()
    images = (site.prepared_image(case, intensity, prepared) for case in cases)
    return checked_statistics(site, lambda: average_moments(prepared.moments(x, over) for x in images))


def checked_statistics(site: SiteFolder, compute: Callable[[], ChannelStatistics]) -> ChannelStatistics:
    """Compute a site's statistics, and check that images can be normalised with them."""
    with translated(ValueError, to=lambda error: site.error(str(error), site.path)):
        return compute().validate()


def check_voxels(sites: Iterable[SiteFolder]) -> None:
    """Decode every image and label map of the sites' own data, once for each version of a file."""
    for site in sites:
        if site.published:
            continue
        present = frozenset[int]()
        for case in site.listed_cases:
            key = (site.classes, *site.identity(case))
            if key not in _READ:
                site.load_image(case)
                label = site.load_label(case) if isinstance(site, VolumeFolder) else None
                labels = label.unique().tolist() if label is not None and site.partial else ()
                _READ[key] = frozenset(labels)
            present |= _READ[key]
        annotated = site.annotated() if site.partial else ()
        missing = [name for i, name in enumerate(site.classes) if name in annotated and i not in present]
        if missing:
            hint = "Take it out of labelled where nobody looked for it, or list a case that shows it."
            raise site.error(f"lists {missing[0]!r} as outlined, but no label map has it", hint=hint)


def describe_federation(task: str, kind: str, classes: Sequence[str], patients: Sequence[int]) -> str:
    """Return one line about a federation: task, kind of images, classes, sites and patients."""
    named = first_of(list(classes), 6)
    sites, people = counted(len(patients), "site"), counted(sum(patients), "patient")
    return f"{task}, {kind}, {len(classes)} classes ({named}), {sites}, {people}"


def num_patients(site: SiteFolder) -> int:
    """Return the number of patients; a case without a patient's name stands for one."""
    return len({case.owner for cases in site.cases.values() for case in cases})


def is_federation(folder: Path) -> bool:
    """Return whether a folder's marker makes it the data folder of a benchmark."""
    return (folder / MARKER).is_file()


def is_site(path: Path) -> bool:
    """Return whether a folder holds a ``dataset.json``, readable or not, or folders of images."""
    return os.path.lexists(path / "dataset.json") or find_layout(path) is not None or _has_images(path)


def _has_images(path: Path) -> bool:
    return any(is_photograph(file) for folder in visible_folders(path) for file in folder.iterdir())


def open_folder(
    path: Path, name: str | None = None, limit: int | None = None, check: bool = True
) -> SiteFolder:
    """Open a site's folder; see `medfedaug.data.sites.open_site`."""
    if os.path.lexists(path / "dataset.json"):
        site = VolumeFolder.open(path, name=name, limit=limit, check=check)
        return replace(site, benchmark="phantom") if (path.parent / MANIFEST).exists() else site
    if layout := find_layout(path):  # or label maps would be the images of a class
        problem = f"holds {' and '.join(layout)}, and no dataset.json"
        hint = f"List its cases first: run `medfedaug init {quote(str(path))}`."
        raise DataError(problem, site=name or path.resolve().name, path=path, hint=hint)
    if _has_images(path):
        return ImageFolder.open(path, name=name, limit=limit, check=check)
    problem = "holds neither a dataset.json nor images in a folder per class"
    hint = "An empty site takes no part: remove the folder or fill it."
    raise DataError(problem, site=name or path.resolve().name, path=path, hint=hint)


def site_folders(root: Path) -> list[Path]:
    """List the folders of the sites in ``root``, sorted by name."""
    if not root.is_dir():
        raise DataError("no such folder", path=root)
    visible = sorted(p for p in root.iterdir() if not p.name.startswith("."))
    for path in visible:
        if path.is_symlink() and not path.exists():
            hint = "Mount the folder that it names, or remove the link."
            raise DataError("a broken link", site=path.name, path=path, hint=hint)
    folders = [path for path in visible if path.is_dir() and is_site(path)]
    if not folders:
        if is_site(root):
            parent = root.resolve().parent
            raise DataError("is a site itself", path=root, hint=f"Name the folder that holds it: {parent}")
        raise DataError(
            "no site found",
            path=root,
            hint="Each site is a folder with a dataset.json, or with one folder of images per class; "
            f"a benchmark is named in {MARKER}; `medfedaug phantom --out DIR` makes an example.",
        )
    return folders


def federation_channels(sites: Sequence[SiteFolder]) -> tuple[str, ...]:
    """Return the channel names of the first site that has the most, in its order; empty without names.

    Another site may lack channels, but not add any: a misspelt name would be a new channel.
    """
    complete = max(sites, key=lambda site: len(site.channel_names))
    names = complete.channel_names
    for site in sites:
        site.check_channels(names, f"the {len(names)} of site {complete.name}")
    return names


def arrange(
    sites: Sequence[SiteFolder], channels: Sequence[str] | None = None, classes: Sequence[str] | None = None
) -> list[SiteFolder]:
    """Return the sites with a federation's channels and classes, by default their own, in one order."""
    names = federation_channels(sites) if channels is None else channels
    classes = federation_classes(sites) if classes is None else classes
    return [site.with_channels(names).with_classes(classes, sites) for site in sites]


def federation_classes(sites: Sequence[SiteFolder]) -> tuple[str, ...]:
    """Return the names of a federation's classes, background first.

    With partial sites, the result is the union by `medfedaug.data.base.plain_name`, in the order of complete
    sites, then of partial ones.
    """
    complete = [site for site in sites if not site.partial]
    if len(complete) == len(sites):
        return next((site for site in sites if site.classes != UNNAMED), sites[0]).classes
    names: dict[str, str] = {}
    for site in [*complete, *(site for site in sites if site.partial)]:
        for name in named_classes(site):
            names.setdefault(plain_name(name), name)
    return (sites[0].classes[0], *names.values())


def federation_settings(sites: Sequence[SiteFolder], holdout: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of `medfedaug.config.run.RunConfig` that follow from the sites' data."""
    task, channels, classes = check_federation(sites, holdout)
    names = federation_channels(sites)
    return {"task": task, "in_channels": channels, "channel_names": names, "classes": classes}


def check_federation(
    sites: Sequence[SiteFolder], holdout: Sequence[str] = ()
) -> tuple[str, int, tuple[str, ...]]:
    """Check by headers that the sites' data fit each other; sites in ``holdout`` do not train.

    Returns:
        The task, the number of channels, and the classes: of volumes in the order of their labels, of
        photographs the union of all sites.
    """
    _check_names(sites, holdout)
    first = sites[0]
    classes = federation_classes(sites)
    named = next((site for site in sites if not site.partial and site.classes == classes), first)
    owner = f"site {named.name}" if named.classes == classes else "the federation"
    for site in sites:
        if site.task != first.task:
            raise site.error(f"is for {site.task}, site {first.name} for {first.task}", site.path)
        if site.task == "segmentation":
            check_classes(site.with_classes(classes), classes, owner)
        if site.scaling != first.scaling:
            kinds = ("photographs", "volumes") if site.scaling == "fixed" else ("volumes", "photographs")
            problem = f"its images are {kinds[0]}, {first.name}'s are {kinds[1]}"
            hint = "Bring the images of all sites to one kind."
            raise site.error(f"{problem}: their intensities do not compare", site.path, hint=hint)
    # Folders alone: in an archive of letters, a and A are two classes.
    check_folders_of_classes([site for site in sites if isinstance(site, ImageFolder)])
    arranged = arrange(sites, classes=classes)
    channels = {site.name: site.check_files() for site in arranged}
    for site in sites[1:]:
        if channels[site.name] != channels[first.name]:
            problem = f"its images have {channels[site.name]} channels, {first.name}'s have "
            hint = "All sites need the same channels, or channel_names in their dataset.json."
            raise site.error(f"{problem}{channels[first.name]}", site.path, hint=hint)
    check_copies(sites)
    sites_axes = [(site.name, axes) for site in sites if (axes := site.upright_axes())]
    for name, axes in sites_axes[1:]:
        compare_axes(name, axes, (sites_axes[0][0], *next(iter(sites_axes[0][1].items()))))
    if first.task != "segmentation":
        classes = tuple(sorted({name for site in sites for name in site.classes}))
    return first.task, channels[first.name], classes


def unusable_cases(sites: Iterable[SiteFolder]) -> Iterator[DataError]:
    """Yield an error for each case whose headers or voxels a run would refuse."""
    for site in sites:
        for case in site.listed_cases:
            try:
                site.check_pixels(case)
            except DataError as error:
                yield error


def check_before_listing(sites: Sequence[SiteFolder]) -> None:
    """Check the names and headers of sites as a run does, before ``dataset.json`` is written.

    Sites of one federation are checked together; a lone one may be that of a hospital, whose federation is
    elsewhere.
    """
    if len(sites) > 1:
        check_federation(sites)
    else:
        _check_name(sites[0])
        sites[0].check_files()


def _check_name(site: SiteFolder) -> None:
    if site.name != printable(site.name).strip():
        hint = "Rename its folder: printable characters, without a space at either end."
        raise DataError("not a name for a site", site=repr(site.name), path=site.path, hint=hint)


def _check_names(sites: Sequence[SiteFolder], holdout: Sequence[str]) -> None:
    """Check the names of sites, that two sites train, and that one of these has outlines."""
    names = [site.name for site in sites]
    for site in sites:
        _check_name(site)
        if names.count(site.name) > 1:
            raise site.error("two sites have this name", site.path, hint="Rename one of the two folders.")
    for name in holdout:
        if name not in names:
            raise ConfigError(f"cannot hold out {name!r}; the sites are {', '.join(names)}")
    training = [site for site in sites if site.trains and site.name not in holdout]
    root = sites[0].path.parent
    if len(training) < 2:
        name = f" ({training[0].name})" if training else ""
        problem = f"a federation needs two sites with training cases, found {len(training)}{name}"
        raise DataError(problem, path=root)
    if all(site.partial and not site.annotated("training") for site in training):
        hint = "List label maps at one site or more, and under labelled what they show."
        raise DataError("no site that trains has outlined anything", path=root, hint=hint)
