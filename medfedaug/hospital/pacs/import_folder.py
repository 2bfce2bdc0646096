"""Folders of an import: the cases of the data folder, the site's list of studies, and withdrawals."""

import re
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medfedaug.data.base import SPLITS, Case, split_patients
from medfedaug.data.dataset_json import LABELLED
from medfedaug.data.preparation.cache import remove_prepared
from medfedaug.errors import ConfigError, config_errors, translated
from medfedaug.hospital.pacs.archive import ArchiveSeries, ArchiveStudy, StudyQuery
from medfedaug.hospital.pacs.choice import StudyPlan
from medfedaug.hospital.pacs.settings import ImportSettings
from medfedaug.utils.files import (
    parse_json,
    parse_versioned,
    private_folder,
    remove_unfinished,
    write_json,
    write_versioned,
)

_FILE, _KIND, _VERSION = "studies.json", "imported-studies", 1
# Choices for refused studies may be made later: imported studies did not need them.
_FREE = ("allow_burned_in", "parallel", "refresh", "labelled", "volume", "overlap", "label_series")


class StudyList:
    """Imported studies and withdrawn patients; only its owner may read the file.

    Several threads may use it. ``studies`` and ``refused`` (studies without an import) have by case its
    patient's pseudonym and identifiers; ``withdrawn`` has by patient the time; ``caches`` are folders of
    prepared images from which withdrawn patients are still to be removed; ``labelled`` are the classes that
    the last import listed without ``--labelled``.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / _FILE
        self._lock = threading.Lock()
        self._content = read_list(self.path, _KIND, _VERSION)
        self.studies: dict[str, Any] = self._content.setdefault("studies", {})
        self.refused: dict[str, Any] = self._content.setdefault("refused", {})
        self.withdrawn: dict[str, str] = self._content.setdefault("withdrawn", {})
        self.caches: list[str] = self._content.setdefault("caches", [])
        self.labelled: list[str] = self._content.setdefault("labelled", [])

    def settle(self, settings: ImportSettings) -> None:
        """Bind the list to the settings that decide over voxels; refuse a change of them."""
        choices = _choices(settings)
        before = self._content.get("settings")
        if self.studies and before != choices:
            raise ConfigError(
                f"{self.path.parent}: its studies were imported with other settings; "
                "give the same ones, or another --out"
            )
        self._content["settings"] = choices

    def enter(
        self, plan: StudyPlan, images: Sequence[ArchiveSeries], units: Sequence[str], shown: Sequence[str]
    ) -> None:
        """Enter an imported study."""
        with self._lock:
            before = self.studies.get(plan.case, {})
            self.studies[plan.case] = {
                **({"split": before["split"]} if "split" in before else {}),
                **_identifiers(plan),
                "SeriesInstanceUID": [series.uid for series in images],
                "modalities": [series.modality for series in images],
                "units": [*units],
                "imported": _now(),
                "shown": [*shown],
            }
            self.refused.pop(plan.case, None)
            self.save()

    def units(self) -> Counter[str]:
        """Count the images by unit, of those that state one."""
        return Counter(unit for entry in self.studies.values() for unit in entry["units"] if unit)

    def begin(self, plan: StudyPlan, segments: Sequence[str] = ()) -> None:
        """Enter a study whose objects are about to come, or the names of the segments that refuse it."""
        with self._lock:
            self.refused[plan.case] = {**_identifiers(plan), "segments": [*segments]}
            self.save()

    def patients_of(self, query: StudyQuery) -> set[str]:
        """Return the patients with a study, imported or not, that matches a query."""
        entries = (*self.studies.values(), *self.refused.values())
        return {entry["patient"] for entry in entries if entry.get(query.key) == query.value}

    def withdraw(self, patients: Sequence[str], caches: Sequence[Path] = ()) -> None:
        """Record that patients are withdrawn, and are to be removed from caches."""
        now = _now()
        for patient in patients:
            self.withdrawn.setdefault(patient, now)
        self.caches += [path for path in map(str, caches) if path not in self.caches]
        self.save()

    def save(self) -> None:
        """Write the file."""
        names = ("settings", "studies", "refused", "withdrawn", "caches")
        content = {name: self._content.get(name) for name in names} | {"labelled": self.labelled}
        write_versioned(self.path, _KIND, _VERSION, content, private=True)


def read_list(path: Path, kind: str, version: int) -> dict[str, Any]:
    """Read a site's list of studies; empty where there is none."""
    if not path.exists():
        return {}
    with config_errors(f"{path}: not readable as a list of studies", remedy="; restore it from a copy"):
        return parse_versioned(path.read_text(encoding="utf-8"), kind, version)


def _identifiers(plan: StudyPlan) -> dict[str, str]:
    """Return the patient's pseudonym, and the values by which a withdrawal may name the study."""
    study = plan.study
    assert study is not None
    return {
        "patient": plan.patient,
        "PatientID": study.patient,
        "AccessionNumber": study.accession,
        "StudyInstanceUID": study.uid,
    }


