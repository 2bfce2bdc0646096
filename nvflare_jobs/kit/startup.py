"""Checks of a kit's ``startup`` folder: python, certificates, and the way to the server.

NVFlare's ``nvflare preflight-check`` says PASSED for a client certificate that is missing or has expired.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from http.client import HTTPConnection, HTTPException
from ipaddress import ip_address, ip_network
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from medfedaug.nvflare_jobs.kit.kit_process import find_process, python_trouble

_WARN_DAYS = 30
_RENEW = "Ask who provisions for a new kit: docs/howto/certificates.md."
_TIMEOUT = 5.0


@dataclass(frozen=True)
class Check:
    """Result of one check, with the remedy where one is needed; ``ok`` is ``None`` for a warning."""

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@dataclass(frozen=True)
class _Startup:
    """Contents of a kit's JSON: its files, and the server."""

    folder: Path
    server: bool
    certificate: Path
    key: Path
    root: Path
    target: str
    scheme: str
    identity: str
    security: str

    @classmethod
    def read(cls, kit: str | Path) -> _Startup:
        folder = Path(kit) / "startup"
        server = (folder / "fed_server.json").is_file()
        kind = "server" if server else "client"
        values = json.loads((folder / f"fed_{kind}.json").read_text())
        entry = values["servers"][0]
        participant = entry if server else values["client"]
        return cls(
            folder=folder,
            server=server,
            certificate=folder / participant.get("ssl_cert", f"{kind}.crt"),
            key=folder / participant.get("ssl_private_key", f"{kind}.key"),
            root=folder / participant.get("ssl_root_cert", "rootCA.pem"),
            target=str(entry["service"].get("target", "")),
            scheme=str(entry["service"].get("scheme", "grpc")),
            identity=str(entry.get("identity", "")),
            security=str(participant.get("connection_security", "mtls")),
        )


def check_startup(kit: str | Path, *, connect: bool = False) -> Iterator[Check]:
    """Check a kit's files, and a site's way to its server."""
    try:
        startup = _Startup.read(kit)
    except (OSError, ValueError, LookupError) as error:
        yield Check("startup", False, f"{kit}/startup: not readable ({error})", "Provision the kit again.")
        return
    # `nvflare deploy prepare` leaves a kit without it.
    if (startup.folder / "start.sh").is_file() and find_process(kit) is None:
        trouble = python_trouble()
        advice = "Activate medfedaug's environment, or put it first on the PATH of whoever starts the kit."
        found = trouble or "start.sh runs this medfedaug"
        yield Check("python3", not trouble, found, advice if trouble else "")
    yield from check_certificates(kit)
    if connect:
        yield from check_connection(kit)


