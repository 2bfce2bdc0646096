"""Masked numbers instead of a site's update, and the next global model from their sum over sites."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfedaug.config.run import RunConfig, job_hash
from medfedaug.errors import RunFailed, UpdateRefused
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.messages import MASK_TASKS, MASKED, TRAIN, Reply, Request
from medfedaug.federation.messages.participation import site_weight
from medfedaug.federation.messages.tensor_checks import StateDictValidator
from medfedaug.federation.server.aggregation import Aggregation, Ask
from medfedaug.federation.site.site import Delivery
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.secure.layout import SumLayout
from medfedaug.hospital.secure.masks import Member, OutOfTurn, RoundMasking, SiteMasks
from medfedaug.hospital.secure.unmasking import ServerMasks
from medfedaug.methods.base import Payload, ServerContext


class MaskedDelivery(Delivery):
    """Agree with other sites on masks, and replace weights and statistics by masked numbers.

    ``count`` checks the patients behind an update before it is masked. Without ``masks``, in simulations,
    nothing is signed.
    """

    tasks = MASK_TASKS

    def __init__(
        self,
        site: str,
        trainer: SiteTrainer,
        masks: SiteMasks | None = None,
        count: Callable[[Reply], None] = lambda reply: None,
    ) -> None:
        self.site, self.trainer, self.count = site, trainer, count
        self.masks = masks or SiteMasks(site)
        self._masking: RoundMasking | None = None

    def answer(self, request: Request) -> dict[str, Any]:
        """Answer a request for keys, shares, a signature, or shares for unmasking."""
        return self.masks.answer(request, self._member())

    def begin(self, request: Request) -> None:
        """Prepare the masks."""
        once = request.once or self.trainer.memory.once
        self._masking = self.masks.masking(request, self._member(), once)

    def finish(self, request: Request, reply: Reply) -> None:
        """Mask the update."""
        self.count(reply)
        sums, masking = self.trainer.composition.sums, self._masking
        assert masking is not None
        words = sums.encode(
            self.site,
            reply.weights,
            reply.payload,
            weight=masking.weight,
            total=masking.total,
            sites=len(masking.sites),
        )
        after = {key: reply.weights[key] for key in sums.shapes}
        before = {key: request.weights[key] for key in sums.shapes}
        reply.masks = {MASKED: torch.from_numpy(masking.mask(words, before, after).view(np.int64))}
        reply.weights, reply.payload = {}, {}

    def failed(self, task: str, error: Exception) -> None:
        """Forget the keys of the round."""
        if task in (TRAIN, *MASK_TASKS) and not isinstance(error, OutOfTurn):
            self.masks.void()

    def _member(self) -> Member:
        trainer = self.trainer
        assert trainer.samples is not None
        weight = site_weight(trainer.config, len(trainer.samples.training()))
        return Member(weight, job_hash(trainer.config.to_dict()))


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
