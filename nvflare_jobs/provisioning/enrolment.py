"""Project files, and the enrolment of a participant whose private key never leaves it.

Each step is one call of NVFlare's commands (`nvflare cert`, `nvflare package`). A comparison of fingerprints
on the telephone shows that nobody exchanged a file on its way: of the request before it is signed, and of the
root certificate before the answer is accepted.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.x509.oid import NameOID

from medfedaug.errors import ConfigError, RunFailed, config_errors
from medfedaug.utils.files import private_folder
from medfedaug.utils.printable import printable

PROFILE, CA = "project_profile.yaml", "ca"
"""File of the project's profile and folder of its root, both in the administrator's folder of the project."""

SIGNED = "signed_requests.txt"
"""File of the names and fingerprints of the signed requests, in the same folder."""

Kind = Literal["site", "server", "lead", "admin"]  # kinds of participants

_NVFLARE_KINDS = {"site": "site", "server": "server", "lead": "user (lead)", "admin": "user (org_admin)"}
_Parsed = TypeVar("_Parsed")
_LARGEST = 2**20  # bytes of a part of a request or an answer
# The server's and the administrators' organisation, as in the shipped file.
_ORGANISATION = "coordination"


@dataclass(frozen=True)
class Enrolment:
    """Request for a certificate, or the answer to one, in an archive.

    The kind is in NVFlare's words. The fingerprint is the SHA-256 of the request, or of the root certificate
    in the answer.
    """

    name: str
    kind: str
    project: str
    fingerprint: str
    path: Path


def request(
    name: str, kind: Kind = "site", *, project: str = "medfedaug", port: int = 8002, folder: str | Path
) -> Enrolment:
    """Make a private key, which stays in ``folder/name``, and a request for its certificate."""
    target = Path(folder) / name
    # NVFlare grants no project administrator in this way: "admin" is the organisation's, of the server.
    text = _text({"name": project, "participants": [_participant(name, kind, port)]})
    if target.exists():
        raise ConfigError(f"{target}: a request is open; accept its answer, or remove the folder")
    private_folder(Path(folder))
    with tempfile.TemporaryDirectory() as work:
        definition = Path(work) / "participant.yaml"
        definition.write_text(text)
        _nvflare("cert", "request", "-p", definition, "--out", target)
    return read_request(target / f"{name}.request.zip")


def read_request(path: str | Path) -> Enrolment:
    """Read a request from an unknown sender."""
    # It has the hashes of the other parts, which NVFlare compares before it signs.
    content = _part(path, "request.json", bytes)
    return _enrolment(_part(path, "request.json", _entries), hashlib.sha256(content).hexdigest(), path)


def read_signed(path: str | Path) -> Enrolment:
    """Read the answer to a request."""
    return _enrolment(_part(path, "signed.json", _entries), _part(path, "rootCA.pem", _fingerprint), path)


def make_root(project: str | Path) -> None:
    """Make the root certificate of a project, in the folder of its profile."""
    folder = Path(project)
    _nvflare("cert", "init", "--profile", folder / PROFILE, "-o", folder / CA)


def root_fingerprint(project: str | Path) -> str:
    """Return the SHA-256 of a project's root certificate."""
    path = Path(project) / CA / "rootCA.pem"
    if not path.exists():
        raise ConfigError(f"{path} is missing; medfedaug enrol project --own-keys makes it")
    return _fingerprint(path.read_bytes())


def _fingerprint(certificate: bytes) -> str:
    return x509.load_pem_x509_certificate(certificate).fingerprint(hashes.SHA256()).hex()


def check_kind(request: Enrolment, kind: Kind) -> None:
    """Check that a request is for the intended kind: a hospital that requests to be lead could send jobs."""
    if request.kind != _NVFLARE_KINDS[kind]:
        other = next((name for name, words in _NVFLARE_KINDS.items() if words == request.kind), None)
        advice = f"; if that is meant, give --as {other}" if other else ""
        raise ConfigError(f"{request.path}: {request.name} asks to be {request.kind}, and not {kind}{advice}")


