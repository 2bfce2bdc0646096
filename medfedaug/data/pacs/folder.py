"""`FolderArchive`: DICOM files in a folder of any depth, as an archive, a CD or an export leaves them."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pydicom

from medfedaug.data.io.dicom_bounds import check_bounds
from medfedaug.data.io.dicom_headers import is_dicom_file
from medfedaug.data.pacs.archive import (
    OBJECT_FIELDS,
    SERIES_FIELDS,
    STUDY_FIELDS,
    Archive,
    ArchiveError,
    FetchError,
    FoundSeries,
    FoundStudy,
    Wanted,
    in_order,
    known_fields,
    matching,
    valid_uid,
)
from medfedaug.data.pacs.object_check import OBJECT_TAGS, SeriesBounds
from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    from pydicom import Dataset

_TAGS = [*STUDY_FIELDS, *SERIES_FIELDS, *OBJECT_TAGS, "ImageType"]


class _File(NamedTuple):
    path: Path
    values: dict[str, str]


@dataclass
class _Contents:
    """Index of a folder."""

    studies: dict[str, FoundStudy] = field(default_factory=dict)
    series: dict[tuple[str, str], FoundSeries] = field(default_factory=dict)
    files: dict[tuple[str, str], dict[str, _File]] = field(default_factory=lambda: defaultdict(dict))


class FolderArchive(Archive):
    """Folder with DICOM files of any names.

    Headers are read once, when a study is first asked for. Files that are no DICOM, or damaged, are passed
    over.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder")
        self.place = str(folder)
        self._folder = folder
        self._contents: _Contents | None = None
        self._lock = threading.Lock()

    def find_studies(self, wanted: Wanted) -> list[FoundStudy]:
        """Find studies by the headers of the files."""
        return matching(self._indexed().studies.values(), wanted)

    def find_series(self, study: FoundStudy) -> list[FoundSeries]:
        """Find series by the headers of the files."""
        contents = self._indexed()
        return in_order(
            replace(one, instances=len(contents.files[key]), patient=study.patient, issuer=study.issuer)
            for key, one in contents.series.items()
            if one.study == study.uid
        )

    def find_objects(self, series: FoundSeries) -> dict[str, dict[str, str]]:
        """List objects by the headers of the files."""
        files = self._indexed().files.get((series.study, series.uid), {})
        return {
            uid: known_fields(_header(file.path, [*OBJECT_FIELDS]), OBJECT_FIELDS)
            for uid, file in files.items()
        }

    def fetch(
        self, series: FoundSeries, folder: Path, on_instance: Callable[[], object] | None = None
    ) -> list[Path]:
        """Link the files of a series into a folder; nothing is copied."""
        bounds = SeriesBounds(series)
        folder.mkdir(parents=True, exist_ok=True)
        files = self._indexed().files.get((series.study, series.uid), {})
        if not files:
            raise FetchError("the folder holds no file of it")
        linked = []
        for index, uid in enumerate(sorted(files)):
            bounds.check(files[uid].values, files[uid].path.stat().st_size)
            target = folder / f"{index:06d}.dcm"
            target.unlink(missing_ok=True)
            os.symlink(files[uid].path.resolve(), target)
            linked.append(target)
            if on_instance is not None:
                on_instance()
        return linked

    def store(self, datasets: Iterable[Dataset]) -> None:
        """Refuse: a folder is read alone.

        Raises:
            ArchiveError: always.
        """
        raise ArchiveError(f"{self.place} is a folder, which stores nothing; name an archive in its place")

    def close(self) -> None:
        """Forget the index."""
        self._contents = None

    def _indexed(self) -> _Contents:
        with self._lock:
            if self._contents is None:
                self._contents = _index(self._folder)
            return self._contents


def _index(folder: Path) -> _Contents:
    contents = _Contents()
    for root, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(root) / name for name in sorted(names)):
            if not is_dicom_file(path):
                continue
            try:
                check_bounds(path)
                header = _header(path, _TAGS)
                values = {name: str(header.get(name) or "").strip() for name in _TAGS}
            except Exception:  # a damaged header fails anywhere in pydicom
                continue
            _enter(contents, path, values)
    return contents


def _header(path: Path, tags: list[str]) -> Dataset:
    return pydicom.dcmread(path, stop_before_pixels=True, force=True, specific_tags=tags)


def _enter(contents: _Contents, path: Path, values: dict[str, str]) -> None:
    study, series, uid = (values[f"{name}InstanceUID"] for name in ("Study", "Series", "SOP"))
    if not (valid_uid(study) and valid_uid(series) and valid_uid(uid)):
        return
    contents.studies.setdefault(study, FoundStudy.of_values(values))
    contents.series.setdefault((study, series), FoundSeries.of_values(FoundStudy(study), values))
    contents.files[study, series].setdefault(uid, _File(path, values))  # a copy elsewhere is the same object
