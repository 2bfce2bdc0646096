"""Identity of a site under secure aggregation: key and certificate of its NVFlare kit."""

from __future__ import annotations

from pathlib import Path

from medfedaug.errors import ConfigError, own
from medfedaug.federation.secure.identity import Certificates
from medfedaug.utils.files import parse_json


def kit_identity(kit: Path) -> Certificates:
    """Return the certificates in a site's kit; the server's names are no site's."""
    startup = kit / "startup"
    file = startup / "fed_client.json"
    try:
        servers = parse_json(file.read_text())["servers"]
        names = [str(server[key]) for server in servers for key in ("identity", "name") if key in server]
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = f"{own(file)}: does not name the server ({error}); provision the kit again"
        raise ConfigError(text) from error
    certificate, key, root = (startup / name for name in ("client.crt", "client.key", "rootCA.pem"))
    return Certificates(certificate, key, root, names)
