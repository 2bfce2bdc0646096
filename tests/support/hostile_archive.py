"""An archive with DICOMweb and DIMSE that lies about the owners of its objects, and by its answers."""

from __future__ import annotations

import io
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pydicom
from orthanc import free_port
from pydicom.datadict import dictionary_VR, tag_for_keyword
from pydicom.uid import UID
from pynetdicom import AE, ALL_TRANSFER_SYNTAXES, build_context, evt
from pynetdicom.sop_class import (
    StudyRootQueryRetrieveInformationModelFind,
    StudyRootQueryRetrieveInformationModelGet,
    StudyRootQueryRetrieveInformationModelMove,
)

AET, OWN_AET = "LIAR", "MEDFEDAUG"
_LEVELS = {
    "studies": ("StudyInstanceUID", "PatientID", "IssuerOfPatientID", "AccessionNumber"),
    "series": ("SeriesInstanceUID", "Modality", "SeriesNumber", "SeriesDescription"),
    "instances": ("SOPInstanceUID", "SOPClassUID"),
}
_BY_DIMSE = {"STUDY": "studies", "SERIES": "series", "IMAGE": "instances"}


@dataclass
class Lie:
    """Answer in place of an honest one.

    Args:
        path: regular expression that is searched for in the path of a request.
        answer: makes it.
    """

    path: str
    answer: Callable[[Handler], object]


@dataclass
class HostileArchive:
    """Objects as they are sent, and rows as searches answer them.

    Args:
        objects: as they are; their headers make the rows.
        claims: by the name of an attribute, the value that a row has in place of its own.
        sent: makes what is sent of an object, by DICOMweb and DIMSE.
        lies: the first that fits a request counts; for DICOMweb alone.
        found: makes the answers to a C-FIND of the honest ones.
        strangers: objects that are sent before those that are asked for, by C-GET and C-MOVE.
    """

    objects: list[pydicom.Dataset]
    claims: Callable[[dict[str, Any]], object] = lambda row: None
    sent: Callable[[pydicom.Dataset], pydicom.Dataset | bytes] = lambda dataset: dataset
    lies: list[Lie] = field(default_factory=list)
    found: Callable[[Iterable[pydicom.Dataset]], Iterable[pydicom.Dataset]] = lambda rows: rows
    strangers: Callable[[], Iterable[pydicom.Dataset]] = tuple
    asked: list[str] = field(default_factory=list)
    stored: list[bytes] = field(default_factory=list)
    url: str = ""
    receive: int = field(default_factory=free_port)

    @cached_property
    def associations(self) -> Any:
        """The server for DIMSE, which starts when a test first asks for its address."""
        dimse = _Dimse(self)
        return dimse.entity.start_server(("127.0.0.1", 0), block=False, evt_handlers=dimse.handlers)

    @property
    def dimse(self) -> str:
        return f"{AET}@127.0.0.1:{self.associations.server_address[1]}"

    def rows(self, level: str, **wanted: str) -> list[dict[str, Any]]:
        """Rows of a level, by keyword, of all objects that have some values; claims are searched, too."""
        rows = {}
        for one in self.objects:
            row = {name: str(one.get(name) or "") for names in _LEVELS.values() for name in names}
            self.claims(row)
            if all(row.get(name) == value for name, value in wanted.items() if value):
                rows[row[_LEVELS[level][0]]] = row
        return [*rows.values()]

    def chosen(self, *uids: str) -> list[pydicom.Dataset]:
        """Objects of a study, a series, or one object."""
        names = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
        return [
            one
            for one in self.objects
            if all(one[n].value == uid for n, uid in zip(names, uids, strict=False))
        ]

    def content(self, dataset: pydicom.Dataset) -> bytes:
        """A file of what is sent."""
        sent = self.sent(dataset)
        if isinstance(sent, bytes):
            return sent
        with io.BytesIO() as file:
            sent.save_as(file, enforce_file_format=True)
            return file.getvalue()


