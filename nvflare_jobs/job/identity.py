"""Identity of a site under secure aggregation: key and certificate of its NVFlare kit."""

from __future__ import annotations

from pathlib import Path

from medfedaug.errors import ConfigError, own
from medfedaug.federation.secure.identity import Certificates
from medfedaug.utils.files import parse_json


def kit_identity(kit: Path) -> Certificates:
    """The certificates in a site's kit. Those of the server are of no site."""
    startup = kit / "startup"
    file = startup / "fed_client.json"
    try:
        servers = parse_json(file.read_text())["servers"]
        strangers = [
            str(server[name]) for server in servers for name in ("identity", "name") if name in server
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{own(file)}: does not name the server ({error}); provision the kit again"
        ) from error
    certificate, key, root = (startup / name for name in ("client.crt", "client.key", "rootCA.pem"))
    return Certificates(certificate, key, root, strangers)
