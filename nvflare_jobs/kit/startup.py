"""Checks of a kit's ``startup`` folder: certificates, modes, names, and the way to the server.

NVFlare's own ``nvflare preflight-check`` says PASSED for a client certificate that is missing or has expired.
"""

from __future__ import annotations

import ctypes
import json
import logging
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
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID
from nvflare.apis.fl_component import FLComponent

from medfedaug.nvflare_jobs.kit.kit_process import PARENTS, ProcessRecord
from medfedaug.nvflare_jobs.public_paths import public_path

WARN_DAYS = 30
"""Days before the end of a certificate from which on it is warned of."""

_RENEW = "Ask who provisions for a new kit: docs/howto/certificates.md."
_SCRIPTS = ("start.sh", "sub_start.sh", "stop_fl.sh")
# Of a kit from `nvflare deploy prepare`, which removes the others; Kubernetes has a chart in their place.
_PREPARED = {"start_docker.sh": ("start_docker.sh",), "start_slurm.sh": ("start_slurm.sh", "sub_start.sh")}
_CHART = "helm_chart"
_LOG_PATIENCE = 60.0  # seconds
_TIMEOUT = 10.0
MOST_CLOCK = 60.0
"""Seconds by which two clocks may differ."""
_UNSYNCHRONISED = 0x0040  # STA_UNSYNC of Linux's adjtimex


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Args:
        name: what.
        ok: whether it is as it should be; ``None`` where a site can do without, for now.
        found: what was found, in a few words.
        advice: what to do about it, empty where nothing is to be done.
    """

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@dataclass(frozen=True)
class _Startup:
    """Contents of a kit's JSON: its own files, and the server."""

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
        own = entry if server else values.get("client") or {}
        kind = "server" if server else "client"
        service = entry.get("service") or {}
        return cls(
            folder=folder,
            server=server,
            certificate=folder / str(own.get("ssl_cert") or f"{kind}.crt"),
            key=folder / str(own.get("ssl_private_key") or f"{kind}.key"),
            root=folder / str(own.get("ssl_root_cert") or "rootCA.pem"),
            target=str(service.get("target") or ""),
            scheme=str(service.get("scheme") or "grpc"),
            identity=str(entry.get("identity") or ""),
            security=str(own.get("connection_security") or "mtls"),
            name=str(entry.get("admin_server") or "")
            if server
            else str(own.get("fqsn") or "").rsplit(".", 1)[-1],
        )


def check_startup(kit: str | Path) -> Iterator[Check]:
    """Check a kit's files, without a connection."""
    try:
        startup = _Startup.read(Path(kit))
    except (OSError, ValueError, AttributeError) as error:
        yield Check("startup", False, f"{kit}/startup: not readable ({error})", "Provision the kit again.")
        return
    yield _scripts(startup)
    yield from check_certificates(kit)
    yield _names(startup)
    if (found := _left_pid(Path(kit))) is not None:
        yield found


def check_certificates(kit: str | Path) -> Iterator[Check]:
    """Check the certificate of a kit: there, readable, for this key, signed by the root, and valid today."""
    try:
        startup = _Startup.read(Path(kit))
    except (OSError, ValueError, AttributeError) as error:
        yield Check(
            "certificate", False, f"{kit}/startup: not readable ({error})", "Provision the kit again."
        )
        return
    for path in (startup.certificate, startup.key, startup.root):
        problem = _unreadable(path)
        if problem:
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
    if _public(key) != _public(chain[0]):
        found = f"{startup.key.name} is not the key of {startup.certificate.name}"
        yield Check("certificate", False, found, f"Take both from one kit. {_RENEW}")
        return
    if not _is_signed(chain, root):
        found = f"{startup.certificate.name} is not signed by {startup.root.name}: they are of two projects"
        yield Check("certificate", False, found, f"Take all of startup/ from one kit. {_RENEW}")
        return
    yield _validity(chain, root, startup)
    mode = stat.S_IMODE(startup.key.stat().st_mode)
    if mode & 0o077:
        found = f"{startup.key} can be read by others (mode {mode:o}): who has it can act as this kit"
        yield Check("key", None, found, f"chmod 600 {startup.key}")


def certificate_ends(kit: str | Path) -> dict[str, datetime]:
    """Return the ends of a kit's own and of its root certificate, by file, as far as they can be read."""
    found = {}
    try:
        startup = _Startup.read(Path(kit))
    except (OSError, ValueError, AttributeError):
        return {}
    for path in (startup.certificate, startup.root):
        with suppress(OSError, ValueError):
            found[path.name] = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    return found


def _unreadable(path: Path) -> str:
    if not path.exists():
        return f"{path} is missing"
    # By the bits, since nothing is unreadable for root, who may not be the one that starts the kit.
    if not path.stat().st_mode & stat.S_IRUSR:
        return f"{path} cannot be read by its owner (mode {stat.S_IMODE(path.stat().st_mode):o})"
    try:
        path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    return ""