class Handler(BaseHTTPRequestHandler):
    """Answers as DICOMweb does, unless a lie says something else."""

    protocol_version = "HTTP/1.1"
    archive: HostileArchive

    def do_GET(self) -> None:
        self.archive.asked.append(self.path)
        self.respond(self.honest)

    def do_POST(self) -> None:
        self.archive.asked.append(f"POST {self.path}")
        self.posted = self.rfile.read(int(self.headers["Content-Length"]))
        self.archive.stored.append(self.posted)
        self.respond(lambda: self.send(b"", status=500))

    def respond(self, honest: Callable[[], object]) -> None:
        lie = next((one for one in self.archive.lies if re.search(one.path, self.path)), None)
        try:
            lie.answer(self) if lie is not None else honest()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def honest(self) -> None:
        path, _, query = self.path.partition("?")
        uids = re.findall(r"/(?:studies|series|instances)/([\d.]+)", path)
        level = path.rpartition("/")[2]
        if level not in _LEVELS:
            self.parts(map(self.archive.content, self.archive.chosen(*uids)))
            return
        options = dict(one.split("=", 1) for one in query.split("&") if "=" in one)
        wanted = dict(zip(("StudyInstanceUID", "SeriesInstanceUID"), uids, strict=False))
        wanted |= {name: value for name, value in options.items() if name in _LEVELS["studies"]}
        rows = [] if int(options.get("offset", 0)) else self.archive.rows(level, **wanted)
        self.rows(rows)

    def rows(self, rows: Iterable[dict[str, Any]]) -> None:
        """Answer a search."""
        content = [
            {
                f"{tag_for_keyword(name):08X}": {"vr": dictionary_VR(name), "Value": [value]}
                for name, value in row.items()
                if value
            }
            for row in rows
        ]
        self.send(json.dumps(content).encode())

    def parts(self, contents: Iterable[bytes]) -> None:
        """Answer with objects."""
        head = b"--XX\r\nContent-Type: application/dicom\r\n\r\n"
        body = b"".join(head + content + b"\r\n" for content in contents) + b"--XX--\r\n"
        self.send(body, kind='multipart/related; type="application/dicom"; boundary=XX')

    def send(
        self,
        body: bytes,
        *,
        kind: str = "application/dicom+json",
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self, pieces: Iterable[bytes], kind: str = "application/dicom+json") -> None:
        """Answer in pieces, which need have no end."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in pieces:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.flush()

    def redirect(self, target: str, status: int = 302) -> None:
        self.send(b"", status=status, headers={"Location": target})

    def log_message(self, *_: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client that leaves is what the tests are about."""


class _Dimse:
    """The same archive by DIMSE."""

    def __init__(self, archive: HostileArchive) -> None:
        self.archive = archive
        self.entity = AE(ae_title=AET)
        models = (
            StudyRootQueryRetrieveInformationModelFind,
            StudyRootQueryRetrieveInformationModelGet,
            StudyRootQueryRetrieveInformationModelMove,
        )
        for model in models:
            self.entity.add_supported_context(model)
        for kind in {one.SOPClassUID for one in archive.objects}:
            self.entity.add_supported_context(kind, ALL_TRANSFER_SYNTAXES, scu_role=True, scp_role=True)
        self.handlers = [(evt.EVT_C_FIND, self.find), (evt.EVT_C_GET, self.get), (evt.EVT_C_MOVE, self.move)]

    def find(self, event: Any) -> Iterator[tuple[int, pydicom.Dataset | None]]:
        query = event.identifier
        level = _BY_DIMSE[query.QueryRetrieveLevel]
        names = ("StudyInstanceUID", "SeriesInstanceUID", "PatientID", "AccessionNumber")
        wanted = {name: str(query.get(name) or "") for name in names}
        for row in self.archive.found(map(_row, self.archive.rows(level, **wanted))):
            yield 0xFF00, row

    def _objects(self, query: pydicom.Dataset) -> Iterator[pydicom.Dataset]:
        yield from self.archive.strangers()
        uids = query.get("SOPInstanceUID")
        for one in self.archive.chosen(query.StudyInstanceUID, query.SeriesInstanceUID):
            if not uids or one.SOPInstanceUID in uids:
                yield self.archive.sent(one)

    def get(self, event: Any) -> Iterator[Any]:
        yield 60_000  # sub-operations: more than there are ends them with a warning
        for dataset in self._objects(event.identifier):
            yield 0xFF00, dataset

    def move(self, event: Any) -> Iterator[Any]:
        objects = [*self._objects(event.identifier)]
        kinds = {(one.SOPClassUID, one.file_meta.TransferSyntaxUID) for one in objects}
        contexts = [build_context(*kind) for kind in kinds]
        yield "127.0.0.1", self.archive.receive, {"ae_title": event.move_destination, "contexts": contexts}
        yield len(objects)
        for one in objects:
            yield 0xFF00, one


def _row(values: dict[str, Any]) -> pydicom.Dataset:
    dataset = pydicom.Dataset()
    for name, value in values.items():
        setattr(dataset, name, value)
    return dataset


@contextmanager
def hostile_archive(*paths: Path, **lies: Any) -> Iterator[HostileArchive]:
    """Start an archive with the objects below some folders, and stop it at the end.

    Args:
        *paths: files, or folders of files.
        **lies: of `HostileArchive`.
    """
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    archive = HostileArchive([pydicom.dcmread(file) for file in files if file.is_file()], **lies)
    server = _Server(("127.0.0.1", 0), type("Own", (Handler,), {"archive": archive}))
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    archive.url = f"http://127.0.0.1:{server.server_port}/dicom-web"
    try:
        yield archive
    finally:
        if "associations" in vars(archive):
            archive.associations.shutdown()
        server.shutdown()
        server.server_close()


def changed(dataset: pydicom.Dataset, **values: Any) -> pydicom.Dataset:
    """A copy of an object with other values, and with the syntax that it has."""
    with io.BytesIO() as file:
        dataset.save_as(file, enforce_file_format=True)
        file.seek(0)
        copy = pydicom.dcmread(file)
    for name, value in values.items():
        if name == "TransferSyntaxUID":
            copy.file_meta.TransferSyntaxUID = UID(value)
        else:
            setattr(copy, name, value)
    return copy
