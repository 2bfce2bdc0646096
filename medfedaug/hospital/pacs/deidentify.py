"""`Deidentifier`: reduce DICOM objects to the attributes of a list.

The list is `medfedaug.hospital.pacs.kept_attributes`. Attributes that table E.1-1 of PS3.15 removes go even
where the list has them; dicom-anonymizer ships the table.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import pydicom
from dicomanonymizer.dicomfields_selector import dicom_anonymization_database_selector
from pydicom import DataElement, Dataset
from pydicom.datadict import dictionary_has_tag, dictionary_keyword, dictionary_VR
from pydicom.dataset import FileMetaDataset
from pydicom.multival import MultiValue
from pydicom.pixels import pack_bits
from pydicom.sequence import Sequence as Items
from pydicom.sr.codedict import Collection
from pydicom.uid import PYDICOM_IMPLEMENTATION_UID, ExplicitVRLittleEndian, UID_dictionary

from medfedaug._version import __version__
from medfedaug.errors import ReaderError
from medfedaug.hospital.dicom.headers import SECONDARY_CAPTURES, dataset_of, items_of
from medfedaug.hospital.dicom.pixel_format import PixelFormat
from medfedaug.hospital.dicom.pixels import stored_frames, syntax_of
from medfedaug.hospital.pacs.kept_attributes import (
    DUMMIES,
    EMPTIED,
    LABELS,
    TABLE,
    TERMS,
    kept_attributes,
)
from medfedaug.utils.files import private_folder, write_atomic

_EDITION = "2026c"
_REMOVED = ("D_TAGS", "Z_TAGS", "X_TAGS", "Z_D_TAGS", "X_Z_TAGS", "X_D_TAGS", "X_Z_D_TAGS")
_NUMBERS = ("AT", "DS", "FD", "FL", "IS", "SL", "SS", "SV", "UL", "US", "UV")
_WORDS = ("CS", "LO")
_CODE_VALUES = ("CodeValue", "LongCodeValue", "URNCodeValue")
_SCHEMES = ("DCM", "SCT", "FMA")
_NO_CODE = ("REMOVED", "99MEDFEDAUG", "Removed")
_PROFILE = ("113100", "DCM", "Basic Application Confidentiality Profile")


@cache
def _removed_by_standard() -> frozenset[int]:
    """Return the tags of attributes that table E.1-1 removes, empties or replaces."""
    table = dicom_anonymization_database_selector(f"dicomfields_{_EDITION}")
    return frozenset(tag[0] << 16 | tag[1] for name in _REMOVED for tag in table[name] if len(tag) == 2)


@cache
def _known_codes() -> dict[tuple[str, str], str]:
    """Return the meanings of the codes of the standard's context groups."""
    codes = [code for scheme in _SCHEMES for code in Collection(scheme).concepts.values()]
    return {(code.value, code.scheme_designator): code.meaning for code in codes}


