"""Cryptographic parts, by the library `cryptography`: key streams, noise, keys, messages, shares."""

import math
import os
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray
from torch import Tensor

from medfedaug.errors import translated

Words = NDArray[np.uint64]  # numbers modulo 2^64

KEY_BYTES = 32


def stream(key: bytes, count: int) -> Words:
    """Make ``count`` pseudorandom numbers from a key by AES-256 in counter mode."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


def secret_normal(shape: Sequence[int]) -> Tensor:
    """Draw standard normal numbers, float64, with a new key of the operating system.

    A reader can subtract the noise of a generator with a seed of 32 bits, such as PyTorch's on a CPU, after
    trying all seeds.
    """
    count = math.prod(shape)
    half = -(-count // 2)
    # 53 bits each, in (0, 1): a logarithm of 0 is none.
    uniform = ((stream(os.urandom(KEY_BYTES), 2 * half) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2.0 * np.log(uniform[:half])), 2.0 * np.pi * uniform[half:]
    both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])  # Box and Muller
    return torch.from_numpy(both[:count]).reshape(tuple(shape))


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
    with translated(InvalidTag, to=lambda error: ValueError(reason)):
        return ChaCha20Poly1305(key).decrypt(message[:_NONCE_BYTES], message[_NONCE_BYTES:], None)


SECRET_BYTES = 32
SHARE_BYTES = 66

_PRIME = 2**521 - 1


def split(secret: bytes, count: int, threshold: int) -> list[bytes]:
    """Split a secret: any `threshold` of the shares give it, and fewer reveal nothing of it.

    Shares are values at 1, 2, ... of a random polynomial with the secret at 0 (Shamir, "How to share a
    secret", Communications of the ACM 22, 1979), over the prime field of 2^521 − 1, so that shares that do
    not belong together give a secret of 32 bytes only once in 2^265.
    """
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(_PRIME) for _ in range(threshold - 1))]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * x + coefficient) % _PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret, from at least `threshold` shares by number, from 1 on.

    Raises:
        OverflowError: where the shares are too few, or do not belong together.

    Example:
        >>> shares = split(b"-" * 32, count=5, threshold=3)
        >>> join({1: shares[0], 3: shares[2], 4: shares[3]}) == b"-" * 32
        True
    """
    secret = 0
    for x, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != x:
                above = above * other % _PRIME
                below = below * (other - x) % _PRIME
        # Lagrange's interpolation at 0.
        secret = (secret + int.from_bytes(share, "big") * above * pow(below, -1, _PRIME)) % _PRIME
    return secret.to_bytes(SECRET_BYTES, "big")
