"""`MaskedDelivery`: masked numbers instead of a site's update."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from medfedaug.config.run import job_hash
from medfedaug.federation.messages.messages import MASK_TASKS, MASKED, TRAIN, Reply, Request
from medfedaug.federation.messages.participation import site_weight
from medfedaug.federation.site.site import Delivery
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.secure.masks import Member, OutOfTurn, RoundMasking, SiteMasks


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
