"""Next global model, and the methods' messages to the sites, from the sites' updates."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import Reply, Request, by_method, namespaced, own_entries, refusal
from medfedaug.federation.messages.participation import LEAST_SITES, lowered_shares
from medfedaug.federation.server.outlier_checks import (
    Plausibility,
    Sizes,
    check_payload,
    cosines,
    judge_steps,
)
from medfedaug.functional.means import WeightedMean, capped_weights
from medfedaug.methods.base import Aggregator, Payload, RoundMean, ServerContext, ServerExchange, SiteUpdate
from medfedaug.models.entries import shared_by_name, trained_entries
from medfedaug.statistics import ChannelStatistics

_COMPARED = "compared/once"  # in checkpoints, next to the groups of `Aggregation._halves`


@dataclass(frozen=True)
class Ask:
    """A request to some sites around a training, and the use of their replies."""

    request: Request
    sites: Sequence[str]
    use: Callable[[str, Reply], None]


class Aggregation:
    """The mean of the sites' models, and the server halves of the methods.

    Updates are held until the end of the round, when shares, steps and payloads are compared
    (`medfedaug.federation.server.outlier_checks`).

    Args:
        max_share: returns the largest share of a site in the mean; ``None`` for no limit.
        norm: the norm of the initial parameters (`StateDictValidator`).

    Attributes:
        aggregators: the aggregator that computes the global model from the mean; at most one.
        lowered: the sites whose share of the last round's mean was lowered, with the share before and after.
        cosines: of each site's step of the last round with the others' (`outlier_checks.cosines`).
        words: the number of words of a masked update, whose values cannot be checked; ``None`` without masks.
        least_answers: the least number of updates whose sum can be computed, as far as known.
    """

    words: int | None = None
    least_answers = 1

    def __init__(
        self,
        composition: Composition,
        context: ServerContext,
        max_share: Callable[[], float | None] = lambda: None,
        norm: float = 1.0,
    ) -> None:
        methods = composition.methods
        self.once = _without_none({m.name: m.before_training(context) for m in methods})
        self.every_round = _without_none({m.name: m.every_round(context) for m in methods})
        self.aggregators = _without_none({m.name: m.aggregator(context) for m in methods})
        self.sent, self._network = composition.sent, composition.network
        self._trained = sorted({*self.sent} & {*trained_entries(self._network)})
        self.max_share, self.norm = max_share, norm
        self.weights: dict[str, float] = {}
        self.lowered: dict[str, tuple[float, float]] = {}
        self.cosines: dict[str, float] = {}
        self._mean = WeightedMean()
        self._held: dict[str, Reply] = {}
        self._steps: dict[str, Mapping[str, float]] = {}
        self._before, self._each = Plausibility(self.once), Plausibility(self.every_round)
        # Of the exchange before training: compared sizes, and payloads that wait for their comparison.
        self._sizes: dict[str, Sizes] = {}
        self._waiting: dict[str, tuple[Reply, float]] | None = {}

    @property
    def min_updates(self) -> int:
        """The least number of updates that the methods need in a round."""
        return max((aggregator.min_updates for aggregator in self.aggregators.values()), default=1)

    def prepare(self, site: str, reply: Reply, weight: float) -> None:
        """Accept a site's payload before training."""
        sizes = self._before.sizes(reply.payload)
        if self._waiting is None and (error := self._before.judge({**self._sizes, site: sizes}).get(site)):
            raise error
        if self._waiting is not None and self._before.kinds:
            self._waiting[site] = reply, weight
        else:
            self._use_before(site, reply, weight)
        self._sizes[site] = sizes

    def compare_before(self) -> dict[str, str]:
        """Compare and use the sites' payloads before training; return refused sites with the reason."""
        refused = {site: str(error) for site, error in self._before.judge(self._sizes).items()}
        waiting, self._waiting = self._waiting or {}, None
        for site, (reply, weight) in sorted(waiting.items()):
            if site not in refused:
                # Checked again: some methods compare a payload with those accepted before it.
                reason = refusal(site, partial(self._use_before, site, reply, weight, check=True))
                refused.update({site: reason} if reason is not None else {})
        for site in refused:
            del self._sizes[site]
        return refused

    def _use_before(self, site: str, reply: Reply, weight: float, *, check: bool = False) -> None:
        for name, exchange in self.once.items():
            payload = own_entries(reply.payload, name)
            if check:
                check_payload(site, name, exchange, payload)
            exchange.accept(site, payload, weight)

    def once_result(self) -> Payload:
        """Return the result of the exchange before training."""
        return _results(self.once)

    def channel_statistics(self) -> dict[str, ChannelStatistics]:
        """The sites' channel statistics, if a method exchanged them."""
        statistics: dict[str, ChannelStatistics] = {}
        for exchange in self.once.values():
            statistics.update(exchange.channel_statistics())
        return statistics

    def needed_at_inference(self, once: Payload) -> Payload:
        """Return the part of the exchange before training that a model needs at inference."""
        needed = {name for name, exchange in self.once.items() if exchange.needed_at_inference}
        kept = [entries for name, entries in by_method(once).items() if name in needed]
        return {key: value for entries in kept for key, value in entries.items()}

    def start_round(self) -> None:
        """Start a round with a new mean."""
        self._mean, self.weights, self._held = WeightedMean(), {}, {}
        self._steps, self.lowered, self.cosines = {}, {}, {}

    def agree(self, training: Request, once: Payload, weights: Mapping[str, float]) -> Iterable[Ask]:
        """Yield the requests before a training, by which sites with these weights agree on it."""
        return ()

    def training(self, request: Request, sites: list[str]) -> tuple[Request, list[str]]:
        """Return the request for the training after `agree`, and the sites that receive it."""
        return request, sites

    def confirm(self) -> Iterable[Ask]:
        """Yield the requests after a training, before the sum can be computed."""
        return ()

    def add(self, site: str, reply: Reply, weight: float, steps: Mapping[str, float]) -> None:
        """Add a checked update with the lengths of its steps (`StateDictValidator.steps`)."""
        self.weights[site], self._held[site], self._steps[site] = weight, reply, steps

    def compare(self, state: Mapping[str, Tensor]) -> dict[str, str]:
        """Compare the updates at the end of a round, and use all but outliers; return those with reasons."""
        held, self._held = dict(sorted(self._held.items())), {}
        far = self._each.judge({site: self._each.sizes(reply.payload) for site, reply in held.items()})
        far = {**judge_steps(self._steps, self.norm), **far}
        refused = {site: str(error) for site, error in sorted(far.items())}
        weights = {site: self.weights.pop(site) for site in held}
        good = {site: weight for site, weight in sorted(weights.items()) if site not in refused}
        used = capped_weights(good, self.max_share())
        self.lowered = lowered_shares(good, used)
        if len(good) >= LEAST_SITES:
            self.cosines = cosines({site: held[site].weights for site in good}, state, self._trained)
        for site, weight in used.items():
            reason = refusal(site, partial(self._use, site, held.pop(site), weight))
            refused.update({site: reason} if reason is not None else {})
        return refused

    def _use(self, site: str, reply: Reply, weight: float) -> None:
        updates = {}
        for name, aggregator in self.aggregators.items():
            payload = own_entries(reply.payload, name)
            weights = {key: value.float() for key, value in reply.weights.items()}
            updates[name] = SiteUpdate(site, reply.round, weights, payload, weight)
            weight = aggregator.weigh(updates[name])
        for name, exchange in self.every_round.items():  # first, since a method may refuse it
            exchange.accept(site, own_entries(reply.payload, name), weight)
        for name, update in updates.items():
            self.aggregators[name].accept(update)
        self._mean.add(reply.weights, weight)
        self.weights[site] = weight

    def finish_round(self, round_: int, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Payload]:
        """Return the state dict of the new global model, and the methods' payload for the sites."""
        return self._next(round_, self._mean.result(), state)

    def _next(
        self, round_: int, mean: Mapping[str, Tensor], state: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Payload]:
        payload = _results(self.every_round)
        for aggregator in self.aggregators.values():
            previous = {key: state[key] for key in self.sent}
            mean = aggregator.result(RoundMean(round_, previous, mean, self.weights))
        return shared_by_name(self._network, {**state, **mean}), payload

    def summaries(self) -> dict[str, dict[str, Any]]:
        """Return a few numbers about the round, by method."""
        summaries: dict[str, dict[str, Any]] = {}
        for name, half in (*self.every_round.items(), *self.aggregators.items()):
            summaries.setdefault(name, {}).update(half.summary())
        return summaries

    def state(self) -> dict[str, Any]:
        """Return the state that is needed after a restart: of the methods, and the compared sizes."""
        states = {name: state for name, half in self._halves() if (state := half.state())}
        return {**states, _COMPARED: self._sizes}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` returned; the preparation is over."""
        self._waiting, self._sizes = None, saved[_COMPARED]
        for name, half in self._halves():
            if name in saved:
                half.restore(saved[name])

    def _halves(self) -> Iterable[tuple[str, ServerExchange | Aggregator]]:
        # Checkpoints use the names of these groups.
        groups = {"once": self.once, "every_round": self.every_round, "server": self.aggregators}
        for group, halves in groups.items():
            for name, half in halves.items():
                yield f"{group}/{name}", half


def _without_none(halves: Mapping[str, Any]) -> dict[str, Any]:
    return {name: half for name, half in halves.items() if half is not None}


def _results(exchanges: Mapping[str, ServerExchange]) -> Payload:
    merged: Payload = {}
    for name, exchange in exchanges.items():
        merged.update(namespaced(exchange.result(), name))
    return merged
