"""Key agreement and encrypted messages, by the library `cryptography`."""

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from medfedaug.hospital.secret_random import KEY_BYTES

_NONCE_BYTES = 12


class KeyPair:
    """A key pair of X25519 (RFC 7748), from a private key of 32 bytes or a new one."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._key = (
            X25519PrivateKey.generate() if secret is None else X25519PrivateKey.from_private_bytes(secret)
        )

    @property
    def secret(self) -> bytes:
        """The private key."""
        return self._key.private_bytes_raw()

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes, purpose: bytes) -> bytes:
        """Return the 32 bytes that both ends derive from a private key and the other's public key."""
        return derived(self._key.exchange(X25519PublicKey.from_public_bytes(public)), purpose)


def derived(secret: bytes, purpose: bytes) -> bytes:
    """Derive a key from a secret, by HKDF with SHA-256 (RFC 5869)."""
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


def sealed(key: bytes, text: bytes) -> bytes:
    """Encrypt and authenticate a message (ChaCha20-Poly1305, RFC 8439)."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, None)


def opened(key: bytes, message: bytes, reason: str) -> bytes:
    """Decrypt a message of `sealed`; `ValueError` with a reason where it was changed or has another key."""
    try:
        return ChaCha20Poly1305(key).decrypt(message[:_NONCE_BYTES], message[_NONCE_BYTES:], None)
    except InvalidTag:
        raise ValueError(reason) from None
