"""Files from which NVFlare makes kits: a project, or participants that keep their keys."""

import json
import re
from collections.abc import Sequence
from importlib import resources

import yaml
from nvflare.apis.utils.format_check import name_check

from medfedaug.errors import ConfigError

# The names that both NVFlare and a federation take.
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SERVER = "server"
# The server's and the administrators' organisation, as in the shipped file.
_ORGANISATION = "coordination"
_NAMES = {
    "server": "a host name",
    "simple_name": "a name for a project: letters, digits and '_'",
    "admin": "an e-mail address, by which NVFlare knows administrators",
}
_SITES = re.compile(r"(  - name: \S+\n    type: client\n    org: \S+\n)+")


def check_site_name(site: str) -> None:
    """Check a site's name for NVFlare, where a dot would separate a site from a part of it."""
    if not _SITE.fullmatch(site):
        raise ConfigError(f"{site!r} is not a valid name for a site: letters, digits, '_' and '-'")
    if site == _SERVER:
        raise ConfigError(f"{site!r} is not a valid name for a site: NVFlare's server has it")


def project_file(
    sites: Sequence[str],
    *,
    server: str = "fl-server.example.org",
    port: int = 8002,
    admin: str = "admin@example.org",
    lead: str = "lead@example.org",
    name: str = "medfedaug",
) -> str:
    """Return the text of ``project.yml`` for `nvflare provision`.

    Sites have their names in results, logs and data folders, and the server its host name for the sites.
    ``lead`` is the e-mail address of the lead, who submits jobs.
    """
    _check(sites, server=server, port=port, admin=admin, lead=lead, name=name)
    replacements = {
        "fl-server.example.org": server,
        "8002": str(port),
        "admin@example.org": admin,
        "lead@example.org": lead,
        "\nname: medfedaug": f"\nname: {_text(name)}",
        "Four hospitals that train": f"{len(sites)} sites that train",
        "# Four hospitals": f"# {len(sites)} sites",
    }
    text = (resources.files(__package__) / "project.yml").read_text(encoding="utf-8")
    text = re.sub("|".join(map(re.escape, replacements)), lambda match: replacements[match[0]], text)
    clients = "".join(
        f"  - name: {_text(site)}\n    type: client\n    org: {_text(_organisation(site))}\n"
        for site in sites
    )
    text = _SITES.sub(lambda _: clients, text)
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# To be changed"))


def profile_file(*, server: str, port: int, name: str) -> str:
    """Return the profile of a project whose participants keep their keys, for `nvflare cert`."""
    _check_project(server=server, port=port, name=name)
    address = {"host": server, "fed_learn_port": port, "admin_port": port}
    profile = {"name": name, "scheme": "grpc", "connection_security": "mtls", "server": address}
    return str(yaml.safe_dump(profile, sort_keys=False))


def participant_file(name: str, kind: str, *, project: str, port: int) -> str:
    """Return the definition of a participant who requests a certificate, for `nvflare cert`.

    NVFlare does not grant the role of the project administrator in this way: ``"admin"`` becomes the
    organisation administrator of the server.
    """
    if kind == "site":
        check_site_name(name)
        entries: dict[str, object] = {"type": "client", "org": _organisation(name)}
        _check_project(port=port, name=project)
    elif kind == "server":
        entries = {"type": "server", "org": _ORGANISATION, "fed_learn_port": port}
        _check_project(server=name, port=port, name=project)
    else:
        role = "lead" if kind == "lead" else "org_admin"
        entries = {"type": "admin", "org": _ORGANISATION, "role": role}
        _check_name("admin", name)
        _check_project(port=port, name=project)
    definition = {"name": project, "participants": [{"name": name, **entries}]}
    return str(yaml.safe_dump(definition, sort_keys=False))


def _check(sites: Sequence[str], *, server: str, port: int, admin: str, lead: str, name: str) -> None:
    for site in sites:
        check_site_name(site)
        if list(sites).count(site) > 1 or site == server:
            raise ConfigError(f"two participants have the name {site}")
    if len(sites) < 2:
        raise ConfigError("a federation needs two sites or more: --sites a,b,c")
    _check_project(server=server, port=port, name=name)
    for person in (admin, lead):
        _check_name("admin", person)
    if admin == lead:
        raise ConfigError(f"admin and lead need two addresses, both are {admin}")


def _check_project(*, port: int, name: str, server: str | None = None) -> None:
    if server is not None:
        _check_name("server", server)
    _check_name("simple_name", name)
    if not 0 < port < 65536:
        raise ConfigError(f"{port} is not a port")


def _check_name(kind: str, name: str) -> None:
    if name_check(name, kind)[0]:
        raise ConfigError(f"{name!r} is not {_NAMES[kind]}")


def _organisation(site: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", site)


def _text(name: str) -> str:
    """Quote a name for YAML where needed: ``01`` is a number there, and ``no`` is false."""
    return name if yaml.safe_load(name) == name else json.dumps(name)