def _choices(settings: ImportSettings) -> dict[str, Any]:
    """Return the settings that decide over voxels, as JSON keeps them."""
    choices = {key: value for key, value in asdict(settings).items() if key not in _FREE}
    for key, value in choices.items():
        if isinstance(value, dict):  # as pairs: the order of segments decides over overlaps
            choices[key] = [[*pair] for pair in value.items()]
        elif isinstance(value, tuple):
            choices[key] = [*value]
    return choices


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


_OWN_FIELDS = ("labels", LABELLED)
_OWN_OF_ROW = ("image", "label", "patient")


@dataclass(frozen=True)
class CaseFiles:
    """Files of cases in a site's data folder ``out``, and objects with identity in its private ``state``."""

    out: Path
    state: Path

    @property
    def listing(self) -> Path:
        """``dataset.json``."""
        return self.out / "dataset.json"

    def staging(self, case: str) -> Path:
        """Folder to which the objects of a study are fetched."""
        return self.fetching / case

    @property
    def fetching(self) -> Path:
        """Folder of all objects that are being fetched, or that a failed import left."""
        return self.state / "fetching"

    def dicom(self, case: str) -> Path:
        """Folder of the study's objects without identity."""
        return self.out / "dicom" / case

    def images(self, case: str, channels: Collection[str]) -> list[Path]:
        """Image file of a case, or one for each channel."""
        names = [f"{case}_{channel}" for channel in channels] or [case]
        return [self.out / "images" / f"{name}.nii.gz" for name in names]

    def label(self, case: str) -> Path:
        """Label map of a case."""
        return self.out / "labels" / f"{case}.nii.gz"

    def whole(self, case: str, settings: ImportSettings) -> bool:
        """Return whether all files of a case exist."""
        files = self.images(case, settings.channels)
        files += [self.label(case)] if settings.outlined else []
        kept = self.dicom(case).is_dir() or not settings.anonymise
        return kept and all(file.is_file() for file in files)

    def remove_unfinished(self) -> None:
        """Remove files that a killed process left unfinished."""
        for kind in ("images", "labels"):
            remove_unfinished(self.out / kind)

    def of(self, case: str) -> list[Path]:
        """Images and label map of a case; the label map even where an interrupted withdrawal removed it."""
        pattern = re.compile(rf"{re.escape(case)}(_.+)?\.nii\.gz")
        folders = [self.out / "images", self.out / "labels"]
        files = [file for folder in folders if folder.is_dir() for file in sorted(folder.iterdir())]
        return [self.label(case), *(file for file in files if pattern.fullmatch(file.name))]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against other imports and withdrawals; `ConfigError` where one has the lock."""
        private_folder(self.state)
        busy = ConfigError(f"{self.out}: another import writes to it; wait for its end")
        with translated(Timeout, to=lambda error: busy), FileLock(self.state / "import.lock", timeout=0):
            yield

    def remove(self, case: str) -> None:
        """Remove all files of a case."""
        for file in self.of(case):
            file.unlink(missing_ok=True)
        for folder in (self.dicom(case), self.staging(case)):
            shutil.rmtree(folder, ignore_errors=True)

    def write_listing(self, studies: StudyList, settings: ImportSettings) -> None:
        """Write ``dataset.json``, split by patient; a patient stays in the split of an earlier list.

        Fields that no import writes are kept, in the list and in its rows. ``labelled`` is that of the
        settings; else that of the list, if a person wrote it; else the classes that some label map shows,
        where one shows none of a class.
        """
        entries = studies.studies
        cases = [
            Case(case, self.images(case, settings.channels)[0], "", patient=entry["patient"])
            for case, entry in sorted(entries.items())
            if self.whole(case, settings)
        ]
        before = self.content()
        if not cases and not before:
            return
        split = self._split(cases, entries, before)
        for entry in entries.values():
            if "training" in split.values() and entry["patient"] in split:
                entry["split"] = split[entry["patient"]]
        content = {name: value for name, value in before.items() if name not in (*_OWN_FIELDS, *SPLITS)}
        content["labels"] = {str(number): name for number, name in enumerate(settings.classes)}
        modalities = {name for entry in entries.values() for name in entry["modalities"]}
        if settings.channels:
            content["channel_names"] = {str(number): name for number, name in enumerate(settings.channels)}
        elif modalities == {"CT"}:  # plans normalise it by its units
            content.setdefault("channel_names", {"0": "CT"})
        if labelled := _labelled(before, studies, settings):
            content[LABELLED] = labelled
        rows = {str(row.get("image")): row for part in SPLITS for row in before.get(part, ())}
        for part in SPLITS:
            content[part] = [self._row(case, settings, rows) for case in cases if split[case.patient] == part]
        write_json(self.listing, content, private=True)

    def content(self) -> dict[str, Any]:
        """Read ``dataset.json``; empty where there is none."""
        if not self.listing.is_file():
            return {}
        content: dict[str, Any] = parse_json(self.listing.read_text(encoding="utf-8"))
        return content

    def _row(
        self, case: Case, settings: ImportSettings, before: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        images = [f"images/{file.name}" for file in self.images(case.name, settings.channels)]
        image = images if settings.channels else images[0]
        label = {"label": f"labels/{case.name}.nii.gz"} if settings.outlined else {}
        kept = {key: v for key, v in before.get(str(image), {}).items() if key not in _OWN_OF_ROW}
        return {"image": image, **label, "patient": case.patient, **kept}

    def _split(
        self, cases: Sequence[Case], studies: Mapping[str, Mapping[str, Any]], before: Mapping[str, Any]
    ) -> dict[str, str]:
        known = {entry["patient"]: entry["split"] for entry in studies.values() if "split" in entry}
        if before.get("training"):
            known |= {row["patient"]: part for part in SPLITS for row in before.get(part, ())}
        new = [case for case in cases if case.patient not in known]
        if known and len({case.patient for case in new}) < len(SPLITS):
            parts: Mapping[str, Sequence[Case]] = {"training": new}
        else:
            parts = split_patients(self.out.resolve().name, new)
        return known | {case.patient: part for part, members in parts.items() for case in members}

    def unlist(self, patients: Collection[str]) -> None:
        """Take patients off ``dataset.json``."""
        if not (content := self.content()):
            return
        for part in SPLITS:
            content[part] = [row for row in content.get(part, []) if row.get("patient") not in patients]
        write_json(self.listing, content, private=True)


def _labelled(before: Mapping[str, Any], studies: StudyList, settings: ImportSettings) -> list[str]:
    """Return the classes under ``labelled``; empty where the site has outlined all."""
    if settings.labelled or not settings.outlined:
        studies.labelled = []
        return [*settings.labelled] if {*settings.labelled} != {*settings.classes[1:]} else []
    if LABELLED in before and before[LABELLED] != studies.labelled:
        return [*before[LABELLED]]
    shown = {name for entry in studies.studies.values() for name in entry.get("shown", ())}
    labelled = [name for name in settings.classes[1:] if name in shown]
    studies.labelled = labelled if len(labelled) < len(settings.classes) - 1 else []
    return studies.labelled


@dataclass(frozen=True)
class Withdrawal:
    """Number of removed cases by pseudonym of the patient, and number of queries without a study."""

    removed: dict[str, int]
    unmatched: int


def withdraw(
    queries: Sequence[StudyQuery],
    out: Path,
    state: Path,
    pseudonym: Callable[[str, str], str],
    caches: Sequence[Path] = (),
) -> Withdrawal:
    """Remove the patients of the named studies, and record the withdrawal.

    This removes images, label maps, objects, prepared images, entries of lists, and objects of failed
    imports. The record, which has only pseudonyms and times, comes first: after a killed process, the next
    import or withdrawal finishes the removal. A later import leaves the patients out.
    """
    files = CaseFiles(out, state)
    if not StudyList(state).path.is_file():
        raise ConfigError(f"{state}: holds no list of imported studies; name its folder with --state")
    with files.locked():
        studies = StudyList(state)
        matches = [studies.patients_of(query) for query in queries]
        patients = sorted(set[str]().union(*matches))
        unmatched = sum(
            not persons and not _is_withdrawn(query, studies, pseudonym)
            for query, persons in zip(queries, matches, strict=True)
        )
        studies.withdraw(patients, [path.resolve() for path in caches])
        return Withdrawal(dict.fromkeys(patients, 0) | finish_withdrawals(studies, files), unmatched)


def _is_withdrawn(query: StudyQuery, studies: StudyList, pseudonym: Callable[[str, str], str]) -> bool:
    """Return whether a query names a withdrawn patient, of whom the list keeps only the pseudonym."""
    person = ArchiveStudy("", query.value).person
    return query.key == "PatientID" and pseudonym(person, "patient") in studies.withdrawn


def finish_withdrawals(studies: StudyList, files: CaseFiles) -> dict[str, int]:
    """Remove the listed cases of withdrawn patients, and count them by the pseudonym."""
    files.remove_unfinished()
    patients = {case: entry["patient"] for case, entry in studies.studies.items()}
    gone = {case: patient for case, patient in patients.items() if patient in studies.withdrawn}
    files.unlist({*gone.values()})
    removed: dict[str, int] = dict.fromkeys(sorted(gone.values()), 0)
    images = [file for case in gone for file in files.of(case)]
    for cache in studies.caches if gone else ():
        remove_prepared(Path(cache), images)
    for case, patient in gone.items():
        files.remove(case)
        removed[patient] += 1
    # Last: a case in the list is not yet removed.
    for case in gone:
        del studies.studies[case]
    refused = [case for case, entry in studies.refused.items() if entry["patient"] in studies.withdrawn]
    for case in refused:
        files.remove(case)
        del studies.refused[case]
    if gone or refused or studies.caches:
        studies.caches.clear()
        studies.save()
    return removed
