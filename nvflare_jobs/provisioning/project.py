"""The project file from which NVFlare provisions: the one that is shipped, with other names."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib import resources

import yaml
from nvflare.apis.utils.format_check import name_check

from medfedaug.errors import ConfigError

__all__ = ["check_site_name", "project_file"]

# Of the names that both NVFlare and a federation take.
_SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_SERVER = "server"
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
        f"  - name: {_text(site)}\n    type: client\n    org: {_text(re.sub(r'[^A-Za-z0-9]', '_', site))}\n"
        for site in sites
    )
    text = _SITES.sub(lambda _: clients, text)
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("# To be changed"))


def _text(name: str) -> str:
    """A name as YAML has it: ``01`` is a number there, and ``no`` is false, unless they are quoted."""
    return name if yaml.safe_load(name) == name else json.dumps(name)
