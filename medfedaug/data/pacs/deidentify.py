"""`Deidentifier`: DICOM objects without identity, by the basic profile of the standard.

PS3.15 Annex E, table E.1-1, as the package dicom-anonymizer ships it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import pydicom
from dicomanonymizer.dicomfields_selector import dicom_anonymization_database_selector
from pydicom.datadict import dictionary_has_tag
from pydicom.dataset import FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import PYDICOM_IMPLEMENTATION_UID

from medfedaug._version import __version__
from medfedaug.utils.files import private_folder, write_atomic

if TYPE_CHECKING:
    from pydicom import DataElement, Dataset

__all__ = ["Deidentifier"]

_EDITION = "2026c"
# Of actions that depend on the type of an attribute in its object, the one that keeps the object valid.
_ACTIONS = {
    "D_TAGS": "D",
    "Z_TAGS": "Z",
    "X_TAGS": "X",
    "U_TAGS": "U",
    "Z_D_TAGS": "D",
    "X_Z_TAGS": "Z",
    "X_D_TAGS": "D",
    "X_Z_D_TAGS": "D",
    "X_Z_U_STAR_TAGS": "K",  # a reference, whose UIDs are replaced
}
_DUMMIES: dict[str, Any] = {
    "AS": "000Y",
    "DA": "19000101",
    "DS": "0",
    "DT": "19000101000000",
    "IS": "0",
    "TM": "000000",
    **dict.fromkeys(("FD", "FL", "SL", "SS", "UL", "US", "SV", "UV"), 0),
    **dict.fromkeys(("AE", "CS", "LO", "LT", "PN", "SH", "ST", "UC", "UT"), "REMOVED"),
    **dict.fromkeys(("OB", "OW", "UN"), b"\0\0"),
}
# Values that a person types, in attributes that the table does not know.
_FREE = ("LT", "PN", "ST", "UC", "UT")
_PROFILE = ("113100", "DCM", "Basic Application Confidentiality Profile")


class _Range(NamedTuple):
    """Repeating groups: tags whose masked bits are these."""

    group: int
    element: int
    group_mask: int
    element_mask: int

    def holds(self, tag: pydicom.tag.BaseTag) -> bool:
        return (
            tag.group & self.group_mask == self.group & self.group_mask
            and tag.element & self.element_mask == self.element & self.element_mask
        )


@cache
def _table() -> tuple[dict[int, str], list[_Range]]:
    """The action of each tag, and the repeating groups that are removed."""
    actions: dict[int, str] = {}
    removed: set[_Range] = set()
    for name, tags in dicom_anonymization_database_selector(f"dicomfields_{_EDITION}").items():
        for tag in tags if name in _ACTIONS else ():
            if len(tag) == 2:
                actions[tag[0] << 16 | tag[1]] = _ACTIONS[name]
            else:
                removed.add(_Range(*tag))
    return actions, sorted(removed)


class Deidentifier:
    """Takes identity out of objects, also out of items of sequences.

    Private attributes are removed, and so are attributes that the dictionary of the standard does not know.
    A UID has the same successor in every object, so that references between objects hold.

    Deviations: an attribute for which the table names several actions gets the one that is valid in every
    object. A sequence for which it wants a dummy is removed. Names of persons and long texts that it does not
    mention are removed, too. Segments and regions, of whose names it mentions some, get the names of classes.

    Args:
        new_uid: of a UID, the one in its place.
        name_of: of the name of a segment or a region, the one in its place; ``None`` for a number.
    """

    def __init__(
        self, new_uid: Callable[[str], str], name_of: Callable[[str], str | None] = lambda name: None
    ) -> None:
        self._new_uid, self._name_of = new_uid, name_of

    def write(self, files: Iterable[Path], folder: Path, *, patient: str, study: str) -> list[Path]:
        """Write the objects of files without identity, each named by its new UID.

        Args:
            files: DICOM files.
            folder: is made where it is missing.
            patient: pseudonym, as PatientID and PatientName.
            study: text, as StudyID.

        Returns:
            The files.

        Raises:
            StorageError: when one cannot be written.
            Exception: whatever pydicom raises for a damaged object.
        """
        private_folder(folder)
        written = []
        for file in files:
            dataset = pydicom.dcmread(file)
            self.clean(dataset, patient=patient, study=study)
            target = folder / f"{dataset.SOPInstanceUID}.dcm"
            write_atomic(target, partial(_write, dataset), private=True)
            written.append(target)
        return written

    def clean(self, dataset: Dataset, *, patient: str, study: str) -> None:
        """Take identity out of an object in place.

        Args:
            dataset: the object, with its ``file_meta``.
            patient: pseudonym, as PatientID and PatientName.
            study: text, as StudyID.
        """
        segments, regions = dataset.get("SegmentSequence") or (), dataset.get("StructureSetROISequence") or ()
        names = [
            *((one, "SegmentLabel", self._name_of(str(one.get("SegmentLabel", "")))) for one in segments),
            *((one, "ROIName", self._name_of(str(one.get("ROIName", "")))) for one in regions),
        ]
        self._clean(dataset)
        for number, (one, attribute, name) in enumerate(names, 1):
            setattr(one, attribute, name or f"segment {number}")
        dataset.PatientID, dataset.PatientName, dataset.StudyID = patient, patient, study[:16]
        dataset.PatientIdentityRemoved = "YES"
        dataset.LongitudinalTemporalInformationModified = "REMOVED"
        tool = f"medfedaug {__version__}, dicom-anonymizer {version('dicom-anonymizer')}"
        dataset.DeidentificationMethod = f"PS3.15 E.1-1 {_EDITION}; {tool}"[:64]
        value, scheme, meaning = _PROFILE
        code = pydicom.Dataset()
        code.CodeValue, code.CodingSchemeDesignator, code.CodeMeaning = value, scheme, meaning
        dataset.DeidentificationMethodCodeSequence = Items([code])
        syntax = dataset.file_meta.TransferSyntaxUID
        dataset.file_meta = FileMetaDataset()
        dataset.file_meta.TransferSyntaxUID = syntax
        dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
        dataset.file_meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
        dataset.file_meta.ImplementationClassUID = PYDICOM_IMPLEMENTATION_UID
        dataset.preamble = b"\0" * 128

    def _clean(self, dataset: Dataset) -> None:
        actions, removed = _table()
        for tag in [*dataset.keys()]:
            action = actions.get(int(tag))
            known = not tag.is_private and dictionary_has_tag(tag)
            if not known or action == "X" or any(one.holds(tag) for one in removed):
                del dataset[tag]
                continue
            element = dataset[tag]
            if action == "D" and element.VR not in _DUMMIES and element.VR != "UI":
                del dataset[tag]
            elif action == "Z" or (action is None and element.VR in _FREE):
                element.clear()
            elif action == "U" or (action == "D" and element.VR == "UI"):
                element.value = self._replaced(element)
            elif action == "D":
                element.value = _DUMMIES[element.VR]
            elif element.VR == "SQ":
                for item in element.value:
                    self._clean(item)

    def _replaced(self, element: DataElement) -> Any:
        if not element.value:
            return element.value
        if element.VM > 1:
            return [self._new_uid(str(one)) for one in element.value]
        return self._new_uid(str(element.value))


def _write(dataset: Dataset, file: IO[bytes]) -> None:
    pydicom.dcmwrite(file, dataset, enforce_file_format=True)
