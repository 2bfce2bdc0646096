"""Makes the next global model, and what the methods send back, from the sites' updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medfedaug.errors import MedFedAugError
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import Reply, by_method, namespaced, own_entries
from medfedaug.federation.messages.refusal import refusal
from medfedaug.federation.messages.site_sampling import LEAST_SITES
from medfedaug.federation.secure.layout import SumLayout
from medfedaug.federation.secure.unmasking import ServerMasks
from medfedaug.federation.server.held_updates import HeldUpdates
from medfedaug.federation.server.outlier_checks import (
    Plausibility,
    Sizes,
    check_payload,
    judge_steps,
)
from medfedaug.federation.server.step_comparison import ComparedStep, StepComparison
from medfedaug.functional.weighted_mean import WeightedMean, capped_weights
from medfedaug.methods.base import (
    Aggregator,
    Payload,
    RoundMean,
    ServerContext,
    ServerExchange,
    SiteUpdate,
)
from medfedaug.models.substitution import shared_by_name
from medfedaug.statistics import ChannelStatistics

_COMPARED = "compared/once"  # in checkpoints, beside the groups of `Aggregation._halves`


class Aggregation:
    """The mean of the sites' models, and the server halves of the methods.

    Args:
        composition: methods and network.
        context: what the methods are given about the federation.
        max_share: called for the largest share of a site in the mean; ``None`` for no limit.
        norm: that of the parameters as the run began
            (`medfedaug.federation.messages.tensor_checks.StateDictValidator`).
        hold_models: whether whole updates are held until the end of the round
            (`medfedaug.federation.server.held_updates`). Only then it is known what a share is, how far the
            sites go, and what they exchange (`medfedaug.federation.server.outlier_checks`). Otherwise models
            are averaged as they arrive, in that order, and what the methods exchange is held alone.
        steps: limits how far a site may go by the other sites; ``None`` for no limit.

    Attributes:
        once: the exchanges before training, by method.
        every_round: the exchanges of every round, by method.
        aggregators: the aggregator that computes the global model from the mean; at most one.
        weights: the weight in the mean, for each site whose update of this round was accepted.
        lowered: the sites whose share of the last round's mean was lowered, with the share before and after.
        compared: the sites' steps of the last round beside those of the others, where they are limited.
        layout: what is added up, where updates come under masks (`medfedaug.federation.secure`).
        masks: what the sites of a round say to each other then.
    """

    def __init__(
        self,
        composition: Composition,
        context: ServerContext,
        max_share: Callable[[], float | None] = lambda: None,
        norm: float = 1.0,
        *,
        hold_models: bool = True,
        steps: StepComparison | None = None,
    ) -> None:
        methods = composition.methods
        self.once = _there({m.name: m.before_training(context) for m in methods})
        self.every_round = _there({m.name: m.every_round(context) for m in methods})
        self.aggregators = _there({m.name: m.aggregator(context) for m in methods})
        self.sent, self._network = composition.sent, composition.network
        self.layout: SumLayout | None = None
        self.masks: ServerMasks | None = None
        self.max_share, self.norm, self.hold_models = max_share, norm, hold_models
        self._capped: Mapping[str, float] = {}
        self.weights: dict[str, float] = {}
        self.lowered: dict[str, tuple[float, float]] = {}
        self.comparison, self.compared = steps, dict[str, ComparedStep]()
        self._mean, self._held = WeightedMean(), HeldUpdates()
        self._steps: dict[str, Mapping[str, float]] = {}
        self._doubted: dict[str, str] = {}
        self._before, self._each = Plausibility(self.once), Plausibility(self.every_round)
        # Of what came before training: what is compared, and payloads that have not been compared yet.
        self._sizes: dict[str, Sizes] = {}
        self._waiting: dict[str, tuple[Reply, float]] | None = {}

    @property
    def min_updates(self) -> int:
        """The number of updates that the methods need in a round."""
        return max((aggregator.min_updates for aggregator in self.aggregators.values()), default=1)

    def prepare(self, site: str, reply: Reply, weight: float) -> None:
        """Accept what a site sends before training.

        Raises:
            UpdateRefused: for a site that joins later, if it is far outside of those that were there before.
        """
        sizes = self._before.sizes(reply.payload)
        if self._waiting is None:
            wrong = self._before.judge({**self._sizes, site: sizes}).get(site)
            if wrong is not None:
                raise wrong
            self._use_before(site, reply, weight)
        elif self._before.kinds:
            self._waiting[site] = reply, weight
        else:
            self._use_before(site, reply, weight)
        self._sizes[site] = sizes

    def compare_before(self) -> dict[str, str]:
        """Compare what the sites sent before training, and use it.

        Returns:
            The sites that are refused, with the reason.
        """
        refused = {site: str(error) for site, error in self._before.judge(self._sizes).items()}
        waiting, self._waiting = self._waiting or {}, None
        for site, (reply, weight) in sorted(waiting.items()):
            if site not in refused:
                # Some methods compare a payload with those before it, of which there were none so far.
                reason = refusal(site, partial(self._use_before, site, reply, weight, check=True))
                refused.update({site: reason} if reason is not None else {})
        for site in refused:
            del self._sizes[site]
        return refused

    def _use_before(self, site: str, reply: Reply, weight: float, *, check: bool = False) -> None:
        for name, exchange in self.once.items():
            own = own_entries(reply.payload, name)
            if check:
                check_payload(site, name, exchange, own)
            exchange.accept(site, own, weight)

    def once_result(self) -> Payload:
        """Return the result of the exchange before training, for all sites."""
        return _results(self.once)

    def channel_statistics(self) -> dict[str, ChannelStatistics]:
        """The sites' channel statistics, if a method exchanged them."""
        found: dict[str, ChannelStatistics] = {}
        for exchange in self.once.values():
            found.update(exchange.channel_statistics())
        return found

    def needed_at_inference(self, once: Payload) -> Payload:
        """The part of the exchange before training that a finished model needs at inference."""
        needed = {name for name, exchange in self.once.items() if exchange.needed_at_inference}
        kept = [entries for name, entries in by_method(once).items() if name in needed]
        return {key: value for entries in kept for key, value in entries.items()}

    def start_round(self, weights: Mapping[str, float] | None = None) -> None:
        """Start a new mean."""
        self._capped = {} if self.hold_models else capped_weights(dict(weights or {}), self.max_share())
        self._mean, self.weights, self._held = WeightedMean(), {}, HeldUpdates()
        self._steps, self._doubted, self.lowered, self.compared = {}, {}, {}, {}

    def add(
        self,
        site: str,
        reply: Reply,
        weight: float,
        steps: Mapping[str, float] | None = None,
        doubt: str | None = None,
    ) -> None:
        """Add an update that has been checked.

        Args:
            site: who sent it.
            reply: the update.
            weight: the site's weight; the method that computes the global model may change it.
            steps: how far the site went
                (`medfedaug.federation.messages.tensor_checks.StateDictValidator.steps`).
            doubt: why it is refused where too few updates come to compare it with.
        """
        if not self.hold_models:
            if doubt is not None:
                raise MedFedAugError(doubt)
            weight, updates = self._weigh(site, reply, self._capped.get(site, weight))
            self._use_model(site, reply, weight, updates)
            self._held.put(site, Reply(reply.task, reply.round, payload=reply.payload))
            return
        self.weights[site] = weight
        self._held.put(site, reply)
        if steps is not None:
            self._steps[site] = steps
        if doubt is not None:
            self._doubted[site] = doubt

    def compare(self, state: Mapping[str, Tensor]) -> dict[str, str]:
        """At the end of a round: compare what the sites sent, and use what is not far outside.

        Returns:
            The sites that are refused, with the reason. Where models are not held, the model of such a site
            is in the mean, and what its methods exchanged is left out.
        """
        held = self._held.take()
        if not self.hold_models:
            far = self._each.judge({site: self._each.sizes(reply.payload) for site, reply in held.items()})
            for site in sorted(held.keys() - far.keys()):
                self._use_payload(site, held[site], self.weights[site])
            return {site: f"{error}; its model is averaged" for site, error in sorted(far.items())}
        sizes = {site: self._each.sizes(reply.payload) for site, reply in held.items()}
        far = {**judge_steps(self._steps, self.norm), **self._each.judge(sizes)}
        refused = {site: str(error) for site, error in sorted(far.items())}
        if len(held) < LEAST_SITES:
            refused = {**self._doubted, **refused}
        weights = {site: self.weights.pop(site) for site in held}
        good = {site: weight for site, weight in sorted(weights.items()) if site not in refused}
        used = capped_weights(good, self.max_share())
        total, all_used = sum(good.values()), sum(used.values())
        self.lowered = {s: (good[s] / total, used[s] / all_used) for s in good if used[s] < good[s]}
        if self.comparison is not None:
            sent = {site: held[site].weights for site in good}
            self.compared = self.comparison.compare(sent, self._steps, used, state)
        for site, weight in used.items():
            reply = held.pop(site)
            if self.comparison is not None and site in self.compared:
                moved = self.comparison.used(reply.weights, self.compared[site], state)
                reply = replace(reply, weights=moved)
            reason = refusal(site, partial(self._use, site, reply, weight))
            refused.update({site: reason} if reason is not None else {})
        return refused

    def _use(self, site: str, reply: Reply, weight: float) -> None:
        weight, updates = self._weigh(site, reply, weight)
        self._use_payload(site, reply, weight)  # first, since a method may refuse it
        self._use_model(site, reply, weight, updates)

    def _weigh(self, site: str, reply: Reply, weight: float) -> tuple[float, dict[str, SiteUpdate]]:
        updates = {}
        for name, aggregator in self.aggregators.items():
            own = own_entries(reply.payload, name)
            updates[name] = SiteUpdate(site, reply.round, reply.weights, own, weight)
            weight = aggregator.weigh(updates[name])
        return weight, updates

    def _use_model(self, site: str, reply: Reply, weight: float, updates: Mapping[str, SiteUpdate]) -> None:
        for name, update in updates.items():
            self.aggregators[name].accept(update)
        self._mean.add(reply.weights, weight)
        self.weights[site] = weight

    def _use_payload(self, site: str, reply: Reply, weight: float) -> None:
        for name, exchange in self.every_round.items():
            exchange.accept(site, own_entries(reply.payload, name), weight)

    def finish_round(self, round_: int, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Payload]:
        """Returns the state dict of the new global model, and what the sites receive with it."""
        shared = self._mean.result()
        for aggregator in self.aggregators.values():
            previous = {key: state[key] for key in self.sent}
            shared = aggregator.result(RoundMean(round_, previous, shared, self.weights))
        sent = _results(self.every_round)
        for name, aggregator in self.aggregators.items():
            sent.update(namespaced(aggregator.message(), name))
        return shared_by_name(self._network, {**state, **shared}), sent

    def summaries(self) -> dict[str, dict[str, Any]]:
        """A few numbers about the round, by method."""
        found: dict[str, dict[str, Any]] = {}
        for name, half in (*self.every_round.items(), *self.aggregators.items()):
            found.setdefault(name, {}).update(half.summary())
        return found

    def state(self) -> dict[str, Payload]:
        """Return the state that the methods need after a restart."""
        found = {name: state for name, half in self._halves() if (state := half.state())}
        compared = {
            f"{site}/{key}": torch.tensor(edges, dtype=torch.float64)
            for site, sizes in self._sizes.items()
            for key, edges in sizes.items()
        }
        return {**found, **({_COMPARED: compared} if compared else {})}

    def restore(self, saved: Mapping[str, Payload]) -> None:
        """Restore what `state` returned; the preparation is over."""
        self._waiting = None
        for path, edges in saved.get(_COMPARED, {}).items():
            site, key = path.split("/", 1)
            largest, smallest = edges.tolist()
            self._sizes.setdefault(site, {})[key] = largest, smallest
        for name, half in self._halves():
            if name in saved:
                half.restore(saved[name])

    def _halves(self) -> Iterable[tuple[str, ServerExchange | Aggregator]]:
        # These names of groups are used in checkpoints.
        for group, halves in (
            ("once", self.once),
            ("every_round", self.every_round),
            ("server", self.aggregators),
        ):
            for name, half in halves.items():
                yield f"{group}/{name}", half


def _there(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: half for name, half in found.items() if half is not None}


def _results(exchanges: Mapping[str, ServerExchange]) -> Payload:
    merged: Payload = {}
    for name, exchange in exchanges.items():
        merged.update(namespaced(exchange.result(), name))
    return merged
