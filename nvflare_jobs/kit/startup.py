"""Checks of a kit's ``startup`` folder: certificates, modes, names, and the way to the server.

NVFlare's ``nvflare preflight-check`` says PASSED for a client certificate that is missing or has expired.
"""

from __future__ import annotations

import base64
import ctypes
import json
import logging
import os
import re
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from ipaddress import ip_address, ip_network
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID
from nvflare.apis.fl_component import FLComponent

from medfedaug.nvflare_jobs.kit.kit_process import (
    PARENTS,
    ProcessRecord,
    find_process,
    python_trouble,
)
from medfedaug.utils.printable import printable

WARN_DAYS = 30
"""Days before the end of a certificate at which warnings begin."""

_RENEW = "Ask who provisions for a new kit: docs/howto/certificates.md."
_SCRIPTS = ("start.sh", "sub_start.sh", "stop_fl.sh")
# `nvflare deploy prepare` leaves these alone in a kit, or a chart for Kubernetes.
_PREPARED = {"start_docker.sh": ("start_docker.sh",), "start_slurm.sh": ("start_slurm.sh", "sub_start.sh")}
_CHART = "helm_chart"
_LOG_PATIENCE = 60.0  # seconds
_TIMEOUT = 5.0
_LONGEST_ANSWER = 16384
MOST_CLOCK = 60.0
"""Seconds by which two clocks may differ."""
_UNSYNCHRONISED = 0x0040  # STA_UNSYNC of Linux's adjtimex


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Args:
        name: the subject of the check.
        ok: whether the check passed; ``None`` for a warning.
        found: the finding, in a few words.
        advice: the remedy; empty where none is needed.
    """

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
    name: str

    @classmethod
    def read(cls, kit: Path) -> _Startup:
        folder = kit / "startup"
        server = (folder / "fed_server.json").is_file()
        values = json.loads((folder / ("fed_server.json" if server else "fed_client.json")).read_text())
        entry = (values.get("servers") or [{}])[0]
        participant = entry if server else values.get("client") or {}
        kind = "server" if server else "client"
        service = entry.get("service") or {}
        return cls(
            folder=folder,
            server=server,
            certificate=folder / str(participant.get("ssl_cert") or f"{kind}.crt"),
            key=folder / str(participant.get("ssl_private_key") or f"{kind}.key"),
            root=folder / str(participant.get("ssl_root_cert") or "rootCA.pem"),
            target=str(service.get("target") or ""),
            scheme=str(service.get("scheme") or "grpc"),
            identity=str(entry.get("identity") or ""),
            security=str(participant.get("connection_security") or "mtls"),
            # The server's name may have dots, a site's full name has them before its own.
            name=str(entry.get("admin_server") or "")
            if server
            else str(participant.get("fqsn") or "").rsplit(".", 1)[-1],
        )


def check_startup(kit: str | Path) -> Iterator[Check]:
    """Check a kit's files, without a connection."""
    try:
        startup = _Startup.read(Path(kit))
    except (OSError, ValueError, AttributeError) as error:
        yield Check("startup", False, f"{kit}/startup: not readable ({error})", "Provision the kit again.")
        return
    yield _scripts(startup)
    if _prepared(startup) is None and find_process(kit) is None:
        trouble = python_trouble()
        advice = (
            "Activate the environment of medfedaug, or put it first on the PATH of whoever starts the kit."
        )
        yield Check(
            "python3", not trouble, trouble or "start.sh runs this medfedaug", advice if trouble else ""
        )
    yield from check_certificates(kit)
    yield _names(startup)
    yield from _stale_pid(Path(kit))


