"""`CaseFiles`: the files of an import's cases, and the list of the cases."""

import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medfedaug.data.base import SPLITS, Case, split_patients
from medfedaug.data.dataset_json import LABELLED
from medfedaug.errors import ConfigError
from medfedaug.hospital.pacs.import_settings import ImportSettings
from medfedaug.hospital.pacs.study_list import StudyList
from medfedaug.utils.files import parse_json, private_folder, remove_unfinished, write_json

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
        try:
            with FileLock(self.state / "import.lock", timeout=0):
                yield
        except Timeout as error:
            raise ConfigError(f"{self.out}: another import writes to it; wait for its end") from error

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
        if settings.channels:
            content["channel_names"] = {str(number): name for number, name in enumerate(settings.channels)}
        elif studies.modalities() == {"CT"}:  # plans normalise it by its units
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
        self,
        case: Case,
        settings: ImportSettings,
        before: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Any]:
        images = [f"images/{file.name}" for file in self.images(case.name, settings.channels)]
        image = images if settings.channels else images[0]
        label = {"label": f"labels/{case.name}.nii.gz"} if settings.outlined else {}
        kept = {key: v for key, v in before.get(str(image), {}).items() if key not in _OWN_OF_ROW}
        return {"image": image, **label, "patient": case.patient, **kept}

    def _split(
        self, cases: Sequence[Case], studies: Mapping[str, Mapping[str, Any]], before: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return the split of each patient."""
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
