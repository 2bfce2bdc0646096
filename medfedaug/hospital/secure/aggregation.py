"""Next global model from the masked sum over sites."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from medfedaug.config.run import RunConfig, job_hash
from medfedaug.errors import RunFailed, UpdateRefused
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import MASKED, Reply, Request
from medfedaug.federation.messages.tensor_checks import StateDictValidator
from medfedaug.federation.server.aggregation import Aggregation, Ask
from medfedaug.hospital.secure.layout import SumLayout
from medfedaug.hospital.secure.unmasking import ServerMasks
from medfedaug.methods.base import Payload, ServerContext


class MaskedAggregation(Aggregation):
    """The mean of the sites' models and of their methods' terms, from masked sums.

    The mean passes the checks of single updates: shapes, variances, length of the step, the methods' own
    checks. A bad mean ends the run, since nobody can tell whose update is at fault.
    """

    def __init__(self, composition: Composition, context: ServerContext, config: RunConfig) -> None:
        super().__init__(composition, context)
        assert composition.sums is not None
        self.layout: SumLayout = composition.sums
        self.words = self.layout.size
        self.masks = ServerMasks(self.layout.size, job_hash(config.to_dict()))
        self.model = StateDictValidator(composition.network, composition.sent)
        self.context = context

    @property
    def least_answers(self) -> int:  # type: ignore[override]
        """The least number of answers that unmask the sum."""
        return self.masks.least_answers

    def agree(self, training: Request, once: Payload, weights: Mapping[str, float]) -> Iterator[Ask]:
        """Let the sites exchange keys and shares."""
        masks = self.masks
        yield Ask(masks.keys(training, once, weights), [*weights], masks.accept_keys)
        yield Ask(masks.shares(), masks.with_keys, masks.accept_shares)

    def training(self, request: Request, sites: list[str]) -> tuple[Request, list[str]]:
        """Return the request with the shares, for the sites that dealt shares."""
        return self.masks.training(request), self.masks.with_shares

    def confirm(self) -> Iterator[Ask]:
        """Let the sites sign the list of added sites, and open the sum."""
        masks = self.masks
        yield Ask(masks.confirmation(), masks.summed, masks.accept_confirmation)
        yield Ask(masks.opening(), masks.with_signature, masks.accept_opening)

    def add(self, site: str, reply: Reply, weight: float, steps: Mapping[str, float]) -> None:
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