def check_certificates(kit: str | Path) -> Iterator[Check]:
    """Check the certificate of a kit: readable, for this key, signed by the root, and valid today."""
    startup = _Startup.read(Path(kit))
    for path in (startup.certificate, startup.key, startup.root):
        if problem := _unreadable(path):
            yield Check("certificate", False, problem, f"Put it back from the kit as it was sent. {_RENEW}")
            return
    try:
        chain = x509.load_pem_x509_certificates(startup.certificate.read_bytes())
        root = x509.load_pem_x509_certificate(startup.root.read_bytes())
    except ValueError as error:
        yield Check("certificate", False, f"{startup.folder}: no certificate can be read ({error})", _RENEW)
        return
    try:
        key = serialization.load_pem_private_key(startup.key.read_bytes(), password=None)
    except (ValueError, TypeError) as error:
        yield Check("certificate", False, f"{startup.key}: no key can be read ({error})", _RENEW)
        return
    if key.public_key() != chain[0].public_key():
        text = f"{startup.key.name} is not the key of {startup.certificate.name}"
        yield Check("certificate", False, text, f"Take both from one kit. {_RENEW}")
        return
    if not _is_signed(chain, root):
        text = f"{startup.certificate.name} is not signed by {startup.root.name}: they are of two projects"
        yield Check("certificate", False, text, f"Take all of startup/ from one kit. {_RENEW}")
        return
    yield _validity(chain, root, startup)
    mode = stat.S_IMODE(startup.key.stat().st_mode)
    if mode & 0o077:
        text = f"{startup.key} can be read by others (mode {mode:o}): who has it can act as this kit"
        yield Check("key", None, text, f"chmod 600 {startup.key}")


def certificate_ends(kit: str | Path) -> dict[str, datetime]:
    """Return the ends of a kit's certificate and of its root certificate, by file, as far as readable."""
    ends = {}
    with suppress(OSError, ValueError, AttributeError):
        startup = _Startup.read(Path(kit))
        for path in (startup.certificate, startup.root):
            with suppress(OSError, ValueError):
                ends[path.name] = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    return ends


def _unreadable(path: Path) -> str:
    if not path.exists():
        return f"{path} is missing"
    # The bits count: root, who can read every file, may not be the user that starts the kit.
    if not path.stat().st_mode & stat.S_IRUSR:
        return f"{path} cannot be read by its owner (mode {stat.S_IMODE(path.stat().st_mode):o})"
    try:
        path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return ""


def _is_signed(chain: list[x509.Certificate], root: x509.Certificate) -> bool:
    try:
        for certificate, issuer in zip(chain, [*chain[1:], root], strict=True):
            if certificate != issuer:  # the root may end the chain itself
                certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


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
    if days < WARN_DAYS:
        return Check(name, None, f"{file} expires in {days} days, on {end:%Y-%m-%d}", _RENEW)
    return Check(name, True, f"of {_common_name(chain[0])}, valid until {end:%Y-%m-%d} ({days} days)")


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _names(startup: _Startup) -> Check:
    """Compare the names in the certificate, in the JSON, and in the script that starts the kit."""
    try:
        certificate = _common_name(x509.load_pem_x509_certificates(startup.certificate.read_bytes())[0])
    except (OSError, ValueError, IndexError):
        return Check("name", None, f"{startup.name}; the certificate cannot be read")
    names = {startup.certificate.name: certificate}
    if startup.name:
        names["fed_server.json" if startup.server else "fed_client.json"] = startup.name
    script = startup.folder / "sub_start.sh"
    text = script.read_text(errors="replace") if script.is_file() else ""
    if not startup.server and (started := re.search(r"\buid=(\S+)", text)):
        names[script.name] = started[1].strip("\"'")
    if len(set(names.values())) > 1:
        text = ", ".join(f"{name} in {file}" for file, name in names.items())
        return Check("name", False, f"{text}: the server refuses it", "Take all of startup/ from one kit.")
    return Check("name", True, certificate)


def _prepared(startup: _Startup) -> tuple[str, ...] | None:
    """Return what starts a kit after `nvflare deploy prepare`; ``None`` for a kit as provisioned."""
    if (startup.folder.parent / _CHART / "Chart.yaml").is_file():
        return (_CHART,)
    return next((names for name, names in _PREPARED.items() if (startup.folder / name).is_file()), None)


def _scripts(startup: _Startup) -> Check:
    prepared = _prepared(startup)
    if prepared == (_CHART,):
        return Check("scripts", True, f"{_CHART} starts the kit in Kubernetes")
    scripts = prepared or _SCRIPTS
    for name in scripts:
        path = startup.folder / name
        if not path.is_file():
            return Check("scripts", False, f"{path} is missing", "Put it back from the kit as it was sent.")
        mode = path.stat().st_mode
        if not mode & stat.S_IXUSR or not mode & stat.S_IRUSR:
            text = f"{path} cannot be run (mode {stat.S_IMODE(mode):o})"
            return Check("scripts", False, text, f"chmod u+rx {path}")
    return Check("scripts", True, f"{' and '.join(', '.join(scripts).rsplit(', ', 1))} can be run")


