"""A proxy that connects clients to servers by CONNECT, or refuses to, as a hospital's does."""

import base64
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class ConnectProxy:
    """A running proxy.

    Attributes:
        url: its address, as ``https_proxy`` has it.
        allows: whether it connects; else it answers 403.
        password: ``user:password`` that it asks for; empty for none.
        asked: the ``host:port`` of each request.
    """

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.allows, self.password = True, ""
        self.asked: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            header = b""
            while not header.endswith(b"\r\n\r\n"):
                header += client.recv(1)
            target = header.split()[1].decode()
            self.asked.append(target)
            token = base64.b64encode(self.password.encode())
            if self.password and b"Basic " + token not in header:
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                return
            if not self.allows:
                client.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
                return
            host, _, port = target.rpartition(":")
            with socket.create_connection((host, int(port))) as server:
                client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait for a client
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while content := source.recv(65536):
            target.sendall(content)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextmanager
def connect_proxy() -> Iterator[ConnectProxy]:
    """Run a proxy."""
    proxy = ConnectProxy()
    try:
        yield proxy
    finally:
        proxy.close()
