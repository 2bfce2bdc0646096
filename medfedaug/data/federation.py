"""Check that sites make a federation: names, classes, channels, files."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from medfedaug.data.base import SiteFolder, plain_name
from medfedaug.data.checks import check_classes, check_copies, check_folders_of_classes, compare_axes
from medfedaug.data.dataset_json import UNNAMED, named_classes
from medfedaug.data.images import ImageFolder
from medfedaug.errors import ConfigError, DataError
from medfedaug.utils.printable import printable


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
