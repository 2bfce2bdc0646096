"""A server that keeps to no rule, and an oracle that computes what the server could learn."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import torch
from hospitals import Hospital

from medfedaug.config.run import RunConfig, job_hash
from medfedaug.errors import MedFedAugError
from medfedaug.federation import FederationServer
from medfedaug.federation.messages.messages import (
    CONFIRM,
    KEYS,
    MASKED,
    OPEN,
    PREPARE,
    SHARES,
    TRAIN,
    Reply,
    Request,
)
from medfedaug.hospital.primitives import KeyPair, derived, stream
from medfedaug.hospital.secure import masks as masks_module
from medfedaug.hospital.secure.agreement import threshold
from medfedaug.hospital.secure.masks import RoundMasking
from medfedaug.hospital.secure.unmasking import ServerMasks

STEPS = (KEYS, SHARES, TRAIN, CONFIRM, OPEN)
RUN = "0" * 32

Change = Callable[[Request, str], Iterable[Request]]
"""Returns the requests in place of the honest one: none, one, or several in turn."""


@dataclass
class Sealed:
    """A masked update of a site, with all secrets of the site."""

    site: str
    model: str
    share: Fraction
    words: np.ndarray
    masked: np.ndarray
    purpose: bytes
    seed: bytes
    pair: KeyPair
    names: list[str]  # of the sites with keys, whose order numbers the shares
    others: dict[str, bytes]  # the public keys of the sites in common with which it has masks


@dataclass
class Oracle:
    """Knows every secret of every site, and from these which sums a server could compute.

    A masked update is a sum of known coefficients times unknown streams: the site's numbers, its own mask,
    and one mask for each pair. A mask is known to the server if enough shares of the seed, or of one key of
    the pair, were in the answers that it got. Of all combinations of masked updates in which no unknown mask
    is left, it says how few sites one can be about.
    """

    sealed: list[Sealed] = field(default_factory=list)
    shares: dict[bytes, tuple[list[bytes], int]] = field(default_factory=dict)
    opened: set[bytes] = field(default_factory=set)

    def watch(self, monkeypatch) -> None:
        """Record the secrets of all sites."""
        mask, split = RoundMasking.mask, masks_module.split

        def note_mask(sealing, words, before, after):
            given = words.copy()
            masked = mask(sealing, words, before, after)
            now = sealing._round
            model = torch.cat([before[key].double().flatten() for key in sorted(before)]).numpy().tobytes()
            self.sealed.append(
                Sealed(
                    site=sealing._masks.site,
                    model=str(hash(model)),
                    share=Fraction(sealing.weight) / Fraction(sealing.total),
                    words=given,
                    masked=masked.copy(),
                    purpose=now.purpose,
                    seed=now.seed,
                    pair=now.mask,
                    names=now.agreed.names,
                    others={n: now.agreed.keys[n].mask for n in sealing.sites if n != sealing._masks.site},
                )
            )
            return masked

        def note_split(secret, count, threshold):
            parts = split(secret, count, threshold)
            self.shares[secret] = parts, threshold
            return parts

        monkeypatch.setattr(RoundMasking, "mask", note_mask)
        monkeypatch.setattr(masks_module, "split", note_split)

    def see(self, reply: Reply) -> None:
        """Give the server an answer."""
        if reply.task == OPEN:
            self.opened.update(value for value in reply.masks.values() if isinstance(value, bytes))

    def knows(self, secret: bytes, names: Sequence[str], colluders: Collection[str]) -> bool:
        """Return whether the server can put a secret together."""
        shares, threshold = self.shares[secret]
        seen = {i for i, share in enumerate(shares) if share in self.opened}
        helped = {i for i, name in enumerate(names) if name in colluders}
        return len(seen | helped) >= threshold

    def smallest(self, colluders: Collection[str] = (), known: Collection[str] = ()) -> int | None:
        """The least number of sites that a sum which the server can compute is about; ``None`` for no sum.

        Args:
            colluders: sites that tell the server all that they know.
            known: models whose updates the server knows without any site.
        """
        secrets = {one.pair.public: one for one in self.sealed}
        rows: list[dict[Any, Fraction]] = []
        for one in self.sealed:
            row: dict[Any, Fraction] = {}
            if one.site not in colluders and one.model not in known:
                row["x", one.site, one.model] = one.share
            if one.site not in colluders and not self.knows(one.seed, one.names, colluders):
                row["seed", one.seed, one.purpose] = Fraction(1)
            for name, public in one.others.items():
                other = secrets.get(public)
                ends = [one, *([other] if other is not None else [])]
                if {one.site, name} & set(colluders) or any(
                    self.knows(end.pair.secret, end.names, colluders) for end in ends
                ):
                    continue
                pair = ("pair", *sorted((one.pair.public, public)), one.purpose)
                row[pair] = Fraction(1 if name > one.site else -1)
            rows.append(row)
        free = _without(rows, lambda key: key[0] != "x")
        sites = sorted({one.site for one in self.sealed} - set(colluders))
        everything = _rank(free)
        for count in range(1, len(sites) + 1):
            for chosen in combinations(sites, count):
                outside = [{k: v for k, v in row.items() if k[1] not in chosen} for row in free]
                if _rank(outside) < everything:
                    return count
        return None

    def check_equations(self) -> None:
        """Check the equation of each masked update, on which all of this rests, on its numbers."""
        for one in self.sealed:
            left = one.masked - one.words - stream(derived(one.seed, one.purpose), len(one.words))
            for name, public in one.others.items():
                mask = stream(one.pair.agree(public, one.purpose), len(one.words))
                left = left - mask if name > one.site else left + mask
            assert not left.any()


def _without(rows: Iterable[Mapping[Any, Fraction]], unknown: Callable[[Any], bool]) -> list[dict]:
    """Return a basis of the combinations of rows without unknowns."""
    rows = [dict(row) for row in rows]
    while True:
        at = next((i for i, row in enumerate(rows) if any(unknown(k) for k in row)), None)
        if at is None:
            return rows
        pivot = rows.pop(at)
        key = next(k for k in pivot if unknown(k))
        rows = [_reduced(row, pivot, key) for row in rows]


def _rank(rows: Iterable[Mapping[Any, Fraction]]) -> int:
    left, rank = [dict(row) for row in rows], 0
    while left:
        pivot = left.pop()
        if pivot:
            rank += 1
            key = next(iter(pivot))
            left = [_reduced(row, pivot, key) for row in left]
    return rank


def _reduced(row: Mapping[Any, Fraction], pivot: Mapping[Any, Fraction], key: Any) -> dict[Any, Fraction]:
    if key not in row:
        return dict(row)
    factor = row[key] / pivot[key]
    result = {k: row.get(k, Fraction()) - factor * pivot.get(k, Fraction()) for k in {*row, *pivot}}
    return {k: v for k, v in result.items() if v}


class HostileServer:
    """Plays rounds with hospitals, and sends changed requests.

    Args:
        hospitals: by name.
        config: of the job.
        oracle: gets every answer.
    """

    def __init__(self, hospitals: Mapping[str, Hospital], config: RunConfig, oracle: Oracle) -> None:
        self.hospitals, self.config, self.oracle = dict(hospitals), config, oracle
        self.honest = FederationServer(config)
        assert self.honest.aggregation.layout is not None
        self.size = self.honest.aggregation.layout.size
        self.samples: dict[str, int] = {}
        self.round, self.jobs = 0, 0
        self.log: list[tuple[str, Request, Reply]] = []
        self.begin_job()

    def begin_job(self) -> None:
        self.jobs += 1
        self.crash(*self.hospitals)

    def crash(self, *names: str) -> None:
        """End the processes of sites, and start them again in the same job."""
        for name in names:
            self.hospitals[name].start(self.config, f"job-{self.jobs}")
            reply = self.ask(name, Request(PREPARE, run=RUN))
            assert not reply.error, reply.error
            self.samples[name] = reply.num_samples

    def ask(self, name: str, request: Request) -> Reply:
        reply = self.hospitals[name].answer(request)
        self.log.append((name, request, reply))
        self.oracle.see(reply)
        return reply

    def model(self, seed: int, scale: float = 0.05) -> dict[str, torch.Tensor]:
        """Return a model that no site has seen."""
        generator = torch.Generator().manual_seed(seed)
        state = self.honest.state
        return {k: torch.randn(state[k].shape, generator=generator) * scale for k in self.honest.shared}

    def play(
        self,
        model: Mapping[str, torch.Tensor],
        change: Change | None = None,
        sites: Iterable[str] | None = None,
        round_: int | None = None,
        between: Callable[[str], None] | None = None,
    ) -> tuple[dict[str, list[Reply]], np.ndarray | None]:
        """Play a round as far as it goes.

        Args:
            model: that the sites are to train.
            change: what is sent in place of each request.
            sites: the receivers of requests; by default all.
            round_: its number; by default one that was not there yet.
            between: called after each step.

        Returns:
            The answers by step, and the sum, where it was opened.
        """
        self.round = self.round + 1 if round_ is None else round_
        names = sorted(sites if sites is not None else self.hospitals)
        masks = ServerMasks(self.size, job_hash(self.config.to_dict()))
        base = Request(TRAIN, self.round, weights=dict(model), run=RUN)
        replies: dict[str, list[Reply]] = {}

        def step(request: Request, receivers: Iterable[str], use: Callable[[str, Reply], None]) -> None:
            answers = replies[request.task] = []
            for name in list(receivers):
                for sent in change(request, name) if change is not None else [request]:
                    reply = self.ask(name, sent)
                    answers.append(reply)
                    # Whoever does not answer, or something else, is left out.
                    with suppress(MedFedAugError, KeyError, AttributeError):
                        use(name, reply)
            if between is not None:
                between(request.task)

        weights = {name: float(self.samples[name]) for name in names}
        step(masks.keys(base, {}, weights), names, masks.accept_keys)
        step(masks.shares(), masks.with_keys, masks.accept_shares)

        def add(name: str, reply: Reply) -> None:
            if name not in masks.summed:
                masks.add(name, reply.masks[MASKED].contiguous().numpy().view(np.uint64))

        step(masks.training(base), masks.with_shares, add)
        step(masks.confirmation(), masks.summed, masks.accept_confirmation)
        step(masks.opening(), masks.with_signature, masks.accept_opening)
        try:
            return replies, masks.total()[0] if masks.summed else None
        except MedFedAugError:
            return replies, None


# ---------------------------------------------------------------- what can be done to a request


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The paths of all fields of a request: of mappings, and of each of their entries, but for long ones."""
    if isinstance(value, Request):
        return [leaf for name in vars(value) for leaf in leaves(getattr(value, name), (name,))]
    paths = [path]
    if isinstance(value, Mapping) and len(path) < 4:
        # Of entries for sites the first two say it all.
        for name in sorted(value)[: 2 if len(value) > 5 or path[-1:] != ("masks",) else None]:
            paths += leaves(value[name], (*path, name))
    return paths


