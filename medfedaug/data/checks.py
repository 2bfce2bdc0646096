"""Check sites and their files: names of classes, axes, copies of an image, and changes since a run."""

import hashlib
import os
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from medfedaug.data.base import SPLITS, Case, SiteFolder, plain_name
from medfedaug.data.io.base import FileState, file_state
from medfedaug.data.io.formats import files_of, voxel_files
from medfedaug.errors import DataError, own, warn
from medfedaug.utils.files import sha256

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


Entry = tuple[str, SiteFolder, Case]  # A case with its split and site


def check_copies(sites: Sequence[SiteFolder]) -> None:
    """Check that no image is in two splits, as a link or a copy, within and across sites.

    Files are compared by length and a sample first, so that few are read. Volumes are refused; photographs,
    which published data sets have in two splits, cause a warning.
    """
    # The check of each site alone finds copies within it.
    copies = find_copies(sites, apart=len(sites) > 1)
    for (first, owner, original), (split, site, case) in copies:
        other = own(original.image) if owner is site else f"{own(original.image)} of site {owner.name}"
        problem = f"the image of a {split} case is that of a {first} case, {other}"
        if site.task == "segmentation":
            hint = "A patient belongs to one split only, or the test is not one: take one of them out."
            raise site.error(problem, case.image, hint=hint)
        if len(copies) > 1:
            problem += f", and {len(copies) - 1} more are in two splits"
        hint = "The test is not one for these: take them out of one split."
        warn(problem, site=site.name, path=case.image, hint=hint)
        return


def find_copies(sites: Sequence[SiteFolder], apart: bool) -> list[tuple[Entry, Entry]]:
    """Find pairs of entries with one image in two splits, as a link or a copy; ``apart``: at two sites."""
    by_file: dict[Path, list[Entry]] = defaultdict(list)
    cases = ((split, site, case) for site in sites for split in SPLITS for case in site.cases[split])
    entries = [entry for entry in cases if entry[2].index is None]  # slices share a file
    for entry in entries:
        by_file[Path(os.path.realpath(entry[2].image))].append(entry)
    alike: dict[Hashable, list[Path]] = defaultdict(list)
    for path in by_file:
        with suppress(OSError):  # a reader of the file raises an error that names it
            alike[frozenset(map(_sample, voxel_files(path)))].append(path)
    by_content: dict[Hashable, list[Entry]] = defaultdict(list)
    for paths in alike.values():
        for path in paths:
            files = map(file_state, voxel_files(path))
            by_content[frozenset(map(_hash, files)) if len(paths) > 1 else path] += by_file[path]
    return [pair for group in by_content.values() if (pair := _pair(group, apart))]


def _pair(entries: Sequence[Entry], apart: bool) -> tuple[Entry, Entry] | None:
    """Return two entries of different splits and, if ``apart``, of different sites."""
    first = entries[0]
    others = [e for e in entries[1:] if e[0] != first[0] and not (apart and e[1] is first[1])]
    return (first, others[0]) if others else None


def _sample(file: Path) -> tuple[int, bytes]:
    """Return the length of a file, and bytes from its middle."""
    length = file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(length // 2)
        return length, stream.read(2**12)


def fingerprint_sites(sites: Sequence[SiteFolder], splits: Sequence[str] = SPLITS) -> dict[str, str]:
    """Hash, for each site, the images and label maps of some splits.

    The results of a finished run follow from all splits. Cases for validation and test change no weight, and
    may be repaired before a run is continued.
    """
    hashes = {}
    for site in sites:
        files = [(split, *file) for split in splits for file in _hashes(site, split).items()]
        hashes[site.name] = hashlib.blake2b(repr(files).encode(), digest_size=8).hexdigest()
    return hashes


def check_same_files(recorded: Mapping[str, str], now: Mapping[str, str], run: str, data: Path) -> None:
    """Check that the sites' files are those of a run, which is described in words."""
    for site in sorted({*recorded, *now}):
        if recorded.get(site) != now.get(site):
            known = "has other files" if site in now else "is not there"
            problem = f"{'is new' if site not in recorded else known} since {run}"
            raise DataError(problem, site=site, path=data / site, hint="Restore the files, or begin anew")


def _hashes(site: SiteFolder, split: str) -> dict[str, str]:
    """Return the hash of each file of the images and label maps of a split, sorted by name."""
    paths = (path for case in site.cases[split] for path in (*case.files, case.label))
    files = {file for path in paths if isinstance(path, Path) for file in files_of(path) if file.is_file()}
    return dict(sorted((os.path.relpath(file, site.path), _hash(file_state(file))) for file in files))


@lru_cache(maxsize=2**16)  # the runs of a sweep have the same files
def _hash(state: FileState) -> str:
    return sha256(state[0])
