"""The group `enrol`: a project, and certificates whose private keys stay with their owners."""

from enum import Enum
from pathlib import Path
from shlex import quote
from typing import Annotated

from typer import Argument, Option

from medfedaug.cli.console import confirm, err_console, say
from medfedaug.errors import ConfigError

Fingerprint = Annotated[str | None, Option(metavar="SHA256", help="The other side's fingerprint.")]
Requests = Annotated[Path, Option(help="Folder of open requests, with their private keys.")]


class Kind(str, Enum):
    """Kinds of participants."""

    site = "site"
    server = "server"
    lead = "lead"
    admin = "admin"


def request(
    name: Annotated[str, Argument(help="Name of the site, host name of the server, or e-mail address.")],
    kind: Annotated[Kind, Option("--as", help="Part in the federation.")] = Kind.site,
    project: Annotated[str, Option(help="Name of the project.")] = "medfedaug",
    port: Annotated[int, Option(help="The server's one open port, for its own request.")] = 8002,
    requests: Requests = Path("requests"),
) -> None:
    """Make a private key, which stays here, and a request to send to the project's administrator.

    Also for a certificate that expires: accept then renews the kit.
    """
    from medfedaug.nvflare_jobs.provisioning import enrolment

    with err_console.status("making a key"):
        written = enrolment.request(name, kind.value, project=project, port=port, folder=requests)
    say(f"send: {written.path}")
    say(f"fingerprint: {enrolment.fingerprint_text(written.fingerprint)}")
    say("next: read the fingerprint to the administrator on the telephone")


def sign(
    request: Annotated[Path, Argument(help="A request, NAME.request.zip.")],
    project: Annotated[Path, Option(help="Folder of enrol project.")] = Path("project"),
    kind: Annotated[Kind, Option("--as", help="Expected part in the federation.")] = Kind.site,
    fingerprint: Fingerprint = None,
    again: Annotated[bool, Option("--another-key", help="Sign a second key for a name.")] = False,
) -> None:
    """Sign a request after a comparison of its fingerprint on the telephone, and print the root's."""
    from medfedaug.nvflare_jobs.provisioning import enrolment

    signing_request = enrolment.read_request(request)
    say(f"{signing_request.name}: {signing_request.kind} of the project {signing_request.project}")
    enrolment.check_kind(signing_request, kind.value)
    root = enrolment.root_fingerprint(project)
    if enrolment.signed_before(signing_request, project) and not again:
        raise ConfigError(
            f"{signing_request.name}: another key of this name was signed before, and both would be valid; "
            "ask the participant whether the key is a new one, then give --another-key"
        )
    _compare(signing_request.fingerprint, fingerprint, f"{request}, as {signing_request.name} reads it")
    with err_console.status("signing"):
        answer = enrolment.sign(signing_request, project)
    say(f"send: {answer}")
    say(f"fingerprint of the root: {enrolment.fingerprint_text(root)}")
    say(f"next: read the fingerprint to {signing_request.name} on the telephone")


def accept(
    signed: Annotated[Path, Argument(help="The answer, NAME.signed.zip.")],
    fingerprint: Fingerprint = None,
    requests: Requests = Path("requests"),
    kit: Annotated[Path | None, Option(help="Folder of the kit; by default the participant's name.")] = None,
    another_root: Annotated[bool, Option("--another-root", help="Let a kit change its root.")] = False,
) -> None:
    """Make the kit of an answer, or renew the certificate of an existing kit, and remove the request.

    An existing kit keeps its settings, its ledger and its results: only startup/ is new.
    """
    from medfedaug.nvflare_jobs.provisioning import enrolment

    answer = enrolment.read_signed(signed)
    target = kit or Path(answer.name)
    say(f"{answer.name}: {answer.kind} of the project {answer.project}")
    enrolment.check_kit(answer, target, another_root)
    _compare(answer.fingerprint, fingerprint, "the root, as the administrator reads it")
    with err_console.status("making the kit"):
        renewed = enrolment.accept(answer, requests, target)
    if renewed:
        say(f"{target}: has a new certificate; next: medfedaug site restart {target}")
    elif answer.kind.startswith(("site", "server")):
        say(f"{target}: is ready to be configured; next: medfedaug site configure {target}")
    else:
        say(f"{target}: is the kit of {answer.name}")


def project(
    sites: Annotated[str | None, Option(help="Names of the sites, separated by commas.")] = None,
    out: Annotated[Path, Option(help="The file to write.")] = Path("project.yml"),
    own_keys: Annotated[Path | None, Option(help="Folder of the root, instead of --out.")] = None,
    server: Annotated[str, Option(help="The server's host name.")] = "fl-server.example.org",
    port: Annotated[int, Option(help="The server's one open port.")] = 8002,
    admin: Annotated[str, Option(help="E-mail address of the administrator.")] = "admin@example.org",
    lead: Annotated[str, Option(help="E-mail address of the submitter.")] = "lead@example.org",
    name: Annotated[str, Option(help="Name of the project.")] = "medfedaug",
) -> None:
    """Write the project file for kits from one machine; or with --own-keys make the root for enrolments."""
    from medfedaug.nvflare_jobs.provisioning import enrolment
    from medfedaug.nvflare_jobs.provisioning.enrolment import profile_file, project_file
    from medfedaug.utils.files import private_folder, write_text

    target = own_keys or out
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another {'folder' if own_keys else 'file'}")
    if own_keys:
        text = profile_file(server=server, port=port, name=name)
        private_folder(own_keys)
        write_text(own_keys / enrolment.PROFILE, text)
        enrolment.make_root(own_keys)
        root = enrolment.fingerprint_text(enrolment.root_fingerprint(own_keys))
        say(f"{target}: project {name}, server {server}, port {port}; keep it offline")
        say(f"fingerprint of the root: {root}")
        say("next: each participant runs medfedaug enrol request NAME; you run medfedaug enrol sign")
        return
    if sites is None:
        raise ConfigError("--sites is missing: --sites hospital-a,hospital-b")
    names = [part.strip() for part in sites.split(",") if part.strip()]
    text = project_file(names, server=server, port=port, admin=admin, lead=lead, name=name)
    write_text(out, text)
    say(f"{target}: {len(names)} sites, server {server}, port {port}, administrators {admin} and {lead}")
    say(f"next: nvflare provision -p {quote(str(out))} -w kits; the kits are in kits/{name}/prod_00")


def _compare(fingerprint: str, expected: str | None, source: str) -> None:
    """Compare a fingerprint with the other side's, or ask a person to compare."""
    from medfedaug.nvflare_jobs.provisioning import enrolment

    text = enrolment.fingerprint_text(fingerprint)
    if expected is None:
        say(f"fingerprint of {source}: {text}")
        confirm(
            "Does the other side read the same on the telephone?",
            "nothing is done: give --fingerprint with the fingerprint from the other side",
        )
    elif not enrolment.same_fingerprint(fingerprint, expected):
        raise ConfigError(
            f"the fingerprint of {source}, differs: here it is {text}. Somebody may have replaced the file: "
            "ask for a new one"
        )
