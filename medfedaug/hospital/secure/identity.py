"""Signatures with the certificates of the sites' kits, which prove the owner of public keys."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
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

from medfedaug.errors import config_errors, own, translated
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
        with _kit_file(certificate):
            self._certificate = certificate.read_bytes()
            x509.load_pem_x509_certificate(self._certificate)
        with _kit_file(root):
            self._root = x509.load_pem_x509_certificate(root.read_bytes())
        with _kit_file(key):
            signing = load_pem_private_key(key.read_bytes(), password=None)
        assert isinstance(signing, RSAPrivateKey)  # as NVFlare provisions them
        self._key = signing
        self.project = self._root.fingerprint(SHA256()).hex()

    def sign(self, message: bytes) -> dict[str, bytes]:
        """Return the site's certificate, and its signature (RSA-PSS with SHA-256)."""
        return {"certificate": self._certificate, "signature": self._key.sign(message, _PADDING, SHA256())}

    def check(self, site: str, message: bytes, signed: Mapping[str, Any], what: str = "keys") -> None:
        """Check certificate and signature; `ValueError` says why they are not that site's."""
        pem: Any = signed.get("certificate")
        signature: Any = signed.get("signature")
        both = isinstance(pem, bytes) and isinstance(signature, bytes)
        require(both, f"the {what} of site {site} are not signed")
        with _proving(
            f"the {what} of site {site} came with a certificate that the project's root has not issued"
        ):
            certificate = x509.load_pem_x509_certificate(pem)
            certificate.verify_directly_issued_by(self._root)
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
        with _proving(f"the {what} of site {site} have a signature that is not theirs"):
            public.verify(signature, message, _PADDING, SHA256())


def _kit_file(path: Path) -> AbstractContextManager[None]:
    return config_errors(f"{own(path)}: cannot be read", remedy="; provision the kit again")


def _proving(otherwise: str) -> AbstractContextManager[None]:
    # `TypeError`: a key of another kind takes other arguments.
    return translated(InvalidSignature, TypeError, ValueError, to=lambda error: ValueError(otherwise))
