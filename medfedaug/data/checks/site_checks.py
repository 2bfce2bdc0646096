"""Check that files and sites agree: class names, label maps, axes, and what others may read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from medfedaug.data.base import Case, SiteFolder, plain_name
from medfedaug.errors import own, warn
from medfedaug.utils.files import real_paths

_PLANES = {"L": "sagittal", "R": "sagittal", "A": "coronal", "P": "coronal", "S": "axial", "I": "axial"}


def check_label_maps(site: SiteFolder) -> None:
    """Warn where one file is listed as the label map of two images, which a slip in a list may be."""
    first: dict[Path, Case] = {}
    shared: list[tuple[Case, Case]] = []
    # Slices of one file share its label map.
    cases = [case for case in site.listed_cases if case.index is None]
    labels = [(case, case.label) for case in cases if isinstance(case.label, Path)]
    places = real_paths(label for _, label in labels)
    for case, label in labels:
        one = first.setdefault(places[label], case)
        if one is not case:
            shared.append((one, case))
    if shared:
        one, case = shared[0]
        told = f"its label map is that of {own(one.image)}, too"
        if len(shared) > 1:
            told += f", and {len(shared) - 1} more share one"
        warn(told, site=site.name, path=case.image, hint="List for each image a label map of its own.")


def compare_axes(site: str, axes: Mapping[str, Path], first: tuple[str, str, Path] | None = None) -> None:
    """Warn where the axes of volumes point to different sides than those of the first, or of another site."""
    if not axes:
        return
    owner, (code, path) = ("", next(iter(axes.items()))) if first is None else (first[0], first[1:])
    other = f"{path.name} of site {owner}" if owner else path.name
    for different, volume in axes.items():
        if different == code:
            continue
        here, there = _PLANES[different[2]], _PLANES[code[2]]
        told = f"its slices are {here}, those of {other} {there}"
        if here == there:
            told = f"its slices are turned against those of {other}"
        warn(
            f"{told} (axes to {different}, there to {code})",
            site=site,
            path=volume,
            hint="Bring the volumes to one orientation, for instance with nibabel.as_closest_canonical.",
        )
        return


def check_classes(site: SiteFolder, expected: Sequence[str], whose: str) -> None:
    """Check that the labels of a site have the same names as elsewhere.

    Capitals, spaces, ``_`` and ``-`` do not matter, and ``foreground`` is any one class.
    """
    if len(site.classes) != len(expected):
        there = set(map(plain_name, site.classes))
        fewer = there < set(map(plain_name, expected))
        lacking = [name for name in expected if fewer and plain_name(name) not in there]
        told = f", without {', '.join(lacking)}" if lacking else ""
        # What a site did not annotate would be background there, and be learned as such.
        raise site.error(
            f"{len(site.classes)} classes{told}, {whose} has {len(expected)}",
            hint="All sites need the same classes: annotate what is there of each, and name one that no case "
            'has, too; or name under "labelled" in dataset.json the classes that the site has annotated.',
        )
    for label, (name, other) in enumerate(zip(site.classes, expected, strict=True)):
        unnamed = len(expected) == 2 and label == 1 and "foreground" in (plain_name(name), plain_name(other))
        if plain_name(name) != plain_name(other) and not unnamed:
            raise site.error(
                f"label {label} is {name!r}, and {other!r} for {whose}",
                hint="All sites need the same classes in the same order.",
            )


def check_known_classes(site: SiteFolder, expected: Sequence[str]) -> None:
    """Check that a site of photographs has no class that the federation does not know; it may lack some."""
    unknown = sorted(set(site.classes) - set(expected))
    if unknown:
        raise site.error(
            f"the class '{own(unknown[0])}' is not among the federation's: {', '.join(expected)}", site.path
        )


def check_files_alone(site: SiteFolder, who: str) -> None:
    """Check that who reads a site's files without us gets the channels and label values of the federation."""
    if site.label_values:
        raise site.error(
            f"has label maps with the values {', '.join(map(str, site.label_values))}, and {who} reads files "
            "as they are",
            site.path,
            hint="Write the index of each voxel's class: 0, 1, 2, ...",
        )
    if site.channel_places:
        raise site.error(
            f"has other channels than the federation, or in another order, and {who} reads files as they are",
            site.path,
        )
    if any(case.index is not None for cases in site.cases.values() for case in cases):
        raise site.error(f"has its images in archives, and {who} reads files", site.path)


def check_folders_of_classes(sites: Sequence[SiteFolder]) -> None:
    """Check that folders whose names `check_classes` takes for one are called alike; a site may lack some."""
    where: dict[str, list[tuple[str, SiteFolder]]] = defaultdict(list)
    for site in sites:
        for name in site.classes:
            where[plain_name(name)].append((name, site))
    for (first, owner), *others in where.values():
        for name, site in others:
            if name != first:
                raise site.error(
                    f"{name!r} and {first!r} of site {owner.name} would be two classes",
                    site.path,
                    hint="Give the folders one name.",
                )
        if not others and len(sites) > 1:
            warn(f"no other site has the class {first!r}", site=owner.name, path=owner.path / first)
