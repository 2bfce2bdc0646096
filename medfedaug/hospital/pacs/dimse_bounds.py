"""Bounds on DIMSE: bytes of messages, and addresses that may send to the receiver."""

import ipaddress
import socket
from collections.abc import Collection
from socketserver import BaseServer
from typing import Any

from pynetdicom import evt
from pynetdicom.transport import ThreadedAssociationServer

from medfedaug.errors import ConfigError


class Traffic:
    """Close a connection that brings more than ``most`` bytes in a message, or ``of_all`` messages."""

    def __init__(self, most: int, *, of_all: bool = False) -> None:
        self.exceeded = False
        self._most = most
        self._received: dict[Any, int] = {}
        self.handlers: list[Any] = [(evt.EVT_CONN_OPEN, self._watch), (evt.EVT_CONN_CLOSE, self._forget)]
        if not of_all:
            self.handlers.append((evt.EVT_DIMSE_RECV, self._begin_anew))

    def _watch(self, event: Any) -> None:
        association = event.assoc
        connection = association.dul.socket
        receive = connection.recv
        self._received[association] = 0

        def bounded(count: int) -> bytearray:
            total = self._received[association] = self._received.get(association, 0) + count
            if total > self._most:
                self.exceeded = True
                raise OSError("more than the bound")
            received: bytearray = receive(count)
            return received

        connection.recv = bounded

    def _begin_anew(self, event: Any) -> None:
        self._received[event.assoc] = 0

    def _forget(self, event: Any) -> None:
        self._received.pop(event.assoc, None)


class Receiver(ThreadedAssociationServer):
    """Server of the receiver, which accepts connections from the archive's addresses alone."""

    senders: Collection[str] = ()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether a connection is from the archive; others are closed silently."""
        return _plain(client_address[0]) in self.senders

    def stop(self) -> None:
        """Stop, and close the port."""
        BaseServer.shutdown(self)
        self.server_close()


def addresses_of(host: str) -> set[str]:
    """Return the addresses of a host."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{host}: no address is known of this host") from error
    return {_plain(str(entry[4][0])) for entry in entries}


def own_address(host: str, port: int) -> str:
    """Return the address of this machine from which a host is reached, without sending anything."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"{host}: no address of this machine reaches it; name one with --receive-on"
        ) from error


def _plain(address: str) -> str:
    """Return an address for comparison: without a zone, and IPv4 in its form."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)
