"""Unpredictable random numbers: key streams, and noise."""

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]
"""Numbers modulo 2^64."""

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