def _stale_pid(kit: Path) -> Iterator[Check]:
    """Check for a file from before a reboot, by which start.sh mistakes another program for the kit."""
    path = kit / "daemon_pid.fl"
    try:
        command = " ".join(psutil.Process(int(path.read_text())).cmdline())
    except (OSError, ValueError, psutil.Error):
        return
    if not any(part in command for part in ("sub_start.sh", *PARENTS)):
        text = f"{path} is left from before a reboot and names another program: start.sh does nothing"
        yield Check("start", False, text, f"rm {path}")


def check_connection(kit: str | Path) -> Iterator[Check]:
    """Check the way to the server: address, proxy, TCP, TLS with both certificates, and the two clocks."""
    try:
        startup = _Startup.read(Path(kit))
    except (OSError, ValueError, AttributeError):
        return
    if startup.server:
        return
    host, _, port = startup.target.rpartition(":")
    if not host or not port.isdigit():
        text = f"{startup.target or 'no address'} in fed_client.json is no host:port"
        yield Check("server", False, text, "Provision the kit again.")
        return
    variable, proxy = _proxy(host) if startup.scheme == "grpc" else ("", "")
    firewall = "Ask for the server's address and port, and for the way out through the firewall."
    try:
        plain = _connect(host, int(port), proxy)
    except (OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        if proxy:
            shown = proxy.rpartition("@")[2].rpartition("//")[2]  # without user and password
            text = f"{startup.target}: not reachable through {variable}={shown} ({reason})"
            advice = "Let the proxy CONNECT to the server, or name the server's host in no_proxy."
            yield Check("server", False, text, advice)
        elif isinstance(error, socket.gaierror):
            yield Check("server", False, f"{host}: no such host ({error.strerror})", firewall)
        else:
            text = f"{startup.target}: not reachable ({reason})"
            yield Check("server", False, text, f"If the server is up: {firewall[0].lower()}{firewall[1:]}")
        return
    with plain:
        if startup.security in ("mtls", "tls"):
            yield from _check_tls(startup, plain)
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
    request = f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n"
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        request += f"Proxy-Authorization: Basic {base64.b64encode(user.encode()).decode()}\r\n"
    plain = socket.create_connection((parts.hostname, parts.port or 80), timeout=_TIMEOUT)
    try:
        plain.sendall(f"{request}\r\n".encode())
        answer = b""
        while not answer.endswith(b"\r\n\r\n") and len(answer) < _LONGEST_ANSWER:
            if not (byte := plain.recv(1)):  # what follows the header is the server's
                break
            answer += byte
        if not re.match(rb"HTTP/1\.[01] 2\d\d\b", answer):
            line = answer.decode("latin-1").partition("\r\n")[0]
            raise ValueError(f"it answers {printable(line)[:80] or 'nothing'}")
    except BaseException:
        plain.close()
        raise
    return plain


def _check_tls(startup: _Startup, plain: socket.socket) -> Iterator[Check]:
    try:
        context = ssl.create_default_context(cafile=str(startup.root))
        context.check_hostname = False  # as NVFlare does, which compares the server's identity
        if startup.security == "mtls":
            context.load_cert_chain(startup.certificate, startup.key)
        secure = context.wrap_socket(plain)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "verify_message", "") or getattr(error, "reason", None) or str(error)
        text = f"{startup.target}: reachable, and no TLS connection comes about ({reason})"
        advice = "Is it the server of this kit's project? See docs/howto/certificates.md."
        yield Check("server", False, text, advice)
        return
    with secure:
        certificate = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
        name = _common_name(certificate)
        if startup.identity and name != startup.identity:
            text = f"{startup.target}: answers as {name}, and the kit expects {startup.identity}"
            yield Check("server", False, text, "Ask for the server's address and port.")
            return
        try:
            answer = _ask(secure, startup)
        except (ssl.SSLError, ConnectionError) as error:
            reason = getattr(error, "reason", None) or error
            text = f"{startup.target}: the server drops this kit's certificate ({reason})"
            yield Check("server", False, text, "Is the certificate of the server's own project, and valid?")
            return
        end = certificate.not_valid_after_utc
        days = (end - datetime.now(timezone.utc)) // timedelta(days=1)
        text = f"{startup.target}: {name}, its certificate is valid until {end:%Y-%m-%d}"
        if days < WARN_DAYS:
            yield Check("server", None, text, f"It ends in {days} days: tell the lead.")
        else:
            yield Check("server", True, text)
    yield _clock(answer, startup)


