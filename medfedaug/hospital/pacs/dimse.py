"""`DimseArchive`: an archive that speaks DIMSE (C-FIND, C-GET or C-MOVE, C-STORE)."""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydicom import Dataset
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
)
from pynetdicom import (
    AE,
    ALL_TRANSFER_SYNTAXES,
    AllStoragePresentationContexts,
    StoragePresentationContexts,
    build_context,
    build_role,
    evt,
)
from pynetdicom.association import Association
from pynetdicom.presentation import PresentationContext
from pynetdicom.sop_class import (  # type: ignore[attr-defined]
    StudyRootQueryRetrieveInformationModelFind,
    StudyRootQueryRetrieveInformationModelGet,
    StudyRootQueryRetrieveInformationModelMove,
)

from medfedaug.errors import ConfigError, ReaderError, config_errors
from medfedaug.hospital.dicom.headers import dataset_of
from medfedaug.hospital.pacs.archive import (
    ATTEMPTS,
    LONGEST_VALUE,
    MOST_OBJECTS,
    Access,
    Archive,
    ArchiveError,
    ArchiveSeries,
    FetchError,
    RequestRefused,
    UnusableAnswer,
    valid_uid,
)
from medfedaug.hospital.pacs.object_check import Arrival, Failure, ObjectRefused

