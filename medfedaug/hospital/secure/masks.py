"""The site's half of secure aggregation: keys, shares, masked numbers, and shares for unmasking the sum."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

from torch import Tensor

from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation.messages.messages import CONFIRM, KEYS, OPEN, SHARES, Request
from medfedaug.hospital.primitives import (
    SECRET_BYTES,
    SHARE_BYTES,
    KeyPair,
    Words,
    derived,
    opened,
    sealed,
    split,
    stream,
)
from medfedaug.hospital.secure.agreement import (
    LEAST_SITES,
    Agreement,
    PublicKeys,
    Training,
    request_digest,
    require,
    sum_message,
)
from medfedaug.hospital.secure.history import ModelSketch, OpenedSum, SumHistory, SumRules
from medfedaug.hospital.secure.identity import Identity
from medfedaug.methods.base import Payload


class OutOfTurn(MedFedAugError):
    """Repetition of an answered request, which is refused and changes nothing."""


@dataclass(frozen=True)
class Member:
    """A site's weight and configuration hash, computed independently of the server."""

    weight: float
    config: str


class _Step(IntEnum):
    """Progress of a site with a set of keys; each step is taken once."""

    KEYS = 0
    DEALT = 1
    TRAINING = 2
    MASKED = 3
    CONFIRMED = 4


@dataclass
class _Round:
    """State of a site in a round, in memory only; a restart loses it."""

    training: Training
    step: _Step = _Step.KEYS
    cipher: KeyPair = field(default_factory=KeyPair)
    mask: KeyPair = field(default_factory=KeyPair)
    seed: bytes = field(default_factory=lambda: os.urandom(SECRET_BYTES))
    agreement: Agreement | None = None
    certificates: dict[str, Any] = field(default_factory=dict)
    dealt: dict[str, bytes] = field(default_factory=dict)
    # By dealing site, this one included: shares of its mask key and of its seed.
    held: dict[str, tuple[bytes, bytes]] = field(default_factory=dict)
    own: tuple[bytes, bytes] = (b"", b"")
    purpose: bytes = b""
    sketch: ModelSketch | None = None
    summed: frozenset[str] = frozenset()

    @property
    def public(self) -> PublicKeys:
        return PublicKeys(self.cipher.public, self.mask.public)

    @property
    def agreed(self) -> Agreement:
        assert self.agreement is not None, "shares come first"
        return self.agreement


