"""`StudyList`: the site's own list of imported studies, which says which pseudonym is which study."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from medfedaug.data.pacs.archive import STUDY_KEYS, Wanted
from medfedaug.data.pacs.choice import ImportSettings, Planned
from medfedaug.errors import ConfigError
from medfedaug.utils.files import parse_versioned, write_versioned

__all__ = ["StudyList"]

_FILE, _KIND, _VERSION = "studies.json", "imported-studies", 1
_FREE = ("allow_burned_in", "parallel")


class StudyList:
    """Imported studies and withdrawn patients; the file may be read by its owner alone.

    Safe to be used by several threads.

    Args:
        state: folder of the file.

    Attributes:
        path: the file.
        studies: by case its patient's pseudonym, identifiers, and series.
        withdrawn: by patient the time.
        caches: folders of prepared images, as long as withdrawn patients are to be removed from them.

    Raises:
        ConfigError: where the file cannot be read.
    """

    def __init__(self, state: Path) -> None:
        self.path = state / _FILE
        self._lock = threading.Lock()
        self._content: dict[str, Any] = {"settings": None, "studies": {}, "withdrawn": {}, "caches": []}
        if self.path.exists():
            try:
                self._content = parse_versioned(self.path.read_text(encoding="utf-8"), _KIND, _VERSION)
            except ValueError as error:
                raise ConfigError(f"{self.path}: not readable; restore it from a copy") from error
        self.studies: dict[str, Any] = self._content["studies"]
        self.withdrawn: dict[str, str] = self._content["withdrawn"]
        self.caches: list[str] = self._content["caches"]

    def settle(self, settings: ImportSettings) -> None:
        """Bind the list to the settings that decide over voxels.

        Raises:
            ConfigError: where its studies were imported with others.
        """
        # Pairs in place of mappings: the order of segments is that of the classes.
        choices = {
            key: [[*pair] for pair in value.items()] if isinstance(value, dict) else value
            for key, value in asdict(settings).items()
            if key not in _FREE
        }
        if self._content["settings"] not in (None, choices):
            raise ConfigError(
                f"{self.path.parent}: its studies were imported with other settings; "
                "give the same ones, or another --out"
            )
        self._content["settings"] = choices

    def enter(self, plan: Planned, series: Sequence[str]) -> None:
        """Enter an imported study, with the UIDs of the series of its image."""
        if plan.study is None:
            return
        entry = {
            "patient": plan.patient,
            "PatientID": plan.study.patient,
            "AccessionNumber": plan.study.accession,
            "StudyInstanceUID": plan.study.uid,
            "SeriesInstanceUID": [*series],
        }
        with self._lock:
            self.studies[plan.case] = entry
            self.save()

    def patients_of(self, wanted: Sequence[Wanted]) -> set[str]:
        """Return the patients of whom a study has one of some values."""
        values = {(one.key, one.value) for one in wanted}
        return {
            entry["patient"]
            for entry in self.studies.values()
            if any((key, entry.get(key)) in values for key in STUDY_KEYS)
        }

    def withdraw(self, patients: Sequence[str], caches: Sequence[Path] = ()) -> None:
        """Record that patients are withdrawn, and are to be removed from caches, too."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        for patient in patients:
            self.withdrawn.setdefault(patient, now)
        self.caches += [path for path in map(str, caches) if path not in self.caches]
        self.save()

    def save(self) -> None:
        """Write the file."""
        content = {key: self._content[key] for key in ("settings", "studies", "withdrawn", "caches")}
        write_versioned(self.path, _KIND, _VERSION, content, private=True)
