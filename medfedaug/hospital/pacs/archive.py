"""`Archive`: find studies and series in a DICOM archive, fetch a series, store objects.

`medfedaug.hospital.pacs.dicomweb`, `medfedaug.hospital.pacs.dimse` and `medfedaug.hospital.pacs.open_archive`
implement it. Their errors name the archive and never a patient, a study or a series, for which the caller
has pseudonyms.
"""

from __future__ import annotations

import csv
import logging
import re
import ssl
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from medfedaug.config.options import File, Settings, setting, settings
from medfedaug.errors import ConfigError, MedFedAugError, config_errors

if TYPE_CHECKING:
    from pydicom import Dataset

StudyKey = Literal["StudyInstanceUID", "AccessionNumber", "PatientID"]
STUDY_KEYS: tuple[StudyKey, ...] = ("StudyInstanceUID", "AccessionNumber", "PatientID")
"""Attributes by which a study is queried, the most exact first."""
STUDY_FIELDS = ("StudyInstanceUID", "PatientID", "IssuerOfPatientID", "AccessionNumber")
"""Attributes of an `ArchiveStudy`."""
SERIES_FIELDS = (
    *("SeriesInstanceUID", "Modality", "SeriesNumber", "SeriesDescription"),
    "NumberOfSeriesRelatedInstances",
)
"""Attributes of an `ArchiveSeries`; a file has no number of objects."""
MOST_FOUND = 10_000  # studies of a search, and series of a study
MOST_OBJECTS = 100_000  # objects of a series
ATTEMPTS = 3  # times that a request is made before it counts as failed
LONGEST_VALUE = 1024  # characters of a value in an answer

_UID = re.compile(r"[0-9]+(\.[0-9]+)*")
_LONGEST_UID = 64
_COUNT = re.compile(r"[0-9]{1,9}")
_LIBRARIES = ("dicomweb_client", "highdicom", "pydicom", "pynetdicom", "urllib3")


