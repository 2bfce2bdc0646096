"""The next global model from a sum over sites whose own updates nobody sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from medfedaug.errors import RunFailed, UpdateRefused
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import MASKED, Reply, namespaced
from medfedaug.federation.messages.tensor_checks import StateDictValidator
from medfedaug.federation.secure.layout import SumLayout
from medfedaug.federation.secure.unmasking import ServerMasks
from medfedaug.federation.server.aggregation import Aggregation
from medfedaug.methods.base import Payload, RoundMean, ServerContext
from medfedaug.models.substitution import shared_by_name


class SecureAggregation(Aggregation):
    """The mean of the sites' models, and what methods make of means over sites.

    What is checked of every update without masks is checked of the mean here: shapes, variances, how far the
    model moves, and the methods' own checks. Nobody can tell whose update a bad mean is the fault of, so it
    ends the run.

    Args:
        composition: methods and network.
        context: what the methods are given about the federation.
        config: the hash of the run's configuration.
    """

    def __init__(self, composition: Composition, context: ServerContext, config: str) -> None:
        super().__init__(composition, context)
        assert composition.sums is not None
        self.layout: SumLayout = composition.sums
        self.masks: ServerMasks = ServerMasks(self.layout.size, config)
        self.model = StateDictValidator(composition.network, composition.sent)
        self.context = context

    def add(
        self,
        site: str,
        reply: Reply,
        weight: float,
        steps: Mapping[str, float] | None = None,
        doubt: str | None = None,
    ) -> None:
        """Add a site's masked numbers."""
        self.masks.add(site, reply.masks[MASKED].contiguous().numpy().view(np.uint64))
        self.weights[site] = weight

    def compare(self, state: Mapping[str, Tensor]) -> dict[str, str]:
        """Nothing can be compared."""
        return {}

    def finish_round(self, round_: int, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Payload]:
        """Take the masks off the sum, check the mean, and make the next model of it.

        Raises:
            RunFailed: when the masks do not come off, or the mean cannot be used.
        """
        words, total = self.masks.total()
        sites = len(self.weights)
        model, means = self.layout.decode(words, sum(self.weights.values()) / total, sites / self.masks.sites)
        try:
            start = {key: state[key].cpu() for key in model}
            self.model.check("", model, start, buffers=round_ > 1)
            for name, exchange in self.every_round.items():
                # A mean of what passes these checks passes them too.
                exchange.check({key: means[name][key] for key in exchange.shapes})
                exchange.accept_mean(means[name], sites)
        except (UpdateRefused, ValueError) as error:
            raise RunFailed(
                f"round {round_}: the mean of {', '.join(sorted(self.weights))} cannot be used "
                f"({str(error).removeprefix('site , ')}); under secure aggregation nobody can tell whose "
                "fault it is"
            ) from error
        shared: Mapping[str, Tensor] = {key: value.to(state[key].device) for key, value in model.items()}
        for aggregator in self.aggregators.values():
            previous = {key: state[key] for key in self.sent}
            shared = aggregator.result(RoundMean(round_, previous, shared, self.weights))
        results: Payload = {}
        for name, exchange in self.every_round.items():
            results.update(namespaced(exchange.result(), name))
        return shared_by_name(self._network, {**state, **shared}), results

    def summaries(self) -> dict[str, dict[str, Any]]:
        """A few numbers about the round, by method, and about the masks."""
        masks = self.masks
        told: dict[str, Any] = {"summed": sorted(self.weights), "recovered": masks.recovered}
        told["bytes"] = {"up": masks.bytes_up, "down": masks.bytes_down}
        return {**super().summaries(), "masks": told}
