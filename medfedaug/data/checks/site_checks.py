"""Check that files and sites agree: class names, axes, and files for custom readers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from medfedaug.data.base import SiteFolder, plain_name
from medfedaug.errors import own, warn

_PLANES = {"L": "sagittal", "R": "sagittal", "A": "coronal", "P": "coronal", "S": "axial", "I": "axial"}


def compare_axes(site: str, axes: Mapping[str, Path], first: tuple[str, str, Path] | None = None) -> None:
    """Warn where a volume's axes point to other sides than the first volume's, or another site's."""
    if not axes:
        return
    owner, (code, path) = ("", next(iter(axes.items()))) if first is None else (first[0], first[1:])
    other = f"{path.name} of site {owner}" if owner else path.name
    for different, volume in axes.items():
        if different == code:
            continue
        plane, other_plane = _PLANES[different[2]], _PLANES[code[2]]
        problem = f"its slices are {plane}, those of {other} {other_plane}"
        if plane == other_plane:
            problem = f"its slices are turned against those of {other}"
        hint = "Bring the volumes to one orientation, for instance with nibabel.as_closest_canonical."
        warn(f"{problem} (axes to {different}, there to {code})", site=site, path=volume, hint=hint)
        return


def check_classes(site: SiteFolder, expected: Sequence[str], whose: str) -> None:
    """Check that a site's classes have the expected names, by `plain_name`; ``foreground`` is any class."""
    if len(site.classes) != len(expected):
        names = set(map(plain_name, site.classes))
        fewer = names < set(map(plain_name, expected))
        missing = ", ".join(name for name in expected if fewer and plain_name(name) not in names)
        without = f", without {missing}" if missing else ""
        # A model would learn a class that the site did not annotate as background.
        raise site.error(
            f"{len(site.classes)} classes{without}, {whose} has {len(expected)}",
            hint="All sites need the same classes: annotate and name each, also one that no case has; or "
            'name under "labelled" in dataset.json the classes that the site has annotated.',
        )
    for label, (name, other) in enumerate(zip(site.classes, expected, strict=True)):
        unnamed = len(expected) == 2 and label == 1 and "foreground" in (plain_name(name), plain_name(other))
        if plain_name(name) != plain_name(other) and not unnamed:
            raise site.error(
                f"label {label} is {name!r}, and {other!r} for {whose}",
                hint="All sites need the same names of classes, background first.",
            )


def check_known_classes(site: SiteFolder, expected: Sequence[str]) -> None:
    """Check that a site of photographs has no other classes than the federation."""
    unknown = sorted(set(site.classes) - set(expected))
    if unknown:
        problem = f"the class '{own(unknown[0])}' is not among the federation's"
        raise site.error(f"{problem}: {', '.join(expected)}", site.path)


def check_files_alone(site: SiteFolder, reader: str) -> None:
    """Check that a custom reader of a site's files gets the federation's channels and label values."""
    odd = {
        f"has label maps with the values {', '.join(map(str, site.label_values))}": site.label_values,
        "has other channels than the federation, or in another order": site.channel_places,
        "has its images in archives": any(case.index is not None for case in site.listed_cases),
    }
    if problem := next((text for text, found in odd.items() if found), ""):
        raise site.error(f"{problem}, and {reader} reads files as they are", site.path)


def check_folders_of_classes(sites: Sequence[SiteFolder]) -> None:
    """Check that folders whose names are equal by `plain_name` have the same name at all sites."""
    folders: dict[str, list[tuple[str, SiteFolder]]] = defaultdict(list)
    for site in sites:
        for name in site.classes:
            folders[plain_name(name)].append((name, site))
    for (first, owner), *others in folders.values():
        for name, site in others:
            if name != first:
                problem = f"{name!r} and {first!r} of site {owner.name} would be two classes"
                raise site.error(problem, site.path, hint="Give the folders one name.")
        if not others and len(sites) > 1:
            warn(f"no other site has the class {first!r}", site=owner.name, path=owner.path / first)
