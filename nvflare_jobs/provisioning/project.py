"""Files from which NVFlare makes kits: one project file, or requests of participants that keep their keys."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import resources

import yaml
from nvflare.apis.utils.format_check import name_check

from medfedaug.errors import ConfigError

__all__ = ["check_site_name", "project_file", "request_files"]

# Of the names that both NVFlare and a federation take.
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SERVER = "server"
# Of the server and the administrators, as in the shipped file.
_ORGANISATION = "coordination"
_SITES = re.compile(r"(  - name: \S+\n    type: client\n    org: \S+\n)+")


def check_site_name(site: str) -> None:
    """Check that NVFlare can have a site of this name: a dot in it would separate a site from a part of it.

    Raises:
        ConfigError: when it cannot.
    """
    if not _SITE.fullmatch(site):
        raise ConfigError(f"{site!r} is not a name for a site: letters, digits, '_' and '-'")
    if site == _SERVER:
        raise ConfigError(f"{site!r} is not a name for a site: NVFlare's server has it")


def project_file(
    sites: Sequence[str],
    *,
    server: str = "fl-server.example.org",
    port: int = 8002,
    admin: str = "admin@example.org",
    lead: str = "lead@example.org",
    name: str = "medfedaug",
) -> str:
    """The text of ``project.yml`` for `nvflare provision`.

    Args:
        sites: the sites' names, by which results, logs and data folders know them.
        server: the server's host name as the sites resolve it.
        port: the server's one port.
        admin: the project administrator's e-mail address.
        lead: that of who submits jobs.
        name: the project's name.

    Raises:
        ConfigError: for names that cannot be used.
    """
    _check(sites, server=server, port=port, admin=admin, lead=lead, name=name)
    said = {
        "fl-server.example.org": server,
        "8002": str(port),
        "admin@example.org": admin,
        "lead@example.org": lead,
        "\nname: medfedaug": f"\nname: {_text(name)}",
        "Four hospitals that train": f"{len(sites)} sites that train",
        "# Four hospitals": f"# {len(sites)} sites",
    }
    text = (resources.files(__package__) / "project.yml").read_text(encoding="utf-8")
    text = re.sub("|".join(map(re.escape, said)), lambda found: said[found[0]], text)
    clients = "".join(
        f"  - name: {_text(site)}\n    type: client\n    org: {_text(_organisation(site))}\n"
        for site in sites
    )
    text = _SITES.sub(lambda _: clients, text)
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# To be changed"))


def request_files(
    sites: Sequence[str],
    *,
    server: str = "fl-server.example.org",
    port: int = 8002,
    admin: str = "admin@example.org",
    lead: str = "lead@example.org",
    name: str = "medfedaug",
) -> dict[str, str]:
    """Write the files for `nvflare cert`: each participant makes its own key and requests a certificate.

    The arguments are those of `project_file`. NVFlare gives the role of the project administrator to nobody
    in this way: ``admin`` becomes the organisation administrator of the server.

    Returns:
        The content of ``project_profile.yaml``, and of one file for each participant, by file name.

    Raises:
        ConfigError: for names that cannot be used.
    """
    _check(sites, server=server, port=port, admin=admin, lead=lead, name=name)
    address = {"host": server, "fed_learn_port": port, "admin_port": port}
    profile = {"name": name, "scheme": "grpc", "connection_security": "mtls", "server": address}
    own = {"type": "server", "org": _ORGANISATION, "fed_learn_port": port}
    participants: dict[str, dict[str, object]] = {server: own}
    for site in sites:
        participants[site] = {"type": "client", "org": _organisation(site)}
    for person, role in ((admin, "org_admin"), (lead, "lead")):
        participants[person] = {"type": "admin", "org": _ORGANISATION, "role": role}
    contents: dict[str, object] = {"project_profile.yaml": profile}
    for participant, entries in participants.items():
        contents[f"{participant}.yaml"] = {"name": name, "participants": [{"name": participant, **entries}]}
    return {file: yaml.safe_dump(content, sort_keys=False) for file, content in contents.items()}


def _check(sites: Sequence[str], *, server: str, port: int, admin: str, lead: str, name: str) -> None:
    for site in sites:
        check_site_name(site)
        if list(sites).count(site) > 1 or site == server:
            raise ConfigError(f"two participants have the name {site}")
    if len(sites) < 2:
        raise ConfigError("a federation needs two sites or more: --sites a,b,c")
    for kind, given, what in (
        ("server", server, "a host name"),
        ("simple_name", name, "a name for a project: letters, digits and '_'"),
        ("admin", admin, "an e-mail address, by which NVFlare knows administrators"),
        ("admin", lead, "an e-mail address, by which NVFlare knows administrators"),
    ):
        if name_check(given, kind)[0]:
            raise ConfigError(f"{given!r} is not {what}")
    if admin == lead:
        raise ConfigError(f"admin and lead need two addresses, both are {admin}")
    if not 0 < port < 65536:
        raise ConfigError(f"{port} is not a port")


def _organisation(site: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", site)


def _text(name: str) -> str:
    """A name as YAML has it: ``01`` is a number there, and ``no`` is false, unless they are quoted."""
    return name if yaml.safe_load(name) == name else json.dumps(name)
