"""Open the archive that a user names: a folder (`FolderArchive`), or one in the network."""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydicom import Dataset

from medfedaug.errors import ConfigError, ReaderError
from medfedaug.hospital.dicom.headers import is_dicom_file
from medfedaug.hospital.pacs.archive import (
    SERIES_FIELDS,
    STUDY_FIELDS,
    Access,
    Archive,
    ArchiveError,
    ArchiveSeries,
    valid_uid,
)
from medfedaug.hospital.pacs.object_check import OBJECT_TAGS, SeriesBounds, read_values
from medfedaug.utils.plugins import import_extra

_TAGS = [*STUDY_FIELDS, *SERIES_FIELDS, *OBJECT_TAGS, "ImageType"]


class _File(NamedTuple):
    path: Path
    values: dict[str, str]


_Index = dict[tuple[str, str], dict[str, _File]]  # by UIDs of study and series, and of the object


class FolderArchive(Archive):
    """Folder with DICOM files of any names.

    Headers are read once, at the first search. Other files, and damaged ones, are skipped.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder")
        self.place = str(folder)
        self._folder = folder
        self._index: _Index | None = None
        self._lock = threading.Lock()

    def _find(self, level: str, fields: Sequence[str], most: int, **keys: str) -> list[dict[str, str]]:
        index = self._indexed()
        if level == "IMAGE":
            files = index.get((keys["StudyInstanceUID"], keys["SeriesInstanceUID"]), {})
            return [{"SOPInstanceUID": uid} for uid in files]
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for (study, series), files in index.items():
            if level == "STUDY" or study == keys["StudyInstanceUID"]:
                number = {"NumberOfSeriesRelatedInstances": str(len(files))}
                first = next(iter(files.values())).values
                rows.setdefault((study, "" if level == "STUDY" else series), {**first, **number})
        return [*rows.values()]

    def fetch(
        self, series: ArchiveSeries, folder: Path, on_instance: Callable[[], object] = lambda: None
    ) -> list[Path]:
        """Link the files of a series into a folder, without copies."""
        bounds = SeriesBounds(series)
        folder.mkdir(parents=True, exist_ok=True)
        uids, files = self._find_objects(series), self._indexed()[series.study, series.uid]
        linked = []
        for index, uid in enumerate(uids):
            bounds.check(files[uid].values, files[uid].path.stat().st_size)
            target = folder / f"{index:06d}.dcm"
            target.unlink(missing_ok=True)
            os.symlink(files[uid].path.resolve(), target)
            linked.append(target)
            on_instance()
        return linked

    def _store(self, dataset: Dataset) -> bool:
        raise ArchiveError(f"{self.place} is a folder, which stores nothing; name an archive instead")

    def close(self) -> None:
        """Forget the index."""
        self._index = None

    def _indexed(self) -> _Index:
        with self._lock:
            if self._index is None:
                self._index = _read_folder(self._folder)
            return self._index


def _read_folder(folder: Path) -> _Index:
    index: _Index = defaultdict(dict)
    for root, folders, names in os.walk(folder):
        folders.sort()
        for path in filter(is_dicom_file, (Path(root) / name for name in sorted(names))):
            with suppress(ReaderError, OSError):
                values = read_values(path, _TAGS)
                study, series, uid = (values[f"{name}InstanceUID"] for name in ("Study", "Series", "SOP"))
                if valid_uid(study) and valid_uid(series) and valid_uid(uid):
                    index[study, series].setdefault(uid, _File(path, values))  # a copy is the same object
    return index


def open_archive(
    *,
    dicomweb: str | None = None,
    dimse: str | None = None,
    folder: str | Path | None = None,
    access: Access | None = None,
) -> Archive:
    """Open the archive of the one address that is given."""
    addresses = {"--dicomweb": dicomweb, "--dimse": dimse, "--folder": folder}
    names = [name for name, value in addresses.items() if value]
    if len(names) != 1:
        text = " and ".join(names) or "no archive"
        raise ConfigError(f"{text} given; give one of --dicomweb URL, --dimse AET@HOST:PORT or --folder DIR")
    access = access or Access()
    if dicomweb:
        import_extra("dicomweb_client", "pacs", "--dicomweb")
        from medfedaug.hospital.pacs.dicomweb import DicomWebArchive

        return DicomWebArchive(dicomweb, access)
    if dimse:
        import_extra("pynetdicom", "pacs", "--dimse")
        from medfedaug.hospital.pacs.dimse import DimseArchive

        return DimseArchive(dimse, access)
    return FolderArchive(Path(str(folder)))
