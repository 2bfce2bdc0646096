"""`StudyList`: the site's private list of imported studies, which maps pseudonyms to studies."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.archive import ArchiveSeries, StudyQuery
from medfedaug.hospital.pacs.choice import StudyPlan
from medfedaug.hospital.pacs.settings import ImportSettings
from medfedaug.utils.files import parse_versioned, write_versioned

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

    def modalities(self) -> set[str]:
        """Return the modalities of the imported images."""
        return {name for entry in self.studies.values() for name in entry["modalities"]}

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
    try:
        return parse_versioned(path.read_text(encoding="utf-8"), kind, version)
    except ValueError as error:
        raise ConfigError(f"{path}: not readable; restore it from a copy") from error


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