def get(request: Request, path: Sequence[str]) -> Any:
    value: Any = vars(request)
    for name in path:
        value = value[name]
    return value


def put(request: Request, path: Sequence[str], value: Any) -> Request:
    """The request with another value at a path; ``None`` takes the entry out."""

    def within(mapping: Mapping[str, Any], rest: Sequence[str]) -> dict[str, Any]:
        changed = dict(mapping)
        if len(rest) > 1:
            changed[rest[0]] = within(changed[rest[0]], rest[1:])
        elif value is None:
            changed.pop(rest[0], None)
        else:
            changed[rest[0]] = value
        return changed

    if len(path) > 1:
        return replace(request, **{path[0]: within(getattr(request, path[0]), path[1:])})
    return replace(request, **{path[0]: type(getattr(request, path[0]))() if value is None else value})


def others(value: Any) -> list[Any]:
    """Values that may stand in the place of one, altered or swapped; as many for every value of a type."""
    values: list[Any] = []
    if isinstance(value, bytes):
        values += [bytes([value[0] ^ 1]) + value[1:], b""] if value else [b"x", b"y"]
    elif isinstance(value, str):
        values += [TRAIN, "f" * 32]
    elif isinstance(value, int):
        values += [value + 1, max(0, value - 1)]
    elif isinstance(value, float):
        values += [value * 2, 1e-9, float("nan")]
    elif isinstance(value, list):
        values += [value[1:], [*value, *value[:1]], [*value, "Z"]]
    elif isinstance(value, torch.Tensor):
        values += [torch.zeros_like(value), value * 1.001, torch.full_like(value, float("nan"))]
    elif isinstance(value, Mapping):
        first, second = (*sorted(value), *("" for _ in range(2)))[:2]
        values.append({**value, "Z": value[first] if first else torch.zeros(1)})
        values.append({name: value[name] for name in value if name != first})
        values.append({**value, first: value[second], second: value[first]} if second else {"Y": bytes(32)})
    return values


def colluders(known, floor):
    """The sites that may help the server in vain, however many of the known ones it lets take part.

    With c of n sites on its side, its views of a round stay one if 2t > n + c for the threshold t (Bonawitz
    et al., theorem 6.5); and of a sum over ``floor`` sites or more at least two honest ones must remain.
    """
    return min(min(2 * threshold(n) - n - 1, max(floor, threshold(n)) - 2) for n in range(floor, known + 1))
