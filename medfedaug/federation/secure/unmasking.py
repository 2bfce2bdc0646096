"""The server's half of secure aggregation: passes keys and shares on, adds up, and takes the masks off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from medfedaug.errors import RunFailed, UpdateRefused
from medfedaug.federation.messages import KEYS, OPEN, SHARES, Reply, Request
from medfedaug.federation.refusals import raise_error
from medfedaug.federation.secure.agreement import LEAST_SITES, Agreement, PublicKeys
from medfedaug.federation.secure.keys import KeyPair, derived
from medfedaug.federation.secure.sharing import SHARE_BYTES, join
from medfedaug.streams import Words, stream

__all__ = ["ServerMasks"]


class ServerMasks:
    """Passes on what the sites of a round say to each other, and adds up their masked numbers.

    Args:
        size: of a site's numbers.

    Attributes:
        bytes_up: bytes of keys and shares that the sites of this round sent.
        bytes_down: the same that they received.
        recovered: sites of this round whose masks had to be removed, since their numbers never came.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._begin("", 0)

    def _begin(self, run: str, round_: int) -> None:
        self._run, self._round = run, round_
        self._keys: dict[str, dict[str, Any]] = {}
        self._agreement = Agreement(run, round_, {})
        self._dealt: dict[str, dict[str, bytes]] = {}
        self._total = 0.0
        self._sum: Words = np.zeros(self.size, dtype=np.uint64)
        self.summed: list[str] = []
        self._said: dict[str, dict[str, bytes]] = {}
        self.bytes_up = self.bytes_down = 0
        self.recovered: list[str] = []

    # ------------------------------------------------------------------ before training

    def keys(self, training: Request) -> Request:
        """Begin a round, and ask its sites for keys.

        Args:
            training: the request of the round.
        """
        self._begin(training.run, training.round)
        return self._request(KEYS)

    def accept_keys(self, site: str, reply: Reply) -> None:
        """Take a site's keys.

        Raises:
            MedFedAugError: when they are none.
        """
        raise_error(reply)
        try:
            PublicKeys.of(reply.masks)
        except ValueError:
            raise UpdateRefused(site, "keys", expected="two public keys", got="none") from None
        told = {key: value for key, value in reply.masks.items() if isinstance(value, bytes)}
        self._keys[site] = told
        self.bytes_up += sum(map(len, told.values()))

    def shares(self) -> Request:
        """Pass the keys on, and ask for shares."""
        self._agreement = Agreement(
            self._run, self._round, {site: PublicKeys.of(told) for site, told in self._keys.items()}
        )
        self.bytes_down += len(self._keys) * sum(
            len(v) for told in self._keys.values() for v in told.values()
        )
        return self._request(SHARES, keys=self._keys)

    @property
    def with_keys(self) -> list[str]:
        """The sites that sent keys."""
        return sorted(self._keys)

    def accept_shares(self, site: str, reply: Reply) -> None:
        """Take what a site dealt to the others.

        Raises:
            MedFedAugError: when it is not for each of them.
        """
        raise_error(reply)
        texts = {to: text for to, text in reply.masks.items() if isinstance(text, bytes)}
        others = self._keys.keys() - {site}
        if texts.keys() != others:
            raise UpdateRefused(
                site, "shares", expected=f"one for each of {len(others)} sites", got=str(len(texts))
            )
        self._dealt[site] = texts
        self.bytes_up += sum(map(len, texts.values()))

    @property
    def with_shares(self) -> list[str]:
        """The sites that dealt shares."""
        return sorted(self._dealt)

    def training(self, request: Request, weights: Mapping[str, float]) -> Request:
        """The request of the round with the shares that sites need to mask what they send.

        Args:
            request: the server's.
            weights: of the sites in the mean of the models.
        """
        self._total = float(sum(weights[site] for site in self.with_shares))
        size = sum(len(text) for texts in self._dealt.values() for text in texts.values())
        self.bytes_down += len(self._dealt) * size
        return replace(request, masks={"shares": self._dealt, "total": self._total})

    # ------------------------------------------------------------------ after it

    def add(self, site: str, words: Words) -> None:
        """Add a site's masked numbers, which have been checked."""
        self._sum += words
        self.summed.append(site)

    def opening(self) -> Request:
        """Ask for what takes the masks off the sum."""
        return self._request(OPEN, summed=sorted(self.summed))

    def accept_opening(self, site: str, reply: Reply) -> None:
        """Take a site's shares of what takes the masks off.

        Raises:
            MedFedAugError: when it is not a share for each site.
        """
        raise_error(reply)
        said = {of: share for of, share in reply.masks.items() if isinstance(share, bytes)}
        if site not in self.summed or said.keys() != self._dealt.keys():
            raise UpdateRefused(site, "opening", expected="a share for each site", got=str(len(said)))
        if any(len(share) != SHARE_BYTES for share in said.values()):
            raise UpdateRefused(site, "opening", expected=f"shares of {SHARE_BYTES} bytes", got="others")
        self._said[site] = said
        self.bytes_up += sum(map(len, said.values()))

    def total(self) -> tuple[Words, float]:
        """The sum without masks, and the sum of the weights by which the sites divided their own.

        Raises:
            RunFailed: when too few sites said what takes the masks off, or it does not fit.
        """
        needed, found = self._agreement.threshold, sorted(self._said)
        if len(found) < needed:
            raise RunFailed(
                f"round {self._round}: secure aggregation: {len(found)} sites opened the sum, and {needed} "
                f"of {len(self._keys)} are needed"
            )
        purpose = self._agreement.masking(self._dealt, self._total)
        words = self._sum.copy()
        for site in self.summed:
            words -= stream(derived(self._secret(site, "the seed"), purpose), self.size)
        self.recovered = sorted(self._dealt.keys() - set(self.summed))
        for gone in self.recovered:
            pair = KeyPair(self._secret(gone, "the key"))
            if pair.public != self._agreement.keys[gone].mask:
                raise RunFailed(
                    f"round {self._round}: secure aggregation: the shares give another key of {gone}"
                )
            for site in self.summed:
                mask = stream(pair.agree(self._agreement.keys[site].mask, purpose), self.size)
                # What this site has added or subtracted (`Sealing.mask`).
                words = words - mask if gone > site else words + mask
        return words, self._total

    def _secret(self, site: str, what: str) -> bytes:
        numbers = {name: number for number, name in enumerate(self._agreement.names, start=1)}
        chosen = sorted(self._said)[: self._agreement.threshold]
        try:
            return join({numbers[name]: self._said[name][site] for name in chosen})
        except ValueError as error:
            raise RunFailed(
                f"round {self._round}: secure aggregation: {what} of site {site} cannot be put together, "
                f"since one of {', '.join(chosen)} sent a false share"
            ) from error

    @property
    def least_answers(self) -> int:
        """The number of sites without which the sum of this round cannot be had, as far as it is known."""
        return max(LEAST_SITES, self._agreement.threshold)

    @property
    def sites(self) -> int:
        """The number of sites that agreed on masks."""
        return len(self._dealt)

    def _request(self, task: str, **masks: Any) -> Request:
        return Request(task, self._round, run=self._run, masks=masks)
