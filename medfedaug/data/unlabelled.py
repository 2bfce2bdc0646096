"""Images that somebody gives to be predicted, as the data of a site without labels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medfedaug.config.run import RunConfig
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.benchmarks import is_federation
from medfedaug.data.dataset_json import read_test_images
from medfedaug.data.images import ImageFolder
from medfedaug.data.io.dicom_headers import is_dicom_file, is_dicomdir
from medfedaug.data.io.dicom_series import LeftOut, place_of_series, scan, select
from medfedaug.data.io.dicom_volumes import DicomSeries
from medfedaug.data.io.formats import (
    image_suffix,
    is_photograph,
    is_volume_file,
    known_formats,
    without_suffix,
)
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError
from medfedaug.utils.printable import counted

_LISTING, _PREDICTED = "dataset.json", "predictions.json"
_LABELS = ("label", "labels", "labelstr", "labelsts", "mask", "masks", "segmentation", "segmentations")
_SHOWN = 3


@dataclass(frozen=True)
class Given:
    """Images to predict.

    Args:
        folder: the cases, all of the split ``"test"``.
        unclear: of cases that may be one image or another, the reason, by their names.
        left_out: files, folders and series that are no cases, with the reason.
    """

    folder: SiteFolder
    unclear: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()


def open_given(
    images: str | Path,
    config: RunConfig,
    name: str = "",
    leave_out: Path | None = None,
    series: str | None = None,
) -> Given:
    """The cases of a file or a folder, all of the split ``"test"`` and without labels.

    A folder with a ``dataset.json`` has its test cases. Otherwise each image file in it or below it is a
    case, and so is each DICOM series, whatever its files are called; of several series of one study in one
    folder one is taken, see `medfedaug.data.io.dicom_series.select`. A DICOM file stands for the series that
    it is of.

    Args:
        images: the file or folder.
        config: of the run whose model predicts them.
        name: the name of the site that they are of; empty for none.
        leave_out: a folder below that is not looked into.
        series: which DICOM series are meant: an identity, or a regular expression.

    Returns:
        The cases, of which nothing but their names was looked at, or the headers of DICOM; see `check_given`.

    Raises:
        DataError: naming file or folder, where there is no case.
        ConfigError: for ``series`` where nothing is looked for.
    """
    images = Path(images)
    if not os.path.lexists(images):
        raise DataError("no such file or folder", site=name, path=images)
    kind: type[VolumeFolder] | type[ImageFolder]
    kind = VolumeFolder if config.task == "segmentation" else ImageFolder
    names: tuple[str, ...] = ()
    found = _Found()
    if images.is_dir() and os.path.lexists(images / _LISTING):
        if series is not None:
            raise ConfigError(f"--series: {images / _LISTING} names the images; leave it out")
        listed = read_test_images(images, name, config.classes)
        names, found.cases = listed.channel_names, [*listed.cases["test"]]
        if not found.cases:
            hint = 'Name them under "test"; labels are not needed.'
            raise DataError("lists no test case", site=name, path=images / _LISTING, hint=hint)
    elif images.is_dir() or is_dicomdir(images):
        root = images if images.is_dir() else images.parent
        found = _found(root, config.task, name, leave_out, series)
    else:
        if not image_suffix(images.name) and not is_dicom_file(images):
            hint = f"Known are {known_formats()}, and DICOM."
            raise DataError("is no image, by its name or its content", site=name, path=images, hint=hint)
        if series is not None:
            raise ConfigError(f"--series: {images} is one file; leave it out, or give a folder")
        found.cases = _named([images])
    cases: dict[str, tuple[Case, ...]] = {"training": (), "validation": (), "test": tuple(found.cases)}
    folder = kind(name, images, config.classes, cases, channel_names=names)
    return Given(folder.with_channels(config.channel_names), found.unclear, tuple(found.left_out))


def check_given(folder: SiteFolder, case: Case, config: RunConfig, photographs: bool | None) -> None:
    """Check by headers alone that a case can be read and is such as the model takes.

    Args:
        folder: of `open_given`.
        case: one of its cases.
        config: the run's.
        photographs: whether the federation's images were photographs or volumes; ``None`` if not known.

    Raises:
        DataError: naming the file and what is wrong with it.
    """
    for path in case.files:
        if not path.exists():
            raise DataError("no such file or folder", site=folder.name, path=path)
        given = is_photograph(path)
        if photographs is not None and given != photographs:
            own, other = ("a photograph", "volumes") if given else ("no photograph", "photographs")
            raise DataError(f"is {own}, and the model is for {other}", site=folder.name, path=path)
    if isinstance(folder, ImageFolder):
        folder.check_image(case)
        return
    assert isinstance(folder, VolumeFolder)
    found, expected = folder.check_image(case).channels, config.in_channels
    wanted = len(folder.channel_names) or expected
    if found != wanted or len(folder.federation_channels or range(found)) != expected:
        channels = f" ({', '.join(config.channel_names)})" if config.channel_names else ""
        raise DataError(
            f"has {counted(found, 'channel')}, and the model takes {expected}{channels}",
            site=folder.name,
            path=case.image,
            hint=f'Several files of one image are listed in {_LISTING}: "image": [FILE, ...].'
            if found < expected
            else "",
        )


@dataclass
class _Found:
    cases: list[Case] = field(default_factory=list)
    unclear: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


def _found(images: Path, task: str, site: str, leave_out: Path | None, series: str | None) -> _Found:
    if is_federation(images):
        raise DataError("is a benchmark's folder", site=site, path=images, hint="Give one site's folder.")
    inside = [path for path in sorted(images.iterdir()) if not path.name.startswith(".")]
    if any((path / _LISTING).exists() for path in inside):
        raise DataError("holds folders of sites", site=site, path=images, hint="Give one site's folder.")
    dense = task == "segmentation"
    seen = scan(images, skip=_skipped(leave_out), take=is_volume_file if dense else is_photograph)
    found = _Found(left_out=[*seen.left_out])
    chosen = select(seen.series if dense else (), series)
    found.left_out += chosen.left_out
    if not dense:
        reason = "a DICOM series, and the model classifies photographs"
        found.left_out += [LeftOut(one.folders[0], f"{one.text}: {reason}") for one in seen.series]
    files = []
    for file in seen.others:
        if not image_suffix(file.name):
            continue
        if is_photograph(file) and seen.series and file.parent != images:
            found.left_out.append(LeftOut(file, "a picture beside DICOM series"))
        else:
            files.append(file)
    for one in chosen.chosen:
        place = place_of_series(one, seen.series)
        case = Case(_name_of_series(one, chosen.chosen, place, images), place or one.files[0], "")
        found.cases.append(case)
        if place is None:
            found.unclear[case.name] = (
                f"its files lie in {len(one.folders)} folders, in which there are other series; put them "
                "into one folder"
            )
    found.cases += _named(files, images, {case.name for case in found.cases})
    for path, reason in chosen.unclear:
        case = Case(_below(path, images) or path.resolve().name, path, "")
        number = sum(
            other.name == case.name or other.name.startswith(f"{case.name} (") for other in found.cases
        )
        case = Case(f"{case.name} ({number + 1})", path, "") if number else case
        found.cases.append(case)
        found.unclear[case.name] = reason
    if not found.cases:
        known = f"Known are {known_formats()}, and DICOM series"
        hint = f"{known}; what is called otherwise is listed in {_LISTING}."
        raise DataError(_nothing(found.left_out, images), site=site, path=images, hint=hint)
    return found


def _nothing(left_out: Sequence[LeftOut], images: Path) -> str:
    told = [f"{_below(path, images) or path.name}: {reason}" for path, reason in left_out[:_SHOWN]]
    more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
    return f"holds no image ({'; '.join(told)}{more})" if told else "holds no image"


def _skipped(leave_out: Path | None) -> Callable[[Path], str | None]:
    apart = leave_out.resolve() if leave_out is not None else None

    def skip(folder: Path) -> str | None:
        if folder.resolve() == apart:
            return ""
        if (folder / _PREDICTED).exists():
            return "an earlier prediction"
        return "label maps, by its name" if folder.name.lower() in _LABELS else None

    return skip


def _name_of_series(
    series: DicomSeries, chosen: Sequence[DicomSeries], place: Path | None, root: Path
) -> str:
    """A series' folder, where it is the only case there; else its identity in the folder."""
    folder = series.folders[0] if place is None or not place.is_dir() else place
    alone = sum(other.folders == series.folders for other in chosen) == 1
    if alone and (folder != root or place == root):
        return _below(folder, root) or folder.resolve().name
    parts = [other for other in chosen if other.folders == series.folders and other.uid == series.uid]
    number = f"_{parts.index(series) + 1}" if len(parts) > 1 else ""
    return str(Path(_below(folder, root), (series.uid or "series") + number))


def _below(path: Path, root: Path) -> str:
    """A path as it is called below a folder; empty for the folder itself."""
    name = str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
    return "" if name == "." else name


def _named(paths: Sequence[Path], root: Path | None = None, taken: Collection[str] = ()) -> list[Case]:
    """Cases named after their files without suffixes, or with them where two would have one name."""

    def full(path: Path) -> str:
        return _below(path, root) if root is not None else path.resolve().name

    def short(path: Path) -> str:
        return without_suffix(full(path))

    often = Counter([*map(short, paths), *taken])
    return [Case(short(path) if often[short(path)] == 1 else full(path), path, "") for path in paths]