def sign(request: Enrolment, project: str | Path) -> Path:
    """Sign a request whose fingerprint was compared; the answer is beside it."""
    folder, target = Path(project), request.path.with_name(f"{request.name}.signed.zip")
    options = ("-c", folder / CA, "--profile", folder / PROFILE, "--out", target)
    with tempfile.TemporaryDirectory() as work:
        copy = Path(shutil.copy(request.path, work))  # nobody can replace it after the comparison
        if read_request(copy).fingerprint != request.fingerprint:
            raise ConfigError(f"{request.path}: is not the request that was compared")
        _nvflare("cert", "approve", copy, *options)
    with (folder / SIGNED).open("a") as log:
        log.write(f"{request.name} {request.fingerprint}\n")
    return target


def check_kit(answer: Enrolment, kit: str | Path, another_root: bool = False) -> None:
    """Check, before anything is replaced, that an answer is of the root that an existing kit trusts."""
    path = Path(kit) / "startup/rootCA.pem"
    if another_root or not path.exists():
        return
    if (trusted := _fingerprint(path.read_bytes())) != answer.fingerprint:
        raise ConfigError(
            f"{kit}: trusts the root {fingerprint_text(trusted)}, and the answer is of the project "
            f"{answer.project} with the root {fingerprint_text(answer.fingerprint)}: whoever has that root "
            "would run this site's federation; nothing is changed. If that is meant, give --another-root"
        )


def signed_before(request: Enrolment, project: str | Path) -> bool:
    """Return whether a certificate for another key of a request's name was signed in a project."""
    log = Path(project) / SIGNED
    known = [line.split() for line in log.read_text().splitlines()] if log.is_file() else []
    return any(name == request.name and digest != request.fingerprint for name, digest in known)


def accept(answer: Enrolment, requests: str | Path, kit: str | Path) -> bool:
    """Make a kit from an answer, whose root was compared, and the private key; or renew its certificate.

    An existing kit keeps everything but its folder ``startup``.
    """
    folder, kit = Path(requests) / answer.name, Path(kit)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no request of {answer.name} is open; name its folder with --requests")
    before = kit / "startup.before"
    renews = (kit / "startup").is_dir()
    if kit.exists() and not renews:
        raise ConfigError(f"{kit} exists and is not a kit; choose another folder")
    private_folder(kit.absolute().parent)
    # In the same folder: a rename is atomic, and the key stays on this file system.
    with tempfile.TemporaryDirectory(dir=kit.absolute().parent, prefix=".enrol-") as work:
        options = ("-w", work, "--fingerprint", answer.fingerprint)
        new = Path(str(_nvflare("package", answer.path, "--request-dir", folder, *options)["output_dir"]))
        if renews:
            if (owner := _owner(kit)) not in ("", _owner(new)):
                raise ConfigError(f"{kit}: is the kit of {owner}, and the answer is for {_owner(new)}")
            shutil.rmtree(before, ignore_errors=True)
            (kit / "startup").rename(before)
            (new / "startup").rename(kit / "startup")
            shutil.rmtree(before)
        else:
            new.rename(kit)
    shutil.rmtree(folder)
    return renews


def _owner(kit: Path) -> str:
    """Return the participant in a kit's certificate; empty where none can be read."""
    for path in (kit / "startup").glob("*.crt"):
        subject = x509.load_pem_x509_certificate(path.read_bytes()).subject
        return printable(subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)[:100]
    return ""


def fingerprint_text(fingerprint: str) -> str:
    """Write a fingerprint in groups of four, to read it aloud.

    Example:
        >>> fingerprint_text("0a8fa70c" + "0" * 56)[:14]
        '0A8F A70C 0000'
    """
    upper = fingerprint.upper()
    return " ".join(upper[i : i + 4] for i in range(0, len(upper), 4))