def _ask(secure: ssl.SSLSocket, startup: _Startup) -> bytes:
    """Return the server's answer to an empty request; empty where it waits for NVFlare's messages.

    An answer, or a wait for it, shows that the server accepted this kit's certificate.
    """
    secure.settimeout(3.0)
    host = startup.target.rpartition(":")[0]
    if startup.scheme == "http":
        secure.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    try:
        answer = secure.recv(4096)
    except TimeoutError:
        return b""
    if not answer and startup.scheme == "http":
        raise ConnectionError("it closed the connection")
    return answer


def _clock(answer: bytes, startup: _Startup) -> Check:
    """Compare this machine's clock with the server's if its time is known, else ask the kernel."""
    advice = "Set the clock; certificates and records go by it."
    if match := re.search(rb"(?im)^date: *(.+?)\r?$", answer):
        date = parsedate_to_datetime(match[1].decode("ascii", "replace"))
        apart = abs((datetime.now(timezone.utc) - date).total_seconds())
        if apart > MOST_CLOCK:
            return Check("clock", False, f"{apart:.0f} s from the server's", advice)
        return Check("clock", True, "as the server's")
    record = ProcessRecord.load(startup.folder.parent)
    if record is not None and record.is_alive() and record.clock is not None:
        apart, text = abs(record.clock), "s from the server's, which the running kit asked"
        if apart > MOST_CLOCK:
            return Check("clock", False, f"{apart:.0f} {text}", advice)
        return Check("clock", True, f"{apart:.1f} {text}")
    text = f"the server cannot be asked over {startup.scheme} before the kit runs"
    synchronised = _is_synchronised()
    if synchronised is None:
        return Check("clock", None, f"{text}; unknown here")
    if synchronised:
        return Check("clock", True, f"{text}; kept by a time server")
    return Check("clock", None, f"{text}, and no time server keeps this machine's", "Turn NTP on.")


def _is_synchronised() -> bool | None:
    """Ask the kernel whether a time server keeps this machine's clock; ``None`` where it does not know."""
    if ctypes.sizeof(ctypes.c_long) != 8:
        return None
    try:
        state = (ctypes.c_long * 64)()  # struct timex without a request: the kernel only fills it
        if ctypes.CDLL(None).adjtimex(ctypes.byref(state)) < 0:
            return None
        status = ctypes.cast(state, ctypes.POINTER(ctypes.c_int))[10]
    except (OSError, AttributeError):
        return None
    return not status & _UNSYNCHRONISED


class CertificateWatch(FLComponent):
    """Log certificate problems of a server or a site, at once and then every day.

    It begins when NVFlare builds it: a site without a valid certificate waits for its first connection, and
    NVFlare fires no event before.
    """

    def __init__(self, hours: float = 24.0) -> None:
        super().__init__()
        self.hours = hours
        if is_parent():  # its working folder is the kit; a job's process builds this component as well
            target, kit = self._watch, Path.cwd()
            threading.Thread(target=target, args=(kit,), name="certificates", daemon=True).start()

    def _watch(self, kit: Path) -> None:
        await_log()
        while True:
            self._look(kit)
            time.sleep(3600 * self.hours)

    def _look(self, kit: Path) -> None:
        try:
            for check in check_certificates(kit):
                if not check.ok:
                    log = self.logger.warning if check.ok is None else self.logger.error
                    log(f"{check.name}: {check.found}. {check.advice}")
        except Exception as error:
            self.logger.exception(f"the certificate cannot be checked: {error}")


def is_parent() -> bool:
    """Return whether this is the process of a server or a site that starts the jobs' processes."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(main, "name", "") in PARENTS


def await_log() -> None:
    """Wait for the log, which NVFlare sets up after the components: earlier lines would be lost."""
    deadline = time.monotonic() + _LOG_PATIENCE
    while time.monotonic() < deadline:
        if any(isinstance(handler, logging.FileHandler) for handler in logging.getLogger().handlers):
            return
        time.sleep(0.1)
