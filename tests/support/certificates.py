"""Certificates of a provisioned project, issued anew with its root key, as who provisions can."""

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def root_key(kits: Path) -> rsa.RSAPrivateKey:
    """The key of the project's root, which NVFlare keeps next to the kits."""
    state = json.loads((kits.parent / "state/cert.json").read_text())
    return serialization.load_pem_private_key(state["root_pri_key"].encode(), None)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def issue(
    startup: Path,
    issuer: rsa.RSAPrivateKey,
    name: str,
    begin: float = -1,
    days: float = 360,
    kind: str = "client",
) -> None:
    """Put a new certificate and its key into a kit.

    Args:
        startup: the kit's folder.
        issuer: signs it.
        name: the common name.
        begin: days from now.
        days: its length.
        kind: of the files.
    """
    root = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes())
    key, start = new_key(), datetime.now(timezone.utc) + timedelta(days=begin)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(root.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .sign(issuer, hashes.SHA256())
    )
    (startup / f"{kind}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = (serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption())
    (startup / f"{kind}.key").write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))


def other_root(startup: Path) -> rsa.RSAPrivateKey:
    """Put the root of another project, of the same name, into a kit."""
    old, key = x509.load_pem_x509_certificate((startup / "rootCA.pem").read_bytes()), new_key()
    root = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(old.not_valid_after_utc)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (startup / "rootCA.pem").write_bytes(root.public_bytes(serialization.Encoding.PEM))
    return key