def _public(thing: Any) -> bytes:
    form = (serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return bytes(thing.public_key().public_bytes(*form))


def _is_signed(chain: list[x509.Certificate], root: x509.Certificate) -> bool:
    issuers = [*chain[1:], root]
    try:
        for certificate, issuer in zip(chain, issuers, strict=True):
            if certificate != issuer:  # the root may end the chain itself
                certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _validity(chain: list[x509.Certificate], root: x509.Certificate, startup: _Startup) -> Check:
    now = datetime.now(timezone.utc)
    begin = max(one.not_valid_before_utc for one in (*chain, root))
    end = min(one.not_valid_after_utc for one in (*chain, root))
    of_root = end == root.not_valid_after_utc != chain[0].not_valid_after_utc
    which = startup.root.name if of_root else startup.certificate.name
    name = "certificate"
    if begin > now:
        when = "%Y-%m-%d %H:%M"
        found = f"{startup.certificate.name} is valid from {begin:{when}} UTC, and here it is {now:{when}}"
        return Check(name, False, found, "Set this machine's clock.")
    if end < now:
        found = f"{which} expired on {end:%Y-%m-%d}: no connection is possible"
        return Check(name, False, found, _RENEW)
    days = (end - now) // timedelta(days=1)
    found = f"of {_common_name(chain[0])}, valid until {end:%Y-%m-%d} ({days} days)"
    if days < WARN_DAYS:
        return Check(name, None, f"{which} expires in {days} days, on {end:%Y-%m-%d}", _RENEW)
    return Check(name, True, found)


def _common_name(certificate: x509.Certificate) -> str:
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def _names(startup: _Startup) -> Check:
    """The name in the certificate, in the JSON, and in the script that starts the kit."""
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
        found = ", ".join(f"{name} in {file}" for file, name in names.items())
        return Check("name", False, f"{found}: the server refuses it", "Take all of startup/ from one kit.")
    return Check("name", True, certificate)


def _scripts(startup: _Startup) -> Check:
    if (startup.folder.parent / _CHART / "Chart.yaml").is_file():
        return Check("scripts", True, f"{_CHART} starts the kit in Kubernetes")
    prepared = (names for script, names in _PREPARED.items() if (startup.folder / script).is_file())
    scripts = next(prepared, _SCRIPTS)
    for name in scripts:
        path = startup.folder / name
        if not path.is_file():
            return Check("scripts", False, f"{path} is missing", "Put it back from the kit as it was sent.")
        mode = path.stat().st_mode
        if not mode & stat.S_IXUSR or not mode & stat.S_IRUSR:
            return Check(
                "scripts", False, f"{path} cannot be run (mode {stat.S_IMODE(mode):o})", f"chmod u+rx {path}"
            )
    *first, last = scripts
    named = f"{', '.join(first)} and {last}" if first else last
    return Check("scripts", True, f"{named} can be run")


def _left_pid(kit: Path) -> Check | None:
    """The file by which start.sh takes another program for the kit, after a reboot."""
    path = kit / "daemon_pid.fl"
    try:
        process = psutil.Process(int(path.read_text()))
        command = " ".join(process.cmdline())
    except (OSError, ValueError, psutil.Error):
        return None
    if any(part in command for part in ("sub_start.sh", *PARENTS)):
        return None
    found = f"{path} is left from before a reboot and names another program: start.sh does nothing"
    return Check("start", False, found, f"rm {path}")


def check_connection(kit: str | Path) -> Iterator[Check]:
    """Check the way to the server: address, TCP, TLS with both certificates, and the two clocks."""
    try:
        startup = _Startup.read(Path(kit))
    except (OSError, ValueError, AttributeError):
        return
    host, _, port = startup.target.rpartition(":")
    if startup.server or not host or not port.isdigit():
        if not startup.server:
            found = f"{startup.target or 'no address'} in fed_client.json is no host:port"
            yield Check("server", False, found, "Provision the kit again.")
        return
    firewall = "Ask for the server's address and port, and for the way out through the firewall."
    try:
        plain = socket.create_connection((host, int(port)), timeout=_TIMEOUT)
    except socket.gaierror as error:
        yield Check("server", False, f"{host}: no such host ({error.strerror})", firewall)
        return
    except (OSError, OverflowError) as error:
        found = f"{startup.target}: not reachable ({getattr(error, 'strerror', None) or error})"
        yield Check("server", False, found, f"If the server is up: {firewall[0].lower()}{firewall[1:]}")
        return
    if startup.security not in ("mtls", "tls"):
        plain.close()
        yield Check("server", None, f"{startup.target}: reachable; the kit says {startup.security}, no TLS")
        return
    with plain:
        yield from _speak(startup, plain)


def _speak(startup: _Startup, plain: socket.socket) -> Iterator[Check]:
    try:
        context = ssl.create_default_context(cafile=str(startup.root))
        context.check_hostname = False  # as NVFlare does, which compares the server's identity
        if startup.security == "mtls":
            context.load_cert_chain(startup.certificate, startup.key)
        secure = context.wrap_socket(plain)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "verify_message", "") or getattr(error, "reason", None) or str(error)
        found = f"{startup.target}: reachable, and no TLS connection comes about ({reason})"
        yield Check(
            "server", False, found, "Is it the server of this kit's project? See docs/howto/certificates.md."
        )
        return
    with secure:
        certificate = x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")
        name = _common_name(certificate)
        if startup.identity and name != startup.identity:
            found = f"{startup.target}: answers as {name}, and the kit expects {startup.identity}"
            yield Check("server", False, found, "Ask for the server's address and port.")
            return
        try:
            answer = _ask(secure, startup)
        except (ssl.SSLError, ConnectionError) as error:
            reason = getattr(error, "reason", None) or error
            found = f"{startup.target}: the server drops this kit's certificate ({reason})"
            yield Check("server", False, found, "Is the certificate of the server's own project, and valid?")
            return
        end = certificate.not_valid_after_utc
        days = (end - datetime.now(timezone.utc)) // timedelta(days=1)
        text = f"{startup.target}: {name}, its certificate is valid until {end:%Y-%m-%d}"
        soon = days < WARN_DAYS
        yield Check(
            "server", None if soon else True, text, f"It ends in {days} days: tell the lead." if soon else ""
        )
    yield _clock(answer, startup)


