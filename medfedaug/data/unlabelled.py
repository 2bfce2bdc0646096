"""Images to predict, as the data of a site without labels."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medfedaug.config.run import RunConfig
from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.dataset_json import read_test_images
from medfedaug.data.images import ImageFolder, visible_folders
from medfedaug.data.io.base import LeftOut, Series
from medfedaug.data.io.formats import (
    SERIES,
    image_suffix,
    is_photograph,
    is_volume_file,
    known_formats,
    without_suffix,
)
from medfedaug.data.sites import is_federation
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError
from medfedaug.utils.printable import counted

_LISTING, _PREDICTED = "dataset.json", "predictions.json"
_LABELS = ("label", "labels", "labelstr", "labelsts", "mask", "masks", "segmentation", "segmentations")
_MOST_NAMED = 3


@dataclass(frozen=True)
class Given:
    """Images to predict.

    Args:
        folder: the cases, all of the split ``"test"``.
        unclear: the reason, by name, for cases with several candidate images.
        left_out: files, folders and series that are not cases, with the reason.
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
    """List the cases of a file or a folder, all of the split ``"test"`` and without labels.

    The cases of a folder with a ``dataset.json`` are its test cases. Otherwise each image file in or below
    the folder is a case, and so is each DICOM series with files of any name. Of several series of a study in
    one folder, `medfedaug.data.io.base.SeriesFormat.select` chooses one. A DICOM file stands for its
    series.
    They are listed by their names, or the headers of DICOM, without further checks; see `check_given`.

    Args:
        name: name of the images' site; empty for none.
        leave_out: a folder below that is skipped.
        series: identity of the DICOM series to predict, or a regular expression; for a folder without a list.
    """
    images = Path(images)
    if not os.path.lexists(images):
        raise DataError("no such file or folder", site=name, path=images)
    kind: type[VolumeFolder] | type[ImageFolder]
    kind = VolumeFolder if config.task == "segmentation" else ImageFolder
    names: tuple[str, ...] = ()
    listed = _Cases()
    if images.is_dir() and os.path.lexists(images / _LISTING):
        content = read_test_images(images, name, config.classes)
        names, listed.cases = content.channel_names, [*content.cases["test"]]
        if not listed.cases:
            hint = 'Name them under "test"; labels are not needed.'
            raise DataError("lists no test case", site=name, path=images / _LISTING, hint=hint)
    elif images.is_dir():
        listed = _list_cases(images, config.task, name, leave_out, series)
    else:
        if not image_suffix(images.name) and not SERIES.recognises(images):
            hint = f"Known are {known_formats()}, and DICOM."
            raise DataError("is not an image, by name or content", site=name, path=images, hint=hint)
        listed.cases = _named_cases([images])
    cases: dict[str, tuple[Case, ...]] = {"training": (), "validation": (), "test": tuple(listed.cases)}
    folder = kind(name, images, config.classes, cases, channel_names=names)
    return Given(folder.with_channels(config.channel_names), listed.unclear, tuple(listed.left_out))


def check_given(folder: SiteFolder, case: Case, config: RunConfig, photographs: bool | None) -> None:
    """Check by headers that a case can be read and fits the model.

    ``photographs`` says whether the federation's images were photographs; ``None`` if not known.
    """
    for path in case.files:
        if photographs is not None and is_photograph(path) != photographs:
            kind, expected = ("no photograph", "photographs") if photographs else ("a photograph", "volumes")
            raise folder.error(f"is {kind}, and the model is for {expected}", path)
    if isinstance(folder, ImageFolder):
        folder.check_image(case)
        return
    assert isinstance(folder, VolumeFolder)
    number, in_channels = folder.check_image(case).channels, config.in_channels
    listed = len(folder.channel_names) or in_channels
    if number != listed or len(folder.federation_channels or range(number)) != in_channels:
        names = f" ({', '.join(config.channel_names)})" if config.channel_names else ""
        problem = f"has {counted(number, 'channel')}, and the model takes {in_channels}{names}"
        several = f'Several files of one image are listed in {_LISTING}: "image": [FILE, ...].'
        hint = several if number < in_channels else ""
        raise folder.error(problem, case.image, hint=hint)


