"""Signatures with the certificates of the sites' kits, which prove the owner of public keys."""

from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from medfedaug.errors import ConfigError, first_line, own
from medfedaug.hospital.secure.agreement import require

_PADDING = PSS(mgf=MGF1(SHA256()), salt_length=PSS.DIGEST_LENGTH)


class Identity:
    """Identity without signatures, for simulations on one machine."""

    project = ""  # fingerprint of the project's root certificate

    def sign(self, message: bytes) -> dict[str, bytes]:
        """Return the signature of a message, to be sent with it."""
        return {}

    def check(self, site: str, message: bytes, signed: Mapping[str, Any], what: str = "keys") -> None:
        """Check that a message comes from a site; raise `ValueError` where it does not."""


class Certificates(Identity):
    """Signatures with the RSA keys of NVFlare's kits, certified by the project's root.

    A server cannot replace a site's keys by its own, since it has no certificate of that name. The owner of
    the root's private key can make such certificates.

    Files are PEM; ``strangers`` are certified names that belong to no site, such as the server's.
    """

    def __init__(self, certificate: Path, key: Path, root: Path, strangers: Collection[str] = ()) -> None:
        self.strangers = frozenset(strangers)
        self._certificate = _read(certificate)
        try:
            x509.load_pem_x509_certificate(self._certificate)
            self._root = x509.load_pem_x509_certificate(_read(root))
            signing = load_pem_private_key(_read(key), password=None)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{own(certificate.parent)}: its certificates cannot be used ({first_line(error)}); "
                "provision the kit again"
            ) from error
        assert isinstance(signing, RSAPrivateKey)  # as NVFlare provisions them
        self._key = signing
        self.project = self._root.fingerprint(SHA256()).hex()

    def sign(self, message: bytes) -> dict[str, bytes]:
        """Return the site's certificate, and its signature (RSA-PSS with SHA-256)."""
        return {"certificate": self._certificate, "signature": self._key.sign(message, _PADDING, SHA256())}

    def check(self, site: str, message: bytes, signed: Mapping[str, Any], what: str = "keys") -> None:
        """Check certificate and signature; `ValueError` says why they are not that site's."""
        pem, signature = signed.get("certificate"), signed.get("signature")
        if not isinstance(pem, bytes) or not isinstance(signature, bytes):
            raise ValueError(f"the {what} of site {site} are not signed")
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            certificate.verify_directly_issued_by(self._root)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ValueError(
                f"the {what} of site {site} came with a certificate that the project's root has not issued"
            ) from error
        now = datetime.now(timezone.utc)
        valid = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc
        require(valid, f"the certificate of site {site} has expired, or is not valid yet")
        names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        # NVFlare writes an administrator's role to this field; for a site nothing, or "client" by enrolment.
        roles = {role.value for role in certificate.subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)}
        named = [name.value for name in names] == [site] and not roles - {"client"}
        require(
            named and site not in self.strangers,
            f"the {what} of site {site} came with a certificate that names another site",
        )
        public: Any = certificate.public_key()
        try:
            public.verify(signature, message, _PADDING, SHA256())
        except (InvalidSignature, TypeError) as error:  # a key of another kind takes other arguments
            raise ValueError(f"the {what} of site {site} have a signature that is not theirs") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{own(path)}: cannot be read ({error.strerror}); provision the kit again"
        ) from error