def _ask(secure: ssl.SSLSocket, startup: _Startup) -> bytes:
    """The server's answer to a request that asks nothing; empty where it waits for NVFlare's own messages.

    Only an answer, or that it waits, says that the server took this kit's certificate.
    """
    secure.settimeout(3.0)
    host = startup.target.rpartition(":")[0]
    if startup.scheme == "http":
        secure.sendall(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    try:
        found = secure.recv(4096)
    except TimeoutError:
        return b""
    if not found and startup.scheme == "http":
        raise ConnectionError("it closed the connection")
    return found


def _clock(answer: bytes, startup: _Startup) -> Check:
    """This machine's clock against the server's, where its answer has a date; else whether it is kept."""
    dated = re.search(rb"(?im)^date: *(.+?)\r?$", answer)
    if dated:
        there = parsedate_to_datetime(dated[1].decode("ascii", "replace"))
        apart = abs((datetime.now(timezone.utc) - there).total_seconds())
        if apart > MOST_CLOCK:
            found = f"{apart:.0f} s from the server's"
            return Check("clock", False, found, "Set the clock; certificates and records go by it.")
        return Check("clock", True, "as the server's")
    record = ProcessRecord.load(startup.folder.parent)
    if record is not None and record.is_alive() and record.clock is not None:
        apart, text = abs(record.clock), "s from the server's, which the running kit asked"
        if apart > MOST_CLOCK:
            advice = "Set the clock; certificates and records go by it."
            return Check("clock", False, f"{apart:.0f} {text}", advice)
        return Check("clock", True, f"{apart:.1f} {text}")
    kept = _is_synchronised()
    text = f"the server cannot be asked over {startup.scheme} before the kit runs"
    if kept is False:
        return Check("clock", None, f"{text}, and no time server keeps this machine's", "Turn NTP on.")
    return Check(
        "clock", True if kept else None, f"{text}; {'kept by a time server' if kept else 'unknown here'}"
    )


def _is_synchronised() -> bool | None:
    """True where the kernel knows this machine's clock to be kept by a time server."""
    if ctypes.sizeof(ctypes.c_long) != 8:
        return None
    try:
        state = (ctypes.c_long * 64)()  # struct timex, of which nothing is set: it is read alone
        if ctypes.CDLL(None).adjtimex(ctypes.byref(state)) < 0:
            return None
        status = ctypes.cast(state, ctypes.POINTER(ctypes.c_int))[10]
    except (OSError, AttributeError):
        return None
    return not status & _UNSYNCHRONISED


@public_path
class CertificateWatch(FLComponent):
    """Says in the log of a server or a site, at once and then every day, that its certificate is of no use.

    It begins when NVFlare builds it. No event would do: a site without a valid certificate waits for its
    first connection before any is fired.
    """

    def __init__(self, hours: float = 24.0) -> None:
        super().__init__()
        self.hours = hours
        if is_parent():  # which works in the kit's folder; a job's process builds this component as well
            thread = threading.Thread(
                target=self._watch, args=(Path.cwd(),), name="certificates", daemon=True
            )
            thread.start()

    def _watch(self, kit: Path) -> None:
        await_log()
        while True:
            self._look(kit)
            time.sleep(3600 * self.hours)

    def _look(self, kit: Path) -> None:
        try:
            for finding in check_certificates(kit):
                if finding.ok is not True:
                    log = self.logger.error if finding.ok is False else self.logger.warning
                    log(f"{finding.name}: {finding.found}. {finding.advice}")
        except Exception as error:
            self.logger.exception(f"the certificate cannot be checked: {error}")


def is_parent() -> bool:
    """Return whether this is the process of a server or a site that starts the jobs' processes."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return getattr(main, "name", "") in PARENTS


def await_log() -> None:
    """Wait for the log, which NVFlare sets up after the components: until then nothing would be written."""
    deadline = time.monotonic() + _LOG_PATIENCE
    while time.monotonic() < deadline:
        if any(isinstance(handler, logging.FileHandler) for handler in logging.getLogger().handlers):
            return
        time.sleep(0.1)