@dataclass
class _Cases:
    cases: list[Case] = field(default_factory=list)
    unclear: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOut] = field(default_factory=list)


def _list_cases(images: Path, task: str, site: str, leave_out: Path | None, series: str | None) -> _Cases:
    if is_federation(images) or any((path / _LISTING).exists() for path in visible_folders(images)):
        raise DataError("holds several sites", site=site, path=images, hint="Give one site's folder.")
    dense = task == "segmentation"
    content = SERIES.scan(images, skip=_skipping(leave_out), take=is_volume_file if dense else is_photograph)
    selection = SERIES.select(content.series if dense else (), series)
    listed = _Cases(left_out=[*content.left_out, *selection.left_out])
    if not dense:
        reason = "a DICOM series, and the model classifies photographs"
        listed.left_out += [LeftOut(one.folders[0], f"{one.text}: {reason}") for one in content.series]
    files = [file for file in content.others if image_suffix(file.name)]
    if content.series:
        beside = [file for file in files if is_photograph(file) and file.parent != images]
        listed.left_out += [LeftOut(file, "a picture beside DICOM series") for file in beside]
        files = [file for file in files if file not in beside]
    for one in selection.chosen:
        place = SERIES.place(one, content.series)
        case = Case(_name_of_series(one, selection.chosen, place, images), place or one.files[0], "")
        listed.cases.append(case)
        if place is None:
            problem = f"its files lie in {len(one.folders)} folders, in which there are other series"
            listed.unclear[case.name] = f"{problem}; put them into one folder"
    listed.cases += _named_cases(files, images, {case.name for case in listed.cases})
    for path, reason in selection.unclear:
        name = _below(path, images) or path.resolve().name
        name = f"{name} ({len(listed.cases) + 1})" if name in {case.name for case in listed.cases} else name
        listed.cases.append(Case(name, path, ""))
        listed.unclear[name] = reason
    if not listed.cases:
        reasons = [f"{_below(path, images) or path.name}: {reason}" for path, reason in listed.left_out]
        more = f" and {len(reasons) - _MOST_NAMED} more" if len(reasons) > _MOST_NAMED else ""
        text = f" ({'; '.join(reasons[:_MOST_NAMED])}{more})" if reasons else ""
        known = f"Known are {known_formats()}, and DICOM series"
        hint = f"{known}; list files of other names in {_LISTING}."
        raise DataError(f"holds no image{text}", site=site, path=images, hint=hint)
    return listed


def _skipping(leave_out: Path | None) -> Callable[[Path], str | None]:
    skipped = leave_out.resolve() if leave_out is not None else None

    def skip(folder: Path) -> str | None:
        if folder.resolve() == skipped:
            return ""
        if (folder / _PREDICTED).exists():
            return "an earlier prediction"
        return "label maps, by its name" if folder.name.lower() in _LABELS else None

    return skip


def _name_of_series(series: Series, chosen: Sequence[Series], place: Path | None, root: Path) -> str:
    """Return a series' folder where no other chosen series lies in it, otherwise folder and identity."""
    folder = series.folders[0] if place is None or not place.is_dir() else place
    alone = sum(other.folders == series.folders for other in chosen) == 1
    if alone and (folder != root or place == root):
        return _below(folder, root) or folder.resolve().name
    parts = [other for other in chosen if other.folders == series.folders and other.uid == series.uid]
    number = f"_{parts.index(series) + 1}" if len(parts) > 1 else ""
    return str(Path(_below(folder, root), (series.uid or "series") + number))


def _below(path: Path, root: Path) -> str:
    """Return a path relative to a folder; empty for the folder itself."""
    name = str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
    return "" if name == "." else name


def _named_cases(paths: Sequence[Path], root: Path | None = None, used: Collection[str] = ()) -> list[Case]:
    """Name cases by their files without suffixes, or with suffixes where two would have one name."""
    names = [_below(path, root) if root is not None else path.resolve().name for path in paths]
    stems = [without_suffix(name) for name in names]
    numbers = Counter([*stems, *used])
    listed = zip(paths, names, stems, strict=True)
    return [Case(stem if numbers[stem] == 1 else name, path, "") for path, name, stem in listed]
