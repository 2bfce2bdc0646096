"""Files from which NVFlare makes kits: a project, or participants that keep their keys.

NVFlare checks all names in them.
"""

import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

import yaml

# The server's and the administrators' organisation, as in the shipped file.
_ORGANISATION = "coordination"


def project_file(sites: Sequence[str], *, server: str, port: int, admin: str, lead: str, name: str) -> str:
    """Return the text of ``project.yml`` for `nvflare provision`, with the builders of the shipped file.

    ``lead`` is the e-mail address of the lead, who submits jobs.
    """
    shipped = yaml.safe_load((resources.files(__package__) / "project.yml").read_text(encoding="utf-8"))
    participants = [
        _entries(server, "server", port),
        *(_entries(site, "site", port) for site in sites),
        {**_entries(admin, "admin", port), "role": "project_admin"},
        _entries(lead, "lead", port),
    ]
    text = f"{len(sites)} sites that train together"
    return _text({**shipped, "name": name, "description": text, "participants": participants})


def profile_file(*, server: str, port: int, name: str) -> str:
    """Return the profile of a project whose participants keep their keys, for `nvflare cert`."""
    address = {"host": server, "fed_learn_port": port, "admin_port": port}
    return _text({"name": name, "scheme": "grpc", "connection_security": "mtls", "server": address})


def participant_file(name: str, kind: str, *, project: str, port: int) -> str:
    """Return the definition of a participant who requests a certificate, for `nvflare cert`.

    NVFlare does not grant the role of the project administrator in this way: ``"admin"`` becomes the
    organisation administrator of the server.
    """
    return _text({"name": project, "participants": [_entries(name, kind, port)]})


def _entries(name: str, kind: str, port: int) -> dict[str, Any]:
    if kind == "site":
        return {"name": name, "type": "client", "org": re.sub(r"[^A-Za-z0-9]", "_", name)}
    if kind == "server":
        return {"name": name, "type": "server", "org": _ORGANISATION, "fed_learn_port": port}
    role = "lead" if kind == "lead" else "org_admin"
    return {"name": name, "type": "admin", "org": _ORGANISATION, "role": role}


def _text(content: dict[str, Any]) -> str:
    return str(yaml.safe_dump(content, sort_keys=False))