def check_certificates(kit: str | Path) -> Iterator[Check]:
    """Check the certificate of a kit: readable, for this key, signed by the root, and valid today."""
    startup, name = _Startup.read(kit), "certificate"
    try:
        chain = x509.load_pem_x509_certificates(startup.certificate.read_bytes())
        root = x509.load_pem_x509_certificate(startup.root.read_bytes())
        key = serialization.load_pem_private_key(startup.key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        text = f"{startup.folder}: certificate or key cannot be read ({error})"
        yield Check(name, False, text, f"Put it back from the kit as it was sent. {_RENEW}")
        return
    if key.public_key() != chain[0].public_key():
        text = f"{startup.key.name} is not the key of {startup.certificate.name}"
        yield Check(name, False, text, f"Take both from one kit. {_RENEW}")
        return
    if not _is_signed(chain, root):
        text = f"{startup.certificate.name} is not signed by {startup.root.name}: they are of two projects"
        yield Check(name, False, text, f"Take all of startup/ from one kit. {_RENEW}")
        return
    yield _validity(chain, root, startup)
    mode = stat.S_IMODE(startup.key.stat().st_mode)
    if mode & 0o077:
        text = f"{startup.key} can be read by others (mode {mode:o}): who has it can act as this kit"
        yield Check("key", None, text, f"chmod 600 {startup.key}")


def _is_signed(chain: list[x509.Certificate], root: x509.Certificate) -> bool:
    with suppress(ValueError, TypeError, InvalidSignature):
        for certificate, issuer in zip(chain, [*chain[1:], root], strict=True):
            if certificate != issuer:  # the root may end the chain itself
                certificate.verify_directly_issued_by(issuer)
        return True
    return False


def _validity(chain: list[x509.Certificate], root: x509.Certificate, startup: _Startup) -> Check:
    now = datetime.now(timezone.utc)
    begin = max(certificate.not_valid_before_utc for certificate in (*chain, root))
    end = min(certificate.not_valid_after_utc for certificate in (*chain, root))
    of_root = end == root.not_valid_after_utc != chain[0].not_valid_after_utc
    file = startup.root.name if of_root else startup.certificate.name
    name = "certificate"
    if begin > now:
        when = "%Y-%m-%d %H:%M"
        text = f"{startup.certificate.name} is valid from {begin:{when}} UTC, and here it is {now:{when}}"
        return Check(name, False, text, "Set this machine's clock.")
    if end < now:
        return Check(name, False, f"{file} expired on {end:%Y-%m-%d}: no connection is possible", _RENEW)
    days = (end - now) // timedelta(days=1)
    if days < _WARN_DAYS:
        return Check(name, None, f"{file} expires in {days} days, on {end:%Y-%m-%d}", _RENEW)
    return Check(name, True, f"of {_common_name(chain[0])}, valid until {end:%Y-%m-%d} ({days} days)")


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def check_connection(kit: str | Path) -> Iterator[Check]:
    """Check a site's way to its server: address, proxy, TCP, and TLS with both certificates."""
    startup = _Startup.read(kit)
    if startup.server:
        return
    host, _, port = startup.target.rpartition(":")
    variable, proxy = _proxy(host) if startup.scheme == "grpc" else ("", "")
    try:
        plain = _connect(host, int(port), proxy)
    except (OSError, ValueError, OverflowError, HTTPException) as error:
        text = f"{startup.target}: not reachable ({getattr(error, 'strerror', None) or error})"
        advice = "If the server is up: ask for its address and port, and for the way through the firewall."
        if proxy:
            shown = proxy.rpartition("@")[2].rpartition("//")[2]  # without user and password
            text = text.replace("reachable", f"reachable through {variable}={shown}", 1)
            advice = "Let the proxy CONNECT to the server, or name the server's host in no_proxy."
        yield Check("server", False, text, advice)
        return
    with plain:
        if startup.security in ("mtls", "tls"):
            yield _check_tls(startup, plain)
        else:
            text = f"{startup.target}: reachable; the kit says {startup.security}, no TLS"
            yield Check("server", None, text)


def _proxy(host: str) -> tuple[str, str]:
    """Return the variable and the address of the proxy that gRPC takes to a host; empty for none.

    gRPC reads variables in small letters only, and takes an entry of ``no_proxy`` for the end of a name.
    """
    for variable in ("grpc_proxy", "https_proxy", "http_proxy"):
        if proxy := os.environ.get(variable):
            lists = filter(None, map(os.environ.get, ("no_grpc_proxy", "no_proxy")))
            entries = map(str.strip, next(lists, "").split(","))
            excluded = any(_excludes(entry, host) for entry in entries if entry)
            return ("", "") if excluded else (variable, proxy)
    return "", ""


def _excludes(entry: str, host: str) -> bool:
    """Return whether an entry of ``no_proxy`` is the end of a host's name, or a network of its address."""
    with suppress(ValueError):
        return ip_address(host) in ip_network(entry, strict=False)
    return host.lower().endswith(entry.lower())


def _connect(host: str, port: int, proxy: str) -> socket.socket:
    """Connect to a server, or through a proxy as gRPC does."""
    if not proxy:
        return socket.create_connection((host, port), timeout=_TIMEOUT)
    parts = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    if parts.scheme != "http" or not parts.hostname:
        raise ValueError("gRPC needs http://HOST:PORT")
    headers = {}
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Proxy-Authorization"] = f"Basic {base64.b64encode(user.encode()).decode()}"
    tunnel = HTTPConnection(parts.hostname, parts.port or 80, timeout=_TIMEOUT)
    tunnel.set_tunnel(host, port, headers)
    tunnel.connect()
    return tunnel.sock


def _check_tls(startup: _Startup, plain: socket.socket) -> Check:
    try:
        context = ssl.create_default_context(cafile=str(startup.root))
        context.check_hostname = False  # as NVFlare does, which compares the server's identity
        if startup.scheme == "grpc":  # which closes a connection without its protocol
            context.set_alpn_protocols(["h2"])
        if startup.security == "mtls":
            context.load_cert_chain(startup.certificate, startup.key)
        encrypted = context.wrap_socket(plain)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "verify_message", "") or getattr(error, "reason", None) or str(error)
        text = f"{startup.target}: reachable, but no TLS connection can be made ({reason})"
        advice = "Is it the server of this kit's project? See docs/howto/certificates.md."
        return Check("server", False, text, advice)
    with encrypted:
        certificate = x509.load_der_x509_certificate(encrypted.getpeercert(binary_form=True) or b"")
        name = _common_name(certificate)
        if startup.identity and name != startup.identity:
            text = f"{startup.target}: answers as {name}, and the kit expects {startup.identity}"
            return Check("server", False, text, "Ask for the server's address and port.")
        encrypted.settimeout(3.0)
        try:
            with suppress(TimeoutError):  # a server drops a certificate only after the handshake
                if not encrypted.recv(1):
                    raise ConnectionError("it closed the connection")
        except (ssl.SSLError, ConnectionError) as error:
            reason = getattr(error, "reason", None) or error
            text = f"{startup.target}: the server drops this kit's certificate ({reason})"
            return Check("server", False, text, "Is the certificate of the server's own project, and valid?")
    end = certificate.not_valid_after_utc
    text = f"{startup.target}: {name}, its certificate is valid until {end:%Y-%m-%d}"
    if (days := (end - datetime.now(timezone.utc)) // timedelta(days=1)) < _WARN_DAYS:
        return Check("server", None, text, f"It ends in {days} days: tell the lead.")
    return Check("server", True, text)