class SiteMasks:
    """The site's half of secure aggregation: the server learns only the sum of several sites.

    Bonawitz et al. (CCS 2017) against active adversaries, with new keys for every round. Each pair of sites
    agrees on a mask that one of them adds and the other subtracts, and each site adds a mask of its own. The
    sites deal shares of the keys of the first and the seeds of the second. Finally every site reveals for
    each other site either its share of the seed, if that site's numbers were added up, or of the key, if they
    never arrived; and only after two thirds of the sites have signed the list of added sites.

    The keys of a round serve one training. A failed request voids them, and so does the end of the process,
    since they are only in memory.

    Deviations:
        The paper's sites agree only on keys. Here they also agree, with the same signatures, on the whole
        training (`medfedaug.hospital.secure.agreement.Training`): a server that gives one site another
        model could read the update of the others from the sum (Pasquini et al., CCS 2022).
    """

    def __init__(
        self,
        site: str,
        identity: Callable[[], Identity] = Identity,
        rules: SumRules | None = None,
        history: SumHistory | None = None,
        job: str = "",
    ) -> None:
        self.site, self.job = site, job
        self.rules, self.history = rules or SumRules(), history or SumHistory()
        self._identity = identity
        self._round: _Round | None = None

    @cached_property
    def signer(self) -> Identity:
        """The site's identity, opened at the first use."""
        return self._identity()

    def void(self) -> None:
        """Forget the keys of the round."""
        self._round = None

    def answer(self, request: Request, member: Member) -> dict[str, Any]:
        """Answer a request for keys, shares, a signature, or shares for unmasking."""
        with self._voiding():
            if request.task == KEYS:
                return self._send_keys(request, member)
            return {SHARES: self._deal, CONFIRM: self._confirm, OPEN: self._open}[request.task](request)

    @contextmanager
    def _voiding(self) -> Iterator[None]:
        """Forget the keys of the round where a step is refused, and name the site."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, OutOfTurn):
                self.void()
            if isinstance(error, ValueError | ConfigError):
                text = error.marked if isinstance(error, ConfigError) else error
                raise MedFedAugError(f"site {self.site}: secure aggregation: {text}") from error
            raise

    def _send_keys(self, request: Request, member: Member) -> dict[str, Any]:
        self.void()
        digest, weights = Training.read(request.masks)
        require(self.site in weights, "the server asks it for keys, but does not name it among the sites")
        weight = weights[self.site]
        require(
            weight == member.weight,
            f"the server gives it the weight {weight:g}, and its own is {member.weight:g}",
        )
        training = Training(request.run, request.round, member.config, digest, weights)
        round_ = self._round = _Round(training)
        signed = self.signer.sign(round_.public.message(training, self.site))
        return {**asdict(round_.public), "agreed": training.digest, **signed}

    def _deal(self, request: Request) -> dict[str, Any]:
        round_ = self._current(request, _Step.KEYS, "shares were dealt already in this round")
        keys = self._checked(round_, _mapping(request.masks.get("keys")))
        self._check_sites("keys", keys, LEAST_SITES)
        round_.agreement = agreement = Agreement(round_.training, keys)
        parts = [
            split(secret, len(keys), agreement.threshold) for secret in (round_.mask.secret, round_.seed)
        ]
        for number, name in enumerate(agreement.names):
            shares = parts[0][number], parts[1][number]
            if name == self.site:
                round_.own = shares
            else:
                key = round_.cipher.agree(keys[name].cipher, agreement.purpose("shares", self.site, name))
                round_.dealt[name] = sealed(key, b"".join(shares))
        round_.step = _Step.DEALT
        return dict(round_.dealt)

    def _checked(self, round_: _Round, announced: Mapping[str, Any]) -> dict[str, PublicKeys]:
        keys: dict[str, PublicKeys] = {}
        for name in sorted(announced):
            sent = _mapping(announced[name])
            keys[name] = PublicKeys.of(name, sent)
            known = name in round_.training.weights
            require(known, f"site {name} is not one of the sites that agreed on this training")
            if name == self.site:
                continue
            require(
                sent.get("agreed") == round_.training.digest,
                f"site {name} agreed to another training: another model, exchange, round or configuration, "
                "or other sites and weights than this site received",
            )
            self.signer.check(name, keys[name].message(round_.training, name), sent, "keys")
            round_.certificates[name] = sent.get("certificate")
        require(keys.get(self.site) == round_.public, "the server passed on other keys than this site's")
        return keys

    def masking(self, request: Request, member: Member, once: Payload) -> RoundMasking:
        """Prepare the masks of a training, before it begins."""
        with self._voiding():
            return self._masking(request, member, once)

    def _masking(self, request: Request, member: Member, once: Payload) -> RoundMasking:
        round_ = self._current(
            request, _Step.DEALT, "this round's keys were used already, or no shares were dealt"
        )
        round_.step = _Step.TRAINING  # used up, even if a check fails
        training, agreement = round_.training, round_.agreed
        require(
            request_digest(request, once) == training.request and member.config == training.config,
            "the server sent another training than the sites agreed on (model, exchange, plan or round)",
        )
        require(
            member.weight == training.weights[self.site],
            "its weight in the mean is not the one that the sites agreed on",
        )
        shares = {name: _texts(part) for name, part in _mapping(request.masks.get("shares")).items()}
        require(
            shares.get(self.site) == round_.dealt and shares.keys() <= agreement.keys.keys(),
            "the server passed on other shares than the sites'",
        )
        self._check_sites("shares", shares, max(LEAST_SITES, agreement.threshold))
        round_.held = {self.site: round_.own}
        for name in sorted(shares.keys() - {self.site}):
            key = round_.cipher.agree(
                agreement.keys[name].cipher, agreement.purpose("shares", name, self.site)
            )
            reason = f"the shares of site {name} cannot be read"
            text = opened(key, shares[name].get(self.site, b""), reason)
            require(len(text) == 2 * SHARE_BYTES, reason)
            round_.held[name] = text[:SHARE_BYTES], text[SHARE_BYTES:]
        round_.purpose = agreement.masking(shares)
        return RoundMasking(self, round_, member.weight, training.total(shares), sorted(shares))

    def _confirm(self, request: Request) -> dict[str, Any]:
        round_ = self._current(request, _Step.MASKED, "it signed already whose numbers were added up")
        summed = self._summed(request)
        require(
            self.site in summed and summed <= round_.held.keys(),
            "it is not one of the sites whose numbers were added up",
        )
        self._check_sites("numbers", summed, round_.agreed.threshold)
        self.history.check(self._sum(round_, summed), self.rules)
        round_.summed, round_.step = summed, _Step.CONFIRMED
        signed = self.signer.sign(sum_message(round_.purpose, self.site, summed))
        # The keys came with the certificate.
        return {name: value for name, value in signed.items() if name == "signature"}

    def _open(self, request: Request) -> dict[str, Any]:
        round_ = self._current(request, _Step.CONFIRMED, "")
        require(self._summed(request) == round_.summed, "it has signed another list of added sites")
        signed = _mapping(request.masks.get("signed"))
        require(signed.keys() <= round_.summed, "sites have signed the sum whose numbers are not in it")
        self._check_count("signatures", len(signed), round_.agreed.threshold)
        for name in sorted(signed.keys() - {self.site}):
            sent = {**_mapping(signed[name]), "certificate": round_.certificates[name]}
            self.signer.check(name, sum_message(round_.purpose, name, round_.summed), sent, "summed names")
        self.history.enter(self._sum(round_, round_.summed), self.rules)
        self.void()
        return {name: shares[int(name in round_.summed)] for name, shares in sorted(round_.held.items())}

    def _sum(self, round_: _Round, summed: frozenset[str]) -> OpenedSum:
        assert round_.sketch is not None
        return OpenedSum(self.job, round_.training.round, summed, round_.sketch)

    def _summed(self, request: Request) -> frozenset[str]:
        listed = request.masks.get("summed")
        names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        return frozenset(names)

    def _current(self, request: Request, step: _Step, already: str) -> _Round:
        round_ = self._round
        if round_ is None or (round_.training.run, round_.training.round) != (request.run, request.round):
            raise ValueError("it has no keys for this round; it is back in the next one")
        if already and round_.step > step:
            raise OutOfTurn(f"site {self.site}: secure aggregation: {already}")
        require(round_.step == step, f"{request.task} came before the steps that go before it")
        return round_

    def _check_sites(self, what: str, names: Collection[str], needed: int) -> None:
        """Check that enough sites take part, in all and of the known ones."""
        self._check_count(what, len(names), max(self.rules.least, needed))
        if not self.rules.share:
            return
        if self.rules.known is not None:
            known = frozenset({self.site, *self.rules.known})
        else:
            known = self.history.meet(self.signer.project, {self.site, *names})
        # Rounded, against floating point errors of the product.
        present, floor = len(known & set(names)), math.ceil(round(self.rules.share * len(known), 9))
        require(
            present >= floor,
            f"there are {what} of {present} of the {len(known)} sites that it knows, and {floor} are needed "
            "(known_sites and min_known_share of its job rules)",
        )

    def _check_count(self, what: str, count: int, needed: int) -> None:
        require(count >= needed, f"there are {what} of {count} sites, and {needed} are needed")


@dataclass
class RoundMasking:
    """Masks for one site's numbers of one round, for a single use."""

    _masks: SiteMasks
    _round: _Round
    weight: float  # of the site in the mean of the models
    total: float  # of the weights of the sites that dealt shares
    sites: list[str]  # that dealt shares, this one included

    def mask(self, words: Words, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Words:
        """Add the site's own mask, and add or subtract the masks shared with other sites."""
        round_ = self._round
        assert round_.step == _Step.TRAINING
        round_.sketch = ModelSketch.of(self._masks.history.key, before, after)
        masked = words + stream(derived(round_.seed, round_.purpose), len(words))
        for name in self.sites:
            if name != self._masks.site:
                key = round_.mask.agree(round_.agreed.keys[name].mask, round_.purpose)
                if name > self._masks.site:
                    masked += stream(key, len(words))
                else:
                    masked -= stream(key, len(words))
        round_.step = _Step.MASKED
        return masked


def _mapping(value: Any) -> Mapping[str, Any]:
    return {k: v for k, v in value.items() if isinstance(k, str)} if isinstance(value, Mapping) else {}


def _texts(value: Any) -> dict[str, bytes]:
    return {name: text for name, text in _mapping(value).items() if isinstance(text, bytes)}
