"""The server's half of secure aggregation: forwards keys and shares, adds up and unmasks."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from medfedaug.errors import RunFailed, UpdateRefused, translated
from medfedaug.federation.messages.messages import CONFIRM, KEYS, OPEN, SHARES, Reply, Request, raise_error
from medfedaug.hospital.primitives import SHARE_BYTES, KeyPair, Words, derived, join, stream
from medfedaug.hospital.secure.agreement import (
    LEAST_SITES,
    Agreement,
    PublicKeys,
    Training,
    request_digest,
    require,
)
from medfedaug.methods.base import Payload


class ServerMasks:
    """Forwards the messages of a round's sites to each other, and adds up their masked numbers.

    ``recovered`` are the sites of this round whose masks were reconstructed: their numbers never arrived.
    """

    def __init__(self, size: int, config: str = "") -> None:
        self.size, self.config = size, config
        self._begin(Training("", 0, config, b"", {}))

    def _begin(self, training: Training) -> None:
        self._training = training
        self._keys: dict[str, dict[str, Any]] = {}
        self._agreement = Agreement(training, {})
        self._dealt: dict[str, dict[str, bytes]] = {}
        self._sum: Words = np.zeros(self.size, dtype=np.uint64)
        self.summed: list[str] = []
        self._signed: dict[str, dict[str, bytes]] = {}
        self._opened: dict[str, dict[str, bytes]] = {}
        self.bytes_up = self.bytes_down = 0
        self.recovered: list[str] = []

    def keys(self, training: Request, once: Payload, weights: Mapping[str, float]) -> Request:
        """Begin a round: announce the training, and ask its sites for keys."""
        digest = request_digest(training, once)
        weights = {site: float(weight) for site, weight in weights.items()}
        self._begin(Training(training.run, training.round, self.config, digest, weights))
        return self._request(KEYS, request=digest, weights=weights)

    def accept_keys(self, site: str, reply: Reply) -> None:
        """Accept a site's keys."""
        raise_error(reply)
        sent = {key: value for key, value in reply.masks.items() if isinstance(value, bytes)}
        refused = partial(UpdateRefused, site, "keys", expected="two public keys for this training")
        with translated(ValueError, to=lambda error: refused(got=str(error))):
            PublicKeys.of(site, sent)
            require(sent.get("agreed") == self._training.digest, "of another training or configuration")
        self._keys[site] = sent
        self.bytes_up += _size(sent)

    def shares(self) -> Request:
        """Forward the keys, and ask for shares."""
        keys = {site: PublicKeys.of(site, sent) for site, sent in self._keys.items()}
        self._agreement = Agreement(self._training, keys)
        self.bytes_down += len(self._keys) * sum(_size(sent) for sent in self._keys.values())
        return self._request(SHARES, keys=self._keys)

    @property
    def with_keys(self) -> list[str]:
        """The sites that sent keys."""
        return sorted(self._keys)

    def accept_shares(self, site: str, reply: Reply) -> None:
        """Accept a site's shares for the others."""
        raise_error(reply)
        texts = {to: text for to, text in reply.masks.items() if isinstance(text, bytes)}
        others = self._keys.keys() - {site}
        if texts.keys() != others:
            raise UpdateRefused(
                site, "shares", expected=f"one for each of {len(others)} sites", got=str(len(texts))
            )
        self._dealt[site] = texts
        self.bytes_up += _size(texts)

    @property
    def with_shares(self) -> list[str]:
        """The sites that dealt shares."""
        return sorted(self._dealt)

    def training(self, request: Request) -> Request:
        """Return the request of the round with the shares that sites need for their masks."""
        self.bytes_down += len(self._dealt) * sum(_size(texts) for texts in self._dealt.values())
        return replace(request, masks={"shares": self._dealt})

    def add(self, site: str, words: Words) -> None:
        """Add a site's checked masked numbers."""
        self._sum += words
        self.summed.append(site)

    def confirmation(self) -> Request:
        """Ask the added sites to sign the list of added sites."""
        return self._request(CONFIRM, summed=sorted(self.summed))

    def accept_confirmation(self, site: str, reply: Reply) -> None:
        """Accept a site's signature of the list of added sites."""
        raise_error(reply)
        self._signed[site] = {key: value for key, value in reply.masks.items() if isinstance(value, bytes)}
        self.bytes_up += _size(self._signed[site])

    @property
    def with_signature(self) -> list[str]:
        """The sites that signed the list of added sites."""
        return sorted(self._signed)

    def opening(self) -> Request:
        """Forward the signatures, and ask for the shares that unmask the sum."""
        self.bytes_down += len(self._signed) * sum(_size(signed) for signed in self._signed.values())
        return self._request(OPEN, summed=sorted(self.summed), signed=self._signed)

    def accept_opening(self, site: str, reply: Reply) -> None:
        """Accept a site's shares for unmasking."""
        raise_error(reply)
        shares = {of: share for of, share in reply.masks.items() if isinstance(share, bytes)}
        sound = all(len(share) == SHARE_BYTES for share in shares.values())
        if not sound or shares.keys() != self._dealt.keys():
            expected = f"a share of {SHARE_BYTES} bytes for each site"
            raise UpdateRefused(site, "opening", expected=expected, got=str(len(shares)))
        self._opened[site] = shares
        self.bytes_up += _size(shares)

    def total(self) -> tuple[Words, float]:
        """Return the unmasked sum, and the sum of the weights of the sites that dealt shares."""
        needed, opening = self._agreement.threshold, sorted(self._opened)
        if len(opening) < needed:
            raise RunFailed(
                f"round {self._training.round}: secure aggregation: {len(opening)} sites opened the sum, and "
                f"{needed} of {len(self._keys)} are needed"
            )
        purpose = self._agreement.masking(self._dealt)
        words = self._sum.copy()
        for site in self.summed:
            words -= stream(derived(self._secret(site, "the seed"), purpose), self.size)
        self.recovered = sorted(self._dealt.keys() - set(self.summed))
        for gone in self.recovered:
            pair = KeyPair(self._secret(gone, "the key"))
            if pair.public != self._agreement.keys[gone].mask:
                raise RunFailed(
                    f"round {self._training.round}: secure aggregation: the shares give another key of {gone}"
                )
            for site in self.summed:
                mask = stream(pair.agree(self._agreement.keys[site].mask, purpose), self.size)
                # This site has added or subtracted it (`RoundMasking.mask`).
                words = words - mask if gone > site else words + mask
        return words, self._training.total(self._dealt)

    def _secret(self, site: str, what: str) -> bytes:
        numbers = {name: number for number, name in enumerate(self._agreement.names, start=1)}
        chosen = sorted(self._opened)[: self._agreement.threshold]
        failed = RunFailed(
            f"round {self._training.round}: secure aggregation: {what} of site {site} cannot be put "
            f"together, since one of {', '.join(chosen)} sent a false share"
        )
        with translated(OverflowError, to=lambda error: failed):
            return join({numbers[name]: self._opened[name][site] for name in chosen})

    @property
    def least_answers(self) -> int:
        """The least number of answers that unmask the sum of this round, as far as known."""
        return max(LEAST_SITES, self._agreement.threshold)

    @property
    def sites(self) -> int:
        """The number of sites that agreed on masks."""
        return len(self._dealt)

    def _request(self, task: str, **masks: Any) -> Request:
        return Request(task, self._training.round, run=self._training.run, masks=masks)


def _size(texts: Mapping[str, bytes]) -> int:
    return sum(map(len, texts.values()))