class ArchiveError(MedFedAugError):
    """The archive cannot be used; ``timed_out`` where it is silent or cannot be reached."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        self.timed_out = timed_out
        super().__init__(text)


class RequestRefused(ArchiveError):
    """The archive answers, and refuses one request; others may succeed."""


class UnusableAnswer(RequestRefused):
    """The archive answers one request with unusable data; others may succeed."""


class FetchError(RequestRefused):
    """One series cannot be fetched; others may be."""


@dataclass(frozen=True)
class StudyQuery:
    """Query for studies: one attribute and its value."""

    key: StudyKey
    value: str

    def __post_init__(self) -> None:
        if not self.value or set(self.value) & set("*?\\"):
            raise ConfigError(f"a value of {self.key} is empty or has a wildcard; name each study")
        if self.key == "StudyInstanceUID" and not valid_uid(self.value):
            raise ConfigError("a value of StudyInstanceUID is not a UID; a UID has only digits and dots")


def read_studies(path: Path) -> list[StudyQuery]:
    """Read the studies of a CSV file with a column of `STUDY_KEYS`, each once, in the order of the file."""
    with config_errors(f"{path}: not readable as UTF-8 text"):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    delimiter = ";" if lines and ";" in lines[0] else ","
    rows = csv.DictReader(lines, delimiter=delimiter)
    columns = [name.strip() for name in rows.fieldnames or ()]
    rows.fieldnames = columns
    key = next((name for name in STUDY_KEYS if name in columns), None)
    if key is None:
        raise ConfigError(f"{path}: has no column {', '.join(STUDY_KEYS[:-1])} or {STUDY_KEYS[-1]}")
    queries: dict[StudyQuery, None] = {}
    for row in rows:
        value = (row.get(key) or "").strip()
        if value:
            with config_errors(f"{path}, line {rows.line_num}", ConfigError):
                queries[StudyQuery(key, value)] = None
    if not queries:
        raise ConfigError(f"{path}: names no study")
    return [*queries]


@dataclass(frozen=True)
class ArchiveStudy:
    """Study in an archive."""

    uid: str
    patient: str = ""
    issuer: str = ""
    accession: str = ""

    @classmethod
    def of_values(cls, values: Mapping[str, str]) -> ArchiveStudy:
        """Make a study from values of `STUDY_FIELDS`; all but the UID may be missing."""
        return cls(
            uid=values["StudyInstanceUID"],
            patient=values.get("PatientID", ""),
            issuer=values.get("IssuerOfPatientID", ""),
            accession=values.get("AccessionNumber", ""),
        )

    @property
    def person(self) -> str:
        """Identity of the patient, for a pseudonym; without PatientID, each study is a patient."""
        return f"{self.issuer}\\{self.patient}" if self.patient else self.uid

    def matches(self, query: StudyQuery) -> bool:
        """Return whether the study has the value of a query: archives may match loosely."""
        values = {"StudyInstanceUID": self.uid, "AccessionNumber": self.accession, "PatientID": self.patient}
        return values[query.key].strip() == query.value.strip()


@dataclass(frozen=True)
class ArchiveSeries:
    """Series in an archive, as it answers; only a folder knows ImageType, and so localisers."""

    study: str
    uid: str
    modality: str = ""
    number: str = ""
    description: str = ""
    instances: int | None = None
    localiser: bool = False
    patient: str = field(default="", repr=False)

    @classmethod
    def of_values(cls, study: ArchiveStudy, values: Mapping[str, str]) -> ArchiveSeries:
        """Make a series from values of `SERIES_FIELDS`; all but the UID may be missing."""
        count = values.get("NumberOfSeriesRelatedInstances", "")
        return cls(
            study=study.uid,
            uid=values["SeriesInstanceUID"],
            modality=values.get("Modality", ""),
            number=values.get("SeriesNumber", ""),
            description=values.get("SeriesDescription", ""),
            localiser="LOCALIZER" in values.get("ImageType", ""),
            instances=int(count) if _COUNT.fullmatch(count) else None,
            patient=study.patient,
        )


@settings
class Access(Settings):
    """Access to an archive, without its address."""

    PANEL: ClassVar[str] = "The archive"

    timeout: float = setting(60.0, "Seconds that the archive may be silent.", above=0, rare=True)
    user: str | None = setting(
        None,
        "User of DICOMweb; the password is in MEDFEDAUG_PACS_PASSWORD. Or MEDFEDAUG_PACS_TOKEN is a bearer "
        "token.",
    )
    password: str | None = setting(None, "Password of this user.", flags=None, secret=True)
    token: str | None = setting(
        None, "Bearer token of HTTP, instead of user and password.", flags=None, secret=True
    )
    tls: bool = setting(False, "Encrypt DIMSE; DICOMweb encrypts where the URL says https.", flags=("--tls",))
    authority: File | None = setting(
        None, "PEM file of the authority of the archive's certificate.", rare=True
    )
    certificate: File | None = setting(
        None, "PEM file of the site's certificate, if the archive requires one.", rare=True
    )
    key: File | None = setting(
        None, "PEM file of its private key, where --certificate does not hold it.", rare=True
    )
    aet: str = setting("MEDFEDAUG", "AE title of the site.")
    receive: int | None = setting(None, "Port to receive on by C-MOVE, instead of C-GET.", rare=True)

    def __post_init__(self) -> None:
        if not 0 < len(self.aet) <= 16 or not self.aet.isascii() or "\\" in self.aet:
            raise ConfigError(
                f"{self.aet!r} is not an AE title: 1 to 16 ASCII characters without a backslash"
            )
        if self.token is not None and self.user is not None:
            raise ConfigError("a user and a token are given for one archive; give one of the two")
        self.context()

    def context(self, *, server: bool = False) -> ssl.SSLContext:
        """Make the TLS context of connections, or of the receiver, which demands a certificate."""
        purpose = ssl.Purpose.CLIENT_AUTH if server else ssl.Purpose.SERVER_AUTH
        with config_errors(f"{self.authority}: not readable as certificates in PEM"):
            context = ssl.create_default_context(purpose, cafile=self.authority)
        if self.certificate is not None:
            problem = f"{self.certificate}: not usable with the private key in {self.key or self.certificate}"
            remedy = "; give PEM files that belong together, the key without a password"
            with config_errors(problem, remedy=remedy):
                # Without a password argument OpenSSL would prompt for one at the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
        if server:
            context.verify_mode = ssl.CERT_REQUIRED  # nobody but the archive sends
        return context


class Archive(ABC):
    """Source of DICOM objects.

    Methods may be called from several threads at once. Its context manager closes it at the end, and DICOM
    libraries no longer log values of headers. A search raises `RequestRefused` where the archive refuses
    it, and `ArchiveError` where the archive does not answer.
    """

    place: str
    """Address for messages, without user and password."""

    def find_studies(self, query: StudyQuery) -> list[ArchiveStudy]:
        """Find the studies that match, sorted by UID."""
        rows = self._find("STUDY", STUDY_FIELDS, MOST_FOUND, **{query.key: query.value})
        studies = map(ArchiveStudy.of_values, rows)
        return sorted((study for study in studies if study.matches(query)), key=lambda study: study.uid)

    def find_series(self, study: ArchiveStudy) -> list[ArchiveSeries]:
        """Find all series of a study, sorted by number and UID."""
        rows = self._find("SERIES", SERIES_FIELDS, MOST_FOUND, StudyInstanceUID=study.uid)
        found = (ArchiveSeries.of_values(study, row) for row in rows)
        return sorted(found, key=lambda series: (series.number.zfill(9), series.uid))

    def _find_objects(self, series: ArchiveSeries, *more: str) -> dict[str, Mapping[str, str]]:
        """List the objects of a series, with the values of more fields, sorted by SOPInstanceUID."""
        keys = {"StudyInstanceUID": series.study, "SeriesInstanceUID": series.uid}
        rows = self._find("IMAGE", ("SOPInstanceUID", *more), MOST_OBJECTS, **keys)
        if not rows:
            raise FetchError("the archive lists no object of the series")
        return {row["SOPInstanceUID"]: row for row in sorted(rows, key=lambda row: row["SOPInstanceUID"])}

    @abstractmethod
    def _find(self, level: str, fields: Sequence[str], most: int, **keys: str) -> list[dict[str, str]]:
        """Search a level of DICOM's query model by keys for the values of fields, the first of them a UID.

        Studies may match loosely; an answer of more than ``most`` rows is refused.
        """

    @abstractmethod
    def fetch(
        self, series: ArchiveSeries, folder: Path, on_instance: Callable[[], object] = lambda: None
    ) -> list[Path]:
        """Fetch all objects of a series into one file each, and return the files, sorted.

        Files of an interrupted call are kept. Their names contain nothing of the header. `ObjectRefused` says
        that objects are of another patient, study or series, or beyond all limits; `FetchError`, that some
        are missing.
        """

    def store(self, dataset: Dataset) -> None:
        """Store an object with its ``file_meta``."""
        if not self._store(dataset):
            raise RequestRefused(f"{self.place} does not say that it stored an object; look for it there")

    @abstractmethod
    def _store(self, dataset: Dataset) -> bool:
        """Send an object, and return whether the archive says that it stored it."""

    def close(self) -> None:
        """Close connections."""

    def __enter__(self) -> Archive:
        for name in _LIBRARIES:
            warnings.filterwarnings("ignore", module=rf"{name}(\.|$)")
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def valid_uid(text: str) -> bool:
    """Return whether a text is a UID: digits and dots, at most 64.

    Example:
        >>> valid_uid("1.2.840.10008.1.2"), valid_uid("../1.2")
        (True, False)
    """
    return len(text) <= _LONGEST_UID and _UID.fullmatch(text) is not None


_MOST_SILENT = 3


class Patience:
    """Distinguish failures of one study from an archive that is gone.

    An archive is given up after three studies in a row without a usable answer, and at once where it has
    never ``answered`` in time. Several threads may use it.
    """

    def __init__(self, *, answered: bool = False) -> None:
        self._answered, self._silent = answered, 0
        self._lock = threading.Lock()

    def heard(self) -> None:
        """Record that the archive answers."""
        with self._lock:
            self._answered, self._silent = True, 0

    def problem(self, error: ArchiveError) -> str:
        """Return the reason why a study failed; raise where the archive is given up."""
        if not error.timed_out and not isinstance(error, UnusableAnswer):
            if not isinstance(error, RequestRefused):
                raise error
            self.heard()
            return str(error)
        with self._lock:
            self._silent += 1
            if error.timed_out and not self._answered:
                raise error
            if self._silent >= _MOST_SILENT:
                raise ArchiveError(
                    f"{error}; run the same command again to continue", timed_out=True
                ) from error
        return str(error)
