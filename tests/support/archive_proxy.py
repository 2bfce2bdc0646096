"""A proxy in front of a DICOMweb archive, which fails as archives and the way to them do."""

import re
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import requests

SILENT, HALF = "silent", "half"
_LONGEST = 60.0


@dataclass
class Fault:
    """Faults of requests.

    Args:
        path: regular expression that is searched for in the path.
        kind: a status code, ``SILENT``, ``HALF`` (the connection breaks off in the middle of the body), or
            seconds by which each answer is late, as a ``float``.
        headers: of the answer.
    """

    path: str
    kind: int | float | str
    headers: dict[str, str] = field(default_factory=dict)


class Proxy:
    """Forwards to an archive, unless a fault says something else.

    Attributes:
        url: of its DICOMweb service.
        faults: those in force; the first that fits counts.
        asked: paths of all requests.
        authorised: the header ``Authorization`` of each.
    """

    def __init__(self, target: str, context: ssl.SSLContext | None = None) -> None:
        self.faults: list[Fault] = []
        self.asked: list[str] = []
        self.authorised: list[str | None] = []
        self.over = threading.Event()
        self._target = urlsplit(target)
        self.server = _Server(("127.0.0.1", 0), self._handler())
        scheme = "http"
        if context is not None:
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
            scheme = "https"
        self.url = f"{scheme}://127.0.0.1:{self.server.server_port}{self._target.path}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy.asked.append(self.path)
                proxy.authorised.append(self.headers["Authorization"])
                fault = next((one for one in proxy.faults if re.search(one.path, self.path)), None)
                kind = fault.kind if fault is not None else 0.0
                if kind == SILENT:
                    proxy.over.wait(_LONGEST)
                    self.close_connection = True
                elif isinstance(kind, int):
                    self.answer(kind, fault.headers, b"", b"")
                else:
                    time.sleep(kind if isinstance(kind, float) else 0)
                    self.forward(half=kind == HALF)

            def forward(self, *, half: bool) -> None:
                url = f"{proxy._target.scheme}://{proxy._target.netloc}{self.path}"
                wanted = {name: value for name, value in self.headers.items() if name.lower() != "host"}
                response = requests.get(url, headers=wanted, timeout=60)
                kept = {"Content-Type": response.headers.get("Content-Type", "")}
                sent = response.content[: len(response.content) // 2] if half else response.content
                self.answer(response.status_code, kept, response.content, sent)

            def answer(self, status: int, headers: dict[str, str], body: bytes, sent: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(sent)
                self.close_connection = self.close_connection or len(sent) < len(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing: a client that does not wait any longer is what the tests are about."""


@contextmanager
def proxy_before(target: str, context: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    """Start a proxy before the DICOMweb service of an archive, encrypted or not, and stop it at the end."""
    proxy = Proxy(target, context)
    thread = threading.Thread(target=proxy.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.over.set()
        proxy.server.shutdown()
        proxy.server.server_close()
