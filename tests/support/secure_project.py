"""Hospitals with certificates of one project."""

import json
from datetime import datetime, timedelta, timezone

from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, serialize_pri_key

SITES, SERVER = ("A", "B", "C"), "fl-server"


class Project:
    """A root certificate, and what it has issued."""

    def __init__(self, name: str = "project") -> None:
        self.name = name
        self.key, public = generate_keys()
        self.root = generate_cert(Identity(name), Identity(name), self.key, public, ca=True)

    def issue(self, name: str, role: str | None = None, days: int = 0):
        """Key and certificate, issued so many days from now."""
        key, public = generate_keys()
        start = datetime.now(timezone.utc) + timedelta(days=days)
        more = {"not_valid_before": start, "valid_days": 10}
        subject, issuer = Identity(name, "org", role), Identity(self.name)
        return key, generate_cert(subject, issuer, self.key, public, **more)


def write_kit(kit, key, certificate, root) -> None:
    startup = kit / "startup"
    startup.mkdir(parents=True)
    (startup / "client.key").write_bytes(serialize_pri_key(key))
    (startup / "client.crt").write_bytes(serialize_cert(certificate))
    (startup / "rootCA.pem").write_bytes(serialize_cert(root))
    servers = [{"name": "project", "identity": SERVER, "service": {}}]
    (startup / "fed_client.json").write_text(json.dumps({"servers": servers}))
