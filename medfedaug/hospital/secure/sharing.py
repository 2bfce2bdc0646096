"""Shamir's secret sharing: any `threshold` of the shares give the secret, and fewer reveal nothing of it.

Shamir, "How to share a secret", Communications of the ACM 22 (1979). Over the prime field of 2^521 − 1, so
that shares that do not belong together give a secret of 32 bytes only once in 2^265.
"""

import secrets
from collections.abc import Mapping

SECRET_BYTES = 32
SHARE_BYTES = 66

_PRIME = 2**521 - 1


def split(secret: bytes, count: int, threshold: int) -> list[bytes]:
    """Split a secret: values at 1, 2, ... of a random polynomial with the secret at 0."""
    polynomial = [int.from_bytes(secret, "big"), *(secrets.randbelow(_PRIME) for _ in range(threshold - 1))]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * x + coefficient) % _PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret, from at least `threshold` shares by number, from 1 on; else `ValueError`.

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
    try:
        return secret.to_bytes(SECRET_BYTES, "big")
    except OverflowError:
        raise ValueError("the shares do not belong together") from None
