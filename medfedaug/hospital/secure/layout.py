"""Layout of the sums of a round under secure aggregation, modulo 2^64."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from medfedaug.config.run import MAX_SHARE
from medfedaug.errors import ConfigError, MedFedAugError, config_errors
from medfedaug.federation.messages.messages import own_entries
from medfedaug.hospital.primitives import Words
from medfedaug.methods.base import Aggregator, Method, Payload, ServerContext, ServerExchange, zeros

FRACTION_BITS = 36  # A number is rounded to a multiple of 2^-36, 1.5e-11, before it is added up

LARGEST_TERM = 2.0**26
"""The largest magnitude of a number that is added up. A mean of such numbers fits into 64 bits."""

_LARGEST_WORD = LARGEST_TERM * 2.0**FRACTION_BITS
_SUMS = "and the server learns only sums"


@dataclass(frozen=True)
class _Entry:
    key: str
    shape: tuple[int, ...]
    weighted: bool
    fine: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def words(self) -> int:
        return self.size * (1 + self.fine)


class SumLayout:
    """The order of all added numbers of a site: weights first, then the methods' terms.

    Each site k sends round(2^36 αₖ xₖ) modulo 2^64. Its share αₖ is nₖ / Σn for entries that are weighted
    like models, and 1/K for entries that count every site alike, over the K sites that agreed on masks. The
    sum over the answering sites, divided by the sum of their shares, is their mean. Rounding moves it by at
    most 2^-37 per site, divided by the sum of their shares. Statistics have a second word with 36 more bits,
    since a variance may be a small difference of squares.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        context: ServerContext,
        sent: Sequence[str],
        max_share: float = MAX_SHARE,
    ) -> None:
        for reason in _unsummable(methods, context, max_share):
            raise ConfigError(f"secure aggregation: {reason}")
        self._exchanges: dict[str, ServerExchange] = {}
        state = context.network.state_dict()
        self.entries = [_Entry(key, tuple(state[key].shape), True) for key in sent]
        self.shapes = {entry.key: entry.shape for entry in self.entries}
        for method in methods:
            exchange = method.every_round(context)
            if exchange is not None:
                self._exchanges[method.name] = exchange
                self.entries += self._terms(method.name, exchange)
        self.size = sum(entry.words for entry in self.entries)
        if not self.size:
            raise ConfigError("secure aggregation: these methods send nothing that is added up")

    def _terms(self, name: str, exchange: ServerExchange) -> Iterator[_Entry]:
        with config_errors(f"secure aggregation: {name}", ConfigError):
            terms = exchange.terms(zeros(exchange.shapes))
        for key, value in sorted(terms.items()):
            yield _Entry(f"{name}/{key}", tuple(value.shape), exchange.weighted, fine=True)

    def encode(
        self,
        site: str,
        weights: Mapping[str, Tensor],
        payload: Payload,
        weight: float,
        total: float,
        sites: int,
    ) -> Words:
        """Encode a site's numbers for masking.

        A number that is not finite or too large is an error, without the number: it leaves without a mask.
        """
        values: dict[str, Tensor] = dict(weights)
        for name, exchange in self._exchanges.items():
            terms = exchange.terms(own_entries(payload, name))
            values.update({f"{name}/{key}": value for key, value in terms.items()})
        words = np.empty(self.size, dtype=np.uint64)
        position = 0
        for entry in self.entries:
            value = values[entry.key].detach().to("cpu", torch.float64).reshape(-1)
            if not _largest(value) <= LARGEST_TERM:
                raise MedFedAugError(
                    f"site {site}: {entry.key} has a value of more than {LARGEST_TERM:.4g}, or that is no "
                    "number, and secure aggregation adds up smaller ones"
                )
            share = weight / total if entry.weighted else 1.0 / sites
            left = value * share
            for _ in range(1 + entry.fine):
                left = left * 2.0**FRACTION_BITS
                whole = left.round()
                # A term that does not fit would saturate.
                assert _largest(whole) <= _LARGEST_WORD, "shares are at most 1"
                words[position : position + entry.size] = whole.to(torch.int64).numpy().view(np.uint64)
                position += entry.size
                left = left - whole
        return words

    def decode(
        self, words: Words, weighted: float, alike: float
    ) -> tuple[dict[str, Tensor], dict[str, Payload]]:
        """Return the means over the added sites: the model in float32, and terms by method in float64."""
        whole = torch.from_numpy(words.view(np.int64)).double() / 2.0**FRACTION_BITS
        means: dict[str, Tensor] = {}
        position = 0
        for entry in self.entries:
            part = whole[position : position + entry.size]
            if entry.fine:
                second = whole[position + entry.size : position + entry.words]
                part = part + second / 2.0**FRACTION_BITS
            means[entry.key] = (part / (weighted if entry.weighted else alike)).reshape(entry.shape)
            position += entry.words
        model = {key: means.pop(key).to(torch.float32) for key in self.shapes}
        return model, {name: own_entries(means, name) for name in self._exchanges}


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def _unsummable(methods: Sequence[Method], context: ServerContext, max_share: float) -> Iterator[str]:
    """Yield the reasons why sums do not suffice for a job."""
    if max_share not in (MAX_SHARE, 1):
        yield "max_share limits what single sites add, which nobody sees"
    for method in methods:
        if method.before_training(context) is not None:
            yield f"what {method.name} exchanges before training is each site's own, {_SUMS}"
        aggregator = method.aggregator(context)
        kind = Aggregator if aggregator is None else type(aggregator)
        if kind.accept is not Aggregator.accept or kind.weigh is not Aggregator.weigh:
            yield f"{method.name} makes the global model from each site's own, {_SUMS}"
