"""Values that both ends of secure aggregation derive from messages: signed bytes, purposes of masks.

``docs/decisions/secure_aggregation.md`` describes the protocol. Bonawitz et al., "Practical Secure
Aggregation for Privacy-Preserving Machine Learning", CCS 2017.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from medfedaug.federation.messages.messages import FROZEN, Request
from medfedaug.hospital.primitives import KEY_BYTES
from medfedaug.methods.base import Payload

LEAST_SITES = 3  # least number of sites: of two sites each could compute the other's numbers from the sum

_DIGEST_BYTES = 32
_PREFIX = b"medfedaug secure aggregation, "

Shares = Mapping[str, Mapping[str, bytes]]  # shares by dealing site and receiving site


def require(condition: object, reason: str) -> None:
    """Refuse a step of another member: raise `ValueError`, which a member's `SiteMasks` names."""
    if not condition:
        raise ValueError(reason)


def threshold(sites: int) -> int:
    """Return the number of sites that must answer in the end: two thirds of those with keys.

    >>> [threshold(sites) for sites in (3, 4, 5, 6, 16)]
    [2, 3, 4, 4, 11]
    """
    return -(-2 * sites // 3)


def request_digest(request: Request, once: Payload) -> bytes:
    """Hash everything in a training request that decides over the training."""
    content = [request.round, request.run, request.selected_round, request.planned]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    # A site has added the frozen entries to the model, and the server has left them out. A tensor that the
    # model itself brings under such a name is another one, and decides over the training.
    trained = {k: v for k, v in request.weights.items() if once.get(f"{FROZEN}/{k}") is not v}
    for tensors in (trained, once, request.payload):
        digest.update(_tensors_digest(tensors))
    return digest.digest()


def _tensors_digest(tensors: Mapping[str, Any]) -> bytes:
    digest = hashlib.sha256()
    for key in sorted(tensors):
        value = tensors[key]
        require(isinstance(value, Tensor), f"{key} is not a tensor")
        head = [key, str(value.dtype), list(value.shape)]
        digest.update(json.dumps(head).encode())
        # As bytes, since NumPy has no bfloat16.
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


@dataclass(frozen=True)
class Training:
    """The training on which the sites of a round agree before they deal shares.

    Each site computes ``config``, the hash of the job's configuration; ``request`` is `request_digest` of the
    coming request, and ``weights`` are those of the round's sites in the mean of the models.
    """

    run: str
    round: int
    config: str
    request: bytes
    weights: Mapping[str, float]

    @cached_property
    def digest(self) -> bytes:
        """The hash of all fields."""
        content = [self.run, self.round, self.config, self.request.hex(), dict(self.weights)]
        return hashlib.sha256(_PREFIX + json.dumps(content, sort_keys=True).encode()).digest()

    def total(self, sites: Iterable[str]) -> float:
        """Return the sum of the weights of some sites."""
        return float(sum(self.weights[site] for site in sorted(sites)))

    @staticmethod
    def read(masks: Mapping[str, Any]) -> tuple[bytes, dict[str, float]]:
        """Return the server's announcement of a training: the hash of its request, and the weights."""
        request: Any = masks.get("request")
        weights: Any = masks.get("weights")
        announced = isinstance(request, bytes) and len(request) == _DIGEST_BYTES
        require(announced and isinstance(weights, dict), "the server announced no training")
        for site, weight in weights.items():
            sound = isinstance(site, str) and type(weight) is float and 0 < weight < 2.0**53
            require(sound, "the server announced no weights")
        return request, dict(weights)


@dataclass(frozen=True)
class PublicKeys:
    """The public keys of a site for one round: for shares from other sites, and for common masks."""

    cipher: bytes
    mask: bytes

    def message(self, training: Training, site: str) -> bytes:
        """Return the bytes that the site signs: its keys, bound to this training."""
        content = [training.digest.hex(), site, self.cipher.hex(), self.mask.hex()]
        return _PREFIX + b"keys: " + json.dumps(content).encode()

    @classmethod
    def of(cls, site: str, content: Mapping[str, Any]) -> PublicKeys:
        """Read the keys of a site's message."""
        keys: tuple[Any, Any] = content.get("cipher"), content.get("mask")
        sound = all(isinstance(key, bytes) and len(key) == KEY_BYTES for key in keys)
        require(sound, f"the keys of site {site} are not keys")
        return cls(*keys)


@dataclass(frozen=True)
class Agreement:
    """Values on which all sites of a round must agree, so that masks cancel out."""

    training: Training
    keys: Mapping[str, PublicKeys]

    @property
    def threshold(self) -> int:
        """See `threshold`."""
        return threshold(len(self.keys))

    @property
    def names(self) -> list[str]:
        """The sites that sent keys, in the order of their shares' numbers."""
        return sorted(self.keys)

    def purpose(self, what: str, *more: object) -> bytes:
        """Return the purpose of a key, bound to training, sites and pair."""
        keys = [[site, self.keys[site].cipher.hex(), self.keys[site].mask.hex()] for site in self.names]
        content = json.dumps([what, self.training.digest.hex(), keys, *more], sort_keys=True)
        return _PREFIX + b"purpose: " + hashlib.sha256(content.encode()).digest()

    def masking(self, shares: Shares) -> bytes:
        """Return the purpose of masks, bound to all dealt shares."""
        dealt = {site: {to: text.hex() for to, text in texts.items()} for site, texts in shares.items()}
        return self.purpose("masks", dealt)


def sum_message(masking: bytes, site: str, summed: Collection[str]) -> bytes:
    """Return the bytes that a site signs before it helps to open a sum."""
    return _PREFIX + b"sum: " + json.dumps([masking.hex(), site, sorted(summed)]).encode()
