"""The site's half of secure aggregation: keys, shares, a masked sum, and what takes the masks off again."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor

from medfedaug.errors import MedFedAugError
from medfedaug.federation.messages.messages import CONFIRM, KEYS, OPEN, SHARES, Request
from medfedaug.federation.secure.agreement import (
    LEAST_SITES,
    Agreement,
    PublicKeys,
    Training,
    request_digest,
    sum_message,
)
from medfedaug.federation.secure.history import ModelSketch, OpenedSum, SumHistory, SumRules
from medfedaug.federation.secure.identity import Identity
from medfedaug.federation.secure.keys import KeyPair, derived, opened, sealed
from medfedaug.federation.secure.sharing import SECRET_BYTES, SHARE_BYTES, split
from medfedaug.methods.base import Payload
from medfedaug.utils.secure_random import Words, stream


class OutOfTurn(MedFedAugError):
    """A request that was answered already: it is not answered again, and changes nothing."""


@dataclass(frozen=True)
class Member:
    """Facts about a round's training that a site knows by itself, whatever the server says.

    Args:
        weight: its weight in the mean of the models.
        config: the hash of the job's configuration.
    """

    weight: float
    config: str


class _Step(IntEnum):
    """Progress of a site with a set of keys. Each step is taken once."""

    KEYS = 0
    DEALT = 1
    TRAINING = 2
    MASKED = 3
    CONFIRMED = 4


@dataclass
class _Round:
    """State of a site in a round, in memory alone: a restarted site has lost it."""

    training: Training
    step: _Step = _Step.KEYS
    cipher: KeyPair = field(default_factory=KeyPair)
    mask: KeyPair = field(default_factory=KeyPair)
    seed: bytes = field(default_factory=lambda: os.urandom(SECRET_BYTES))
    agreement: Agreement | None = None
    certificates: dict[str, Any] = field(default_factory=dict)
    dealt: dict[str, bytes] = field(default_factory=dict)
    # Of the sites that dealt shares, its own too: shares of the key of its masks and of its seed.
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
    """Site's half of secure aggregation: the server learns the sum of several sites and of none alone.

    Bonawitz et al. (CCS 2017) against active adversaries, with keys of their own for every round. Each pair
    of sites agrees on a mask that one of them adds and the other subtracts, and each site adds one of its
    own. Keys of the first and seeds of the second are dealt among the sites in shares. In the end every site
    says of each other one either its share of the seed, if that site's numbers were added up, or of the key,
    if they never came; and only after two thirds of the sites have signed whose numbers were added up.

    The keys of a round serve one training. Any request that fails voids them, and so does the end of the
    process, since they are in memory alone.

    Args:
        site: its name.
        identity: signs what it says and checks what other sites say.
        rules: which sums it takes part in.
        history: the sums that it has helped to open, over jobs and restarts.
        job: the identifier of the job.

    Deviations:
        The paper's sites agree on keys alone. These agree, with the same signatures, on all that they are
        asked to train (`medfedaug.federation.secure.agreement.Training`): a server that gives a site another
        model reads the update of the others from the sum (Pasquini et al., CCS 2022).
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
        self._signer: Identity | None = None
        self._round: _Round | None = None

    @property
    def signer(self) -> Identity:
        """Reads the site's certificates when they are first needed."""
        if self._signer is None:
            try:
                self._signer = self._identity()
            except MedFedAugError as error:
                raise self._refused(error.marked) from error
        return self._signer

    def void(self) -> None:
        """Forget the keys of the round: nothing more is said with them."""
        self._round = None

    def answer(self, request: Request, member: Member) -> dict[str, Any]:
        """Answer a request for keys, for shares, for a signature, or for what takes the masks off."""
        with self._voiding():
            if request.task == KEYS:
                return self._send_keys(request, member)
            return {SHARES: self._deal, CONFIRM: self._confirm, OPEN: self._open}[request.task](request)

    @contextmanager
    def _voiding(self) -> Iterator[None]:
        try:
            yield
        except OutOfTurn:
            raise
        except BaseException:
            self.void()
            raise

    def _send_keys(self, request: Request, member: Member) -> dict[str, Any]:
        self.void()
        try:
            digest, weights = Training.read(request.masks)
        except ValueError as error:
            raise self._refused("the server did not say what is to be trained") from error
        found = weights.get(self.site)
        if found is None:
            raise self._refused("the server asks it for keys, and it is none of the sites that it names")
        if found != member.weight:
            raise self._refused(f"the server gives it the weight {found:g}, and its own is {member.weight:g}")
        training = Training(request.run, request.round, member.config, digest, weights)
        now = self._round = _Round(training)
        signed = self.signer.sign(now.public.message(training, self.site))
        return {
            "cipher": now.public.cipher,
            "mask": now.public.mask,
            "agreed": training.digest,
            **signed,
        }

    def _deal(self, request: Request) -> dict[str, Any]:
        now = self._current(request, _Step.KEYS, "shares were dealt already in this round")
        keys = self._checked(now, _mapping(request.masks.get("keys")))
        self._check_sites("keys", keys, LEAST_SITES)
        now.agreement = agreement = Agreement(now.training, keys)
        parts = [split(secret, len(keys), agreement.threshold) for secret in (now.mask.secret, now.seed)]
        for number, name in enumerate(agreement.names):
            shares = parts[0][number], parts[1][number]
            if name == self.site:
                now.own = shares
            else:
                key = now.cipher.agree(keys[name].cipher, agreement.purpose("shares", self.site, name))
                now.dealt[name] = sealed(key, b"".join(shares))
        now.step = _Step.DEALT
        return dict(now.dealt)

    def _checked(self, now: _Round, announced: Mapping[str, Any]) -> dict[str, PublicKeys]:
        keys: dict[str, PublicKeys] = {}
        for name in sorted(announced):
            said = _mapping(announced[name])
            try:
                keys[name] = PublicKeys.of(said)
            except ValueError as error:
                raise self._refused(f"the keys of site {name} are none") from error
            if name not in now.training.weights:
                raise self._refused(f"site {name} is none of the sites that agreed on this training")
            if name == self.site:
                continue
            if said.get("agreed") != now.training.digest:
                raise self._refused(
                    f"site {name} agreed to another training: another model, exchange, round or "
                    "configuration, or other sites and weights than this site received"
                )
            self._verify(name, keys[name].message(now.training, name), said, "keys")
            now.certificates[name] = said.get("certificate")
        if keys.get(self.site) != now.public:
            raise self._refused("the server passed on other keys than this site's")
        return keys

    def sealing(self, request: Request, member: Member, once: Payload) -> Sealing:
        """Take what a site needs to mask its numbers, before it trains: nothing is then done in vain.

        Raises:
            MedFedAugError: when this is not the training that the sites agreed on, or the server does not
                tell what it needs.
        """
        with self._voiding():
            return self._sealing(request, member, once)

    def _sealing(self, request: Request, member: Member, once: Payload) -> Sealing:
        now = self._current(
            request, _Step.DEALT, "this round's keys were used already, or no shares were dealt"
        )
        # Used up from here on, whatever happens.
        now.step = _Step.TRAINING
        training, agreement = now.training, now.agreed
        try:
            digest = request_digest(request, once)
        except ValueError as error:
            raise self._refused(f"the training request has no tensor: {error}") from error
        if digest != training.request or member.config != training.config:
            raise self._refused(
                "the server sent another training than the sites agreed on (model, exchange, plan or round)"
            )
        if member.weight != training.weights[self.site]:
            raise self._refused("its weight in the mean is not the one that the sites agreed on")
        shares = {name: _texts(part) for name, part in _mapping(request.masks.get("shares")).items()}
        if shares.get(self.site) != now.dealt or not shares.keys() <= agreement.keys.keys():
            raise self._refused("the server passed on other shares than the sites'")
        self._check_sites("shares", shares, max(LEAST_SITES, agreement.threshold))
        now.held = {self.site: now.own}
        for name in sorted(shares.keys() - {self.site}):
            key = now.cipher.agree(agreement.keys[name].cipher, agreement.purpose("shares", name, self.site))
            try:
                text = opened(key, shares[name].get(self.site, b""))
                if len(text) != 2 * SHARE_BYTES:
                    raise ValueError
            except ValueError as error:
                raise self._refused(f"the shares of site {name} cannot be read") from error
            now.held[name] = text[:SHARE_BYTES], text[SHARE_BYTES:]
        now.purpose = agreement.masking(shares)
        return Sealing(self, now, member.weight, training.total(shares), sorted(shares))

    def _confirm(self, request: Request) -> dict[str, Any]:
        now = self._current(request, _Step.MASKED, "it signed already whose numbers were added up")
        summed = self._summed(request)
        if self.site not in summed or not summed <= now.held.keys():
            raise self._refused("it is not one of the sites whose numbers were added up")
        self._check_sites("numbers", summed, now.agreed.threshold)
        try:
            self.history.check(self._sum(now, summed), self.rules)
        except ValueError as error:
            raise self._refused(str(error)) from error
        now.summed, now.step = summed, _Step.CONFIRMED
        signed = self.signer.sign(sum_message(now.purpose, self.site, summed))
        # The others have the certificate, which came with the keys.
        return {name: value for name, value in signed.items() if name == "signature"}

    def _open(self, request: Request) -> dict[str, Any]:
        now = self._current(request, _Step.CONFIRMED, "")
        if self._summed(request) != now.summed:
            raise self._refused("it is not one of the sites whose numbers were added up, as it signed them")
        signed = _mapping(request.masks.get("signed"))
        if not signed.keys() <= now.summed:
            raise self._refused("sites have signed the sum whose numbers are not in it")
        self._check_count("signatures", len(signed), now.agreed.threshold)
        for name in sorted(signed.keys() - {self.site}):
            said = {**_mapping(signed[name]), "certificate": now.certificates[name]}
            self._verify(name, sum_message(now.purpose, name, now.summed), said, "summed names")
        try:
            self.history.enter(self._sum(now, now.summed), self.rules)
        except ValueError as error:
            raise self._refused(str(error)) from error
        self.void()
        return {name: shares[int(name in now.summed)] for name, shares in sorted(now.held.items())}

    def _sum(self, now: _Round, summed: frozenset[str]) -> OpenedSum:
        assert now.sketch is not None
        return OpenedSum(self.job, now.training.round, summed, now.sketch)

    def _summed(self, request: Request) -> frozenset[str]:
        found = request.masks.get("summed")
        names = [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
        return frozenset(names)

    def _current(self, request: Request, step: _Step, already: str) -> _Round:
        now = self._round
        if now is None or (now.training.run, now.training.round) != (request.run, request.round):
            raise self._refused("it has no keys for this round; it is back in the next one")
        if already and now.step > step:
            raise OutOfTurn(f"site {self.site}: secure aggregation: {already}")
        if now.step != step:
            raise self._refused(f"{request.task} came before the steps that go before it")
        return now

    def _verify(self, name: str, message: bytes, said: Mapping[str, Any], what: str) -> None:
        try:
            self.signer.check(name, message, said, what)
        except MedFedAugError as error:
            raise self._refused(str(error)) from error

    def _check_sites(self, what: str, names: Collection[str], needed: int) -> None:
        """Check that as many sites take part as this site asks for, of those that it knows and in all."""
        self._check_count(what, len(names), max(self.rules.least, needed))
        if not self.rules.share:
            return
        if self.rules.known is not None:
            known = frozenset({self.site, *self.rules.known})
        else:
            known = self.history.meet(self.signer.project, {self.site, *names})
        found, floor = len(known & set(names)), self.rules.floor(len(known))
        if found < floor:
            raise self._refused(
                f"there are {what} of {found} of the {len(known)} sites that it knows, and {floor} are "
                "needed (known_sites and min_known_share of its job rules)"
            )

    def _check_count(self, what: str, found: int, needed: int) -> None:
        if found < needed:
            raise self._refused(f"there are {what} of {found} sites, and {needed} are needed")

    def _refused(self, reason: str) -> MedFedAugError:
        return MedFedAugError(f"site {self.site}: secure aggregation: {reason}")


@dataclass
class Sealing:
    """Masks for one site's numbers of one round, which can be put on once.

    Attributes:
        weight: of the site in the mean of the models.
        total: the sum of the weights of the sites that dealt shares.
        sites: those that dealt shares, this one too.
    """

    _masks: SiteMasks
    _round: _Round
    weight: float
    total: float
    sites: list[str]

    def mask(self, words: Words, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Words:
        """Add the site's own mask, and add or subtract those that it has in common with other sites."""
        now = self._round
        assert now.step == _Step.TRAINING
        now.sketch = ModelSketch.of(self._masks.history.key, before, after)
        masked = words + stream(derived(now.seed, now.purpose), len(words))
        for name in self.sites:
            if name != self._masks.site:
                key = now.mask.agree(now.agreed.keys[name].mask, now.purpose)
                if name > self._masks.site:
                    masked += stream(key, len(words))
                else:
                    masked -= stream(key, len(words))
        now.step = _Step.MASKED
        return masked


def _mapping(value: Any) -> Mapping[str, Any]:
    return {k: v for k, v in value.items() if isinstance(k, str)} if isinstance(value, Mapping) else {}


def _texts(value: Any) -> dict[str, bytes]:
    return {name: text for name, text in _mapping(value).items() if isinstance(text, bytes)}