_ADDRESS = re.compile(r"(?P<aet>[^@\\]{1,16})@(?P<host>[^@:]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
_NATIVE: list[str | UID] = [ExplicitVRLittleEndian, ImplicitVRLittleEndian, ExplicitVRBigEndian]
_PACKED = [
    DeflatedExplicitVRLittleEndian,
    *(syntax for syntax in ALL_TRANSFER_SYNTAXES if "1.2.4." in syntax or ".1.2.5" in syntax),
]
_MOST_CONTEXTS = 128
_SUCCESS, _PENDING, _WARNING, _CANCELLED = 0x0000, (0xFF00, 0xFF01), 0xB000, 0xFE00
_NOT_ASKED_FOR, _NO_SPACE, _OTHERS, _UNREADABLE = 0x0124, 0xA700, 0xA900, 0xC000
_MOST_ANSWER, _MOST_OBJECT = 2**26, 2**30  # bytes of an answer to a search, and of an object
_REFUSALS = {
    0xA801: "does not know the AE title of the receiver; enter it there with this host and port",
    0xA702: "cannot reach the receiver; check its host, port and firewall",
    0xA701: "has no resources left",
    0x0124: "does not allow it; check the rights of the AE title",
    0x0122: "does not offer it",
}


class _Traffic:
    """Close a connection that brings more than ``most`` bytes in a message."""

    def __init__(self, most: int) -> None:
        self.exceeded = False
        self._most = most
        self._received: dict[Any, int] = {}
        self.handlers: list[Any] = [
            (evt.EVT_CONN_OPEN, self._watch),
            (evt.EVT_DIMSE_RECV, self._begin),
            (evt.EVT_CONN_CLOSE, lambda event: self._received.pop(event.assoc, None)),
        ]

    def _begin(self, event: Any) -> None:
        self._received[event.assoc] = 0

    def _watch(self, event: Any) -> None:
        connection = event.assoc.dul.socket
        receive = connection.recv

        def bounded(count: int) -> bytearray:
            total = self._received[event.assoc] = self._received.get(event.assoc, 0) + count
            if total > self._most:
                self.exceeded = True
                raise OSError("more than the bound")
            received: bytearray = receive(count)
            return received

        connection.recv = bounded


class DimseArchive(Archive):
    """Archive at ``AET@HOST:PORT``, reached by DICOM's protocol.

    Objects come by C-GET in the association of the request; or, with ``access.receive``, by C-MOVE to a
    receiver on that port, which accepts requested objects under the archive's AE title.
    """

    def __init__(self, address: str, access: Access) -> None:
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match["port"]) < 2**16:
            raise ConfigError(
                f"--dimse takes AET@HOST:PORT, such as PACS@pacs.example.org:104, not {address!r}"
            )
        self._aet, self._host, self._port = match["aet"], match["host"].strip("[]"), int(match["port"])
        self.place = address
        self._access = access
        self._awaited: dict[str, Arrival] = {}
        self._lock = threading.Lock()
        self._receiver = self._listen(access.receive) if access.receive is not None else None

    def _find(self, level: str, fields: Sequence[str], most: int, **keys: str) -> list[dict[str, str]]:
        query = _query(level, **{**dict.fromkeys(fields), **keys})
        rows: dict[str, dict[str, str]] = {}
        model = StudyRootQueryRetrieveInformationModelFind
        traffic = _Traffic(_MOST_ANSWER)
        with self._associated([build_context(model)], traffic) as association:
            for number, (status, row) in enumerate(association.send_c_find(query, model)):
                if number > most or traffic.exceeded:
                    association.abort()
                    raise UnusableAnswer(f"{self.place} answers a search without end")
                self._check(status, "search")
                if status.Status in _PENDING and row is not None and valid_uid(uid := _text(row, fields[0])):
                    rows.setdefault(uid, {name: _text(row, name) for name in fields})
        return list(rows.values())

    def fetch(
        self, series: ArchiveSeries, folder: Path, on_instance: Callable[[], object] = lambda: None
    ) -> list[Path]:
        """Fetch a series by C-GET or C-MOVE; then request missing objects by their UIDs."""
        rows = self._find_objects(series, "SOPClassUID")
        uids, classes = [*rows], sorted({row["SOPClassUID"] for row in rows.values()} - {""})
        arrival = Arrival(series, folder, uids, on_instance)
        query = _query("SERIES", StudyInstanceUID=series.study, SeriesInstanceUID=series.uid)
        with self._awaiting(uids, arrival):
            failure = self._receive(arrival, query, classes) if arrival.missing else Failure()
            query.QueryRetrieveLevel = "IMAGE"
            for _ in range(ATTEMPTS - 1):
                if not arrival.missing or arrival.is_refused or not failure.passing:
                    break
                query.SOPInstanceUID = arrival.missing
                failure = self._receive(arrival, query, classes)
        return arrival.files(failure)

    def _receive(self, arrival: Arrival, query: Dataset, classes: Sequence[str]) -> Failure:
        """Let the archive send objects; return the reason why objects are missing."""
        before = len(arrival.missing)
        get = self._receiver is None
        model = (
            StudyRootQueryRetrieveInformationModelGet if get else StudyRootQueryRetrieveInformationModelMove
        )
        contexts = [build_context(model), *(_contexts(classes) if get else [])]
        syntaxes = sorted({str(context.abstract_syntax) for context in contexts[1:]})
        roles = [build_role(syntax, scp_role=True) for syntax in syntaxes]
        handlers = [(evt.EVT_C_STORE, self._keep, [arrival])]
        traffic = _Traffic(_MOST_OBJECT)
        try:
            with self._associated(contexts, traffic, roles, handlers) as association:
                answers = (
                    association.send_c_get(query, model)
                    if get
                    else association.send_c_move(query, self._access.aet, model)
                )
                for number, (status, _) in enumerate(answers):
                    if number > MOST_OBJECTS:
                        association.abort()
                        raise UnusableAnswer(f"{self.place} answers without end")
                    if traffic.exceeded:
                        raise FetchError(
                            f"{self.place} sends an object of more than {_MOST_OBJECT >> 20} MiB"
                        )
                    if "Status" not in status:
                        return Failure(self._silent, timed_out=True)
                    self._check(status, "fetch")
        except RequestRefused as error:
            return Failure(str(error), passing=len(arrival.missing) < before)
        return Failure(f"{self.place} lists them and does not send them")

    @contextmanager
    def _awaiting(self, uids: Sequence[str], arrival: Arrival) -> Iterator[None]:
        with self._lock:
            self._awaited.update(dict.fromkeys(uids, arrival))
        try:
            yield
        finally:
            with self._lock:
                for uid in uids:
                    self._awaited.pop(uid, None)

    def _keep_awaited(self, event: Any) -> int:
        """Accept an object at the receiver, and return the status."""
        with self._lock:
            arrival = self._awaited.get(str(event.request.AffectedSOPInstanceUID))
        return _NOT_ASKED_FOR if arrival is None else self._keep(event, arrival)

    @staticmethod
    def _keep(event: Any, arrival: Arrival) -> int:
        """Accept an object from the archive, and return the status; its bytes are written unchanged."""
        try:
            return _SUCCESS if arrival.accept(event.encoded_dataset()) else _NOT_ASKED_FOR
        except ObjectRefused:
            return _OTHERS
        except ReaderError:
            return _UNREADABLE
        except OSError:
            return _NO_SPACE

    def _listen(self, port: int) -> Any:
        entity = AE(ae_title=self._access.aet)
        entity.require_called_aet, entity.require_calling_aet = True, [self._aet]
        entity.supported_contexts = [
            build_context(context.abstract_syntax, ALL_TRANSFER_SYNTAXES)
            for context in AllStoragePresentationContexts
            if context.abstract_syntax is not None
        ]
        entity.network_timeout = entity.dimse_timeout = self._access.timeout
        if self._access.tls and self._access.certificate is None:
            raise ConfigError("a receiver with TLS needs --certificate and --key")
        with config_errors(f"the receiver cannot listen on port {port}", OSError):
            return entity.start_server(
                ("", port),
                block=False,
                evt_handlers=[(evt.EVT_C_STORE, self._keep_awaited), *_Traffic(_MOST_OBJECT).handlers],
                ssl_context=self._access.context(server=True) if self._access.tls else None,
            )

    def _store(self, dataset: Dataset) -> bool:
        """Store an object by C-STORE."""
        context = build_context(dataset.SOPClassUID, dataset.file_meta.TransferSyntaxUID)
        with self._associated([context], _Traffic(_MOST_ANSWER)) as association:
            status = association.send_c_store(dataset)
            self._check(status, "store")
        return int(status.Status) not in (*_PENDING, _CANCELLED)

    def close(self) -> None:
        """Stop the receiver."""
        if self._receiver is not None:
            self._receiver.shutdown()
            self._receiver = None

    @contextmanager
    def _associated(
        self,
        contexts: list[PresentationContext],
        traffic: _Traffic,
        roles: Sequence[Any] = (),
        handlers: Sequence[Any] = (),
    ) -> Iterator[Association]:
        entity = AE(ae_title=self._access.aet)
        entity.connection_timeout = entity.acse_timeout = self._access.timeout
        entity.network_timeout = entity.dimse_timeout = self._access.timeout
        association = entity.associate(
            self._host,
            self._port,
            contexts=contexts,
            ae_title=self._aet,
            ext_neg=[*roles],
            evt_handlers=[*handlers, *traffic.handlers],
            tls_args=(self._access.context(), self._host) if self._access.tls else None,
        )
        if not association.is_established:
            if association.is_rejected:
                raise ArchiveError(
                    f"{self.place} refuses the AE title {self._access.aet}; enter it there, or give --aet"
                )
            if association.acceptor.primitive is not None:
                raise RequestRefused(f"{self.place} accepts none of what is asked for")
            hint = "; with --tls, check --authority, --certificate and --key" if self._access.tls else ""
            raise ArchiveError(
                f"{self.place} cannot be reached, or ends the connection{hint}", timed_out=True
            )
        try:
            yield association
        finally:
            if association.is_established:
                association.release()
            else:
                association.abort()

    @property
    def _silent(self) -> str:
        return f"{self.place} does not answer in time; give it longer with --timeout"

    def _check(self, status: Dataset, action: str) -> None:
        if "Status" not in status:
            raise ArchiveError(self._silent, timed_out=True)
        code = int(status.Status)
        # A warning of a retrieval means missing objects, which `Arrival` counts.
        if code in (_SUCCESS, *_PENDING, _CANCELLED) or code & 0xF000 == _WARNING:
            return
        reason = _REFUSALS.get(code, f"answers with the status {code:#06x} to a request to {action}")
        raise RequestRefused(f"{self.place} {reason}")


def _query(level: str, **keys: Any) -> Dataset:
    return dataset_of(SpecificCharacterSet="ISO_IR 192", QueryRetrieveLevel=level, **keys)


def _contexts(classes: Sequence[str]) -> list[PresentationContext]:
    """Return contexts in which an archive can send each object as it stores it."""
    if not classes:  # the archive does not say: the usual objects, uncompressed
        usual = StoragePresentationContexts
        return [build_context(str(context.abstract_syntax), [*_NATIVE]) for context in usual]
    syntaxes = [*_NATIVE, *_PACKED][: (_MOST_CONTEXTS - 1) // len(classes)]
    return [build_context(sop_class, syntax) for sop_class in classes for syntax in syntaxes]


def _text(row: Dataset, name: str) -> str:
    """Return a value of an answer as text; empty for a missing or unreadable one."""
    with suppress(Exception):  # an odd value fails anywhere in pydicom
        value = row.get(name)
        return "" if value is None else str(value)[:LONGEST_VALUE].strip()
    return ""
