"""`ModelIdentity`: UIDs, equipment and algorithm in the DICOM objects that a model makes.

A UID is derived from model, site, settings, source and kind of object, so that the same prediction has the
same UID at every place and time, and an archive can say whether it has the object already. By equipment and
series, `is_own_object` recognises an object that this software wrote.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from medfedaug._version import __version__

if TYPE_CHECKING:
    from highdicom import AlgorithmIdentificationSequence
    from pydicom import Dataset

    from medfedaug.hospital.dicom.volumes import DicomSeries

_NAME = "medfedaug"
_SERIES = 9000
_UNRELIABLE = ": DO NOT RELY ON IT"  # of a model that failed in its test; in a list of series
_EQUIPMENT = ("Manufacturer", "ManufacturerModelName")


class ObjectKind(Enum):
    """Kind of an object: its word in files and tables, number and description of its series."""

    SEGMENTATION = "seg", _SERIES, f"{_NAME} segmentation"
    PROBABILITIES = "probabilities", _SERIES + 1, f"{_NAME} probabilities"
    RTSTRUCT = "rtstruct", _SERIES + 2, f"{_NAME} contours"
    REPORT = "sr", _SERIES + 3, f"{_NAME} volumes"
    CONTROLLED = "controlled", _SERIES + 4, f"{_NAME} controlled map"

    def __init__(self, word: str, number: int, description: str) -> None:
        self.word, self.number, self.description = word, number, description


def is_own_series(number: str, description: str) -> bool:
    """Return whether a series has a number and a description that this software gives.

    Example:
        >>> is_own_series("9000", "medfedaug segmentation"), is_own_series("3", "T1 medfedaug")
        (True, False)
    """
    text = description.strip().lower()
    return any(
        number.strip() == str(kind.number) and text.startswith(kind.description) for kind in ObjectKind
    )


def is_own_object(dataset: Dataset) -> bool:
    """Return whether this software, in any version, wrote an object, by its equipment or its series.

    A pseudonymous copy keeps the equipment, and a copy of a program that replaces the equipment keeps the
    series. The algorithm of a segment proves nothing: a reader who corrects a prediction may keep it.
    """
    equipment = [dataset, *(dataset.get("ContributingEquipmentSequence") or ())]
    makers = {str(item.get(name) or "").strip().lower() for item in equipment for name in _EQUIPMENT}
    number, description = (str(dataset.get(name) or "") for name in ("SeriesNumber", "SeriesDescription"))
    return _NAME in makers or is_own_series(number, description)


@dataclass(frozen=True)
class ModelIdentity:
    """Maker of an object: a model by its hash."""

    sha256: str
    site: str = ""  # whose layers and statistics it used
    settings: str = ""  # digest of settings that change an object, such as statistics
    test: str = ""  # test score, which changes no UID
    warning: str = ""  # reason not to rely on the model

    def series_uid(self, source: str, kind: ObjectKind, part: str = "") -> str:
        """Return the SeriesInstanceUID of an object.

        It is a UID of the form 2.25 (PS3.5, B.2) with a name-based UUID (RFC 9562, version 5).

        Example:
            >>> ModelIdentity("ab12").series_uid("1.2.3", ObjectKind.SEGMENTATION)
            '2.25.126587045386692677229533243114238444134'
        """
        return self._uid(source, kind, part, "series")

    def of_series(self, series: DicomSeries, kind: ObjectKind) -> dict[str, Any]:
        """Return highdicom's arguments for an object of a series: UIDs, numbers, equipment."""
        return {
            "series_instance_uid": self.series_uid(series.uid, kind, series.part),
            "series_number": kind.number,
            "series_description": f"{kind.description}{_UNRELIABLE if self.warning else ''}",
            "sop_instance_uid": self._uid(series.uid, kind, series.part, "instance"),
            "instance_number": 1,
            "manufacturer": _NAME,
            "manufacturer_model_name": _NAME,
            "software_versions": __version__,
            "device_serial_number": self.sha256[:64],
            "specific_character_set": None,  # `save_object` chooses it
        }

    def tracking_uid(self, series: DicomSeries, number: int) -> str:
        """Return the UID by which objects of one prediction name the segment with a number."""
        return self._uid(series.uid, None, series.part, f"segment {number}")

    def device_uid(self) -> str:
        """Return the UID of the model as an observer."""
        return self._uid("", None, "", "device")

    def algorithm(self) -> AlgorithmIdentificationSequence:
        """Return name, version and parameters of the algorithm: the model's hash, its test, and the site."""
        import highdicom as hd
        from pydicom.sr.codedict import codes

        return hd.AlgorithmIdentificationSequence(
            name=_NAME,
            version=__version__,
            family=codes.DCM.ArtificialIntelligence,
            parameters=self.parameters,
        )

    @property
    def parameters(self) -> dict[str, str]:
        """Parameters of the algorithm, by name."""
        texts = {"model": self.sha256, "site": self.site, "test": self.test, "warning": self.warning}
        return {name: text for name, text in texts.items() if text}

    def _uid(self, source: str, kind: ObjectKind | None, part: str, level: str) -> str:
        word = kind.word if kind is not None else ""
        settings = (self.settings,) if self.settings else ()  # empty settings change no UID
        text = "\n".join((_NAME, self.sha256, self.site, source, part, word, level, *settings))
        return f"2.25.{uuid.uuid5(uuid.NAMESPACE_OID, text).int}"