def same_fingerprint(one: str, other: str) -> bool:
    """Compare two fingerprints, whatever their notation.

    Example:
        >>> same_fingerprint("SHA256:0A:8F", "0a8f")
        True
    """
    return _plain(one) == _plain(other) != ""


def _plain(text: str) -> str:
    lower = text.strip().lower().removeprefix("sha256").removeprefix("sha-256")
    return "".join(c for c in lower if c.isalnum())


def _enrolment(entries: dict[str, Any], fingerprint: str, path: str | Path) -> Enrolment:
    name, kind = str(entries.get("name") or ""), str(entries.get("kind"))
    if printable(name) != name or not name or "/" in name or len(name) > 100:
        raise ConfigError(f"{path}: {printable(name)[:100]!r} is not the name of a participant")
    if entries.get("cert_role"):
        kind = f"{kind} ({entries['cert_role']})"
    return Enrolment(
        name=name,
        kind=printable(kind)[:100],
        project=printable(str(entries.get("project")))[:100],
        fingerprint=fingerprint,
        path=Path(path),
    )


def _entries(content: bytes) -> dict[str, Any]:
    return dict(json.loads(content))


def _part(path: str | Path, name: str, parse: Callable[[bytes], _Parsed]) -> _Parsed:
    if Path(path).exists() and not Path(path).is_file():
        raise ConfigError(f"{path}: not a file")  # a pipe would wait for ever
    kinds = (KeyError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile)
    unreadable = config_errors(f"{path}: no {name} can be read in it", *kinds)
    with unreadable, zipfile.ZipFile(path) as opened, opened.open(name) as file:
        return parse(file.read(_LARGEST))  # a larger one cannot be read as what it should be


def _nvflare(*arguments: str | Path) -> dict[str, Any]:
    """Run a command of NVFlare and return the data of its answer."""
    command = [sys.executable, "-m", "nvflare.cli", "--format", "json", *map(str, arguments)]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = [line for line in process.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RunFailed(f"nvflare {arguments[0]}: {process.stderr.strip()[-300:] or 'it said nothing'}")
    answer = json.loads(lines[-1])
    if answer["status"] != "ok":
        raise ConfigError(f"nvflare {arguments[0]}: {answer['message']} {answer.get('hint') or ''}".rstrip())
    return dict(answer.get("data") or {})


def project_file(sites: Sequence[str], *, server: str, port: int, admin: str, lead: str, name: str) -> str:
    """Return the text of ``project.yml`` for `nvflare provision`, with the builders of the shipped file.

    ``lead`` is the e-mail address of the lead, who submits jobs.
    """
    shipped = yaml.safe_load((resources.files(__package__) / "project.yml").read_text(encoding="utf-8"))
    participants = [
        _participant(server, "server", port),
        *(_participant(site, "site", port) for site in sites),
        {**_participant(admin, "admin", port), "role": "project_admin"},
        _participant(lead, "lead", port),
    ]
    text = f"{len(sites)} sites that train together"
    return _text({**shipped, "name": name, "description": text, "participants": participants})


def profile_file(*, server: str, port: int, name: str) -> str:
    """Return the profile of a project whose participants keep their keys, for `nvflare cert`."""
    address = {"host": server, "fed_learn_port": port, "admin_port": port}
    return _text({"name": name, "scheme": "grpc", "connection_security": "mtls", "server": address})


def _participant(name: str, kind: str, port: int) -> dict[str, Any]:
    if kind == "site":
        return {"name": name, "type": "client", "org": re.sub(r"[^A-Za-z0-9]", "_", name)}
    if kind == "server":
        return {"name": name, "type": "server", "org": _ORGANISATION, "fed_learn_port": port}
    role = "lead" if kind == "lead" else "org_admin"
    return {"name": name, "type": "admin", "org": _ORGANISATION, "role": role}


def _text(content: dict[str, Any]) -> str:
    return str(yaml.safe_dump(content, sort_keys=False))
