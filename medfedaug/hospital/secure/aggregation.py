"""Next global model from the masked sum over sites."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from medfedaug.errors import RunFailed, UpdateRefused
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import MASKED, Reply
from medfedaug.federation.messages.tensor_checks import StateDictValidator
from medfedaug.federation.server.aggregation import Aggregation
from medfedaug.hospital.secure.layout import SumLayout
from medfedaug.hospital.secure.unmasking import ServerMasks
from medfedaug.methods.base import Payload, ServerContext


class SecureAggregation(Aggregation):
    """The mean of the sites' models and of their methods' terms, from masked sums.

    The mean passes the checks of single updates: shapes, variances, length of the step, the methods' own
    checks. A bad mean ends the run, since nobody can tell whose update is at fault.

    Args:
        composition: methods and network.
        context: the methods' context on the federation.
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
        """Return no site: masked updates cannot be compared."""
        return {}

    def finish_round(self, round_: int, state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Payload]:
        """Unmask the sum, check the mean, and compute the next model."""
        words, total = self.masks.total()
        sites = len(self.weights)
        model, means = self.layout.decode(words, sum(self.weights.values()) / total, sites / self.masks.sites)
        try:
            start = {key: state[key].cpu() for key in model}
            self.model.check("", model, start, buffers=round_ > 1)
            for name, exchange in self.every_round.items():
                # The checks hold for a mean of valid payloads.
                exchange.check({key: means[name][key] for key in exchange.shapes})
                exchange.accept_mean(means[name], sites)
        except (UpdateRefused, ValueError) as error:
            raise RunFailed(
                f"round {round_}: the mean of {', '.join(sorted(self.weights))} cannot be used "
                f"({str(error).removeprefix('site , ')}); under secure aggregation nobody can tell whose "
                "fault it is"
            ) from error
        return self._next(round_, {k: v.to(state[k].device) for k, v in model.items()}, state)

    def summaries(self) -> dict[str, dict[str, Any]]:
        """Return a few numbers about the round, by method, and about the masks."""
        masks = {
            "summed": sorted(self.weights),
            "recovered": self.masks.recovered,
            "bytes": {"up": self.masks.bytes_up, "down": self.masks.bytes_down},
        }
        return {**super().summaries(), "masks": masks}