class Deidentifier:
    """Removes identity from objects and from the items of their sequences.

    An object keeps the attributes in the list of its class, each of the type that the standard gives it:
    numbers, words of a list, and UIDs. A UID has the same successor in every object, so that references hold;
    UIDs of the standard stay. Codes stay if the standard's context groups have them, with the meaning there.
    Segments and regions get the names of classes. Pixels keep only their values, uncompressed.

    Deviations: the list is stricter than the basic profile of PS3.15. A required attribute is empty, or has a
    dummy; a required sequence is missing, where the list does not name it.

    Args:
        new_uid: replaces a UID.
        name_of: replaces the name of a segment or a region, by a number where it returns ``None``.
    """

    def __init__(
        self, new_uid: Callable[[str], str], name_of: Callable[[str], str | None] = lambda name: None
    ) -> None:
        self._new_uid, self._name_of = new_uid, name_of

    def write(self, files: Iterable[Path], folder: Path, *, patient: str, study: str) -> list[Path]:
        """Write the objects of files without identity, each named by its new UID, and return the files."""
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
        """Remove identity from an object in place."""
        kept = kept_attributes(str(dataset.SOPClassUID))
        sequences = (("SegmentSequence", "SegmentLabel"), ("StructureSetROISequence", "ROIName"))
        names = [
            (item, attribute, self._name_of(str(item.get(attribute, ""))))
            for sequence, attribute in sequences
            for item in items_of(dataset, sequence)
        ]
        if "PixelData" in dataset:
            _clean_pixels(dataset)
        if dataset.get("SegmentationType") == "LABELMAP":
            dataset.PhotometricInterpretation = "MONOCHROME2"  # without its palette
        may_hold_text = _may_hold_text(dataset)
        self._clean(dataset, kept)
        for number, (item, attribute, name) in enumerate(names, 1):
            setattr(item, attribute, name or f"segment {number}")
        dataset.SpecificCharacterSet = "ISO_IR 192"
        dataset.PatientID, dataset.PatientName, dataset.StudyID = patient, patient, study[:16]
        dataset.PatientIdentityRemoved = "NO" if may_hold_text else "YES"
        dataset.LongitudinalTemporalInformationModified = "REMOVED"
        tool = f"medfedaug {__version__}, dicom-anonymizer {version('dicom-anonymizer')}"
        dataset.DeidentificationMethod = f"PS3.15 E.1-1 {_EDITION}; {tool}"[:64]
        dataset.DeidentificationMethodCodeSequence = Items([_code(*_PROFILE)])
        dataset.file_meta = _file_meta(dataset)
        dataset.preamble = b"\0" * 128

    def _clean(self, dataset: Dataset, kept: frozenset[str]) -> None:
        """Keep the attributes of a list in an object or an item of a sequence."""
        for tag in [*dataset.keys()]:
            name = dictionary_keyword(tag) if not tag.is_private and dictionary_has_tag(tag) else ""
            if name in EMPTIED:
                dataset[tag] = pydicom.DataElement(tag, _types_of(tag)[0], None)
            elif name in DUMMIES:
                setattr(dataset, name, DUMMIES[name])
            elif name not in kept or not self._keep(dataset[tag], name, kept):
                del dataset[tag]

    def _keep(self, element: DataElement, name: str, kept: frozenset[str]) -> bool:
        """Remove identity from the value of an attribute; return whether to keep the attribute."""
        if element.VR not in _types_of(element.tag):
            return False
        if name in LABELS:  # of segments and regions, which `clean` names
            element.clear()
            return True
        if name in ("PixelData", "LUTData"):  # which other functions clean
            return True
        if int(element.tag) in _removed_by_standard():
            return False
        if element.VR == "SQ":
            for item in element.value:
                self._clean_item(item, TABLE if name == "ModalityLUTSequence" else kept - {"PixelData"})
        elif element.VR == "UI":
            element.value = _each(element.value, self._successor)
        elif element.VR in _WORDS:
            element.value = [str(word) for word in _listed(element.value) if str(word) in TERMS]
            return bool(element.value)
        else:
            return element.VR in _NUMBERS
        return True

    def _clean_item(self, item: Dataset, kept: frozenset[str]) -> None:
        if any(value in item for value in _CODE_VALUES):
            _clean_code(item)
            return
        self._clean(item, kept)

    def _successor(self, uid: Any) -> str:
        return str(uid) if str(uid) in UID_dictionary or not uid else self._new_uid(str(uid))


def _types_of(tag: pydicom.tag.BaseTag) -> list[str]:
    """Return the value representations that the standard gives an attribute."""
    return dictionary_VR(tag).split(" or ")


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, MultiValue) else [] if value is None else [value]


def _each(value: Any, new: Callable[[Any], str]) -> Any:
    return [*map(new, value)] if isinstance(value, MultiValue) else new(value) if value else value


def _clean_code(item: Dataset) -> None:
    """Replace an item by the standard's code, with its meaning there, or by `_NO_CODE`."""
    value, scheme = str(item.get("CodeValue", "")), str(item.get("CodingSchemeDesignator", ""))
    meaning = _known_codes().get((value, scheme))
    item.clear()
    item.update(_code(value, scheme, meaning[:64]) if meaning else _code(*_NO_CODE))


def _code(value: str, scheme: str, meaning: str) -> Dataset:
    return dataset_of(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)


def _may_hold_text(dataset: Dataset) -> bool:
    """Return whether pixels may identify the patient."""
    annotation = str(dataset.get("BurnedInAnnotation", "")).strip().upper()
    return annotation == "YES" or (annotation != "NO" and str(dataset.SOPClassUID) in SECONDARY_CAPTURES)


def _file_meta(dataset: Dataset) -> FileMetaDataset:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = dataset.file_meta.TransferSyntaxUID
    meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    meta.MediaStorageSOPInstanceUID = dataset.SOPInstanceUID
    meta.ImplementationClassUID = PYDICOM_IMPLEMENTATION_UID
    return meta


def _write(dataset: Dataset, file: IO[bytes]) -> None:
    pydicom.dcmwrite(file, dataset, enforce_file_format=True)


def _clean_pixels(dataset: Dataset) -> None:
    """Write the values anew, uncompressed: unused bits, comments and other bytes may name the patient."""
    values, form = stored_frames(dataset), PixelFormat.of(dataset)
    if not syntax_of(dataset).is_little_endian and "ModalityLUTSequence" in dataset:
        raise ReaderError("a big-endian object with a table of values; have it sent in another form")
    if form.allocated == 1:
        data = pack_bits(values, pad=False)
    else:
        data = values.astype(f"<{'i' if form.signed else 'u'}{form.allocated // 8}").tobytes()
    if form.colour:
        dataset.PhotometricInterpretation, dataset.PlanarConfiguration = "RGB", 0
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.PixelData = data + b"\0" * (len(data) % 2)
    dataset["PixelData"].VR = "OB" if form.allocated <= 8 else "OW"
