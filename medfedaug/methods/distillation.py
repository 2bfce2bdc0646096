"""A site of incomplete labels that a teacher guides, and the default for such sites."""

import torch
from torch import Tensor

from medfedaug import functional as F
from medfedaug.data.annotation import Decoded
from medfedaug.methods.base import SiteContext, SitePart, Step
from medfedaug.methods.own_loss import RoundMeans
from medfedaug.models.substitution import call_with, evaluating
from medfedaug.tasks.partial_loss import PartialLoss, distillation_loss

_FIRST_SHARE = 0.01
"""The share in the merged background with which classes without outline start."""


class TeacherGuidedSite(SitePart):
    """A site that learns from its labels and from a teacher.

    Attributes:
        teacher: the teacher's entries; other entries are the network's.
    """

    def __init__(self, context: SiteContext) -> None:
        self.context = context
        self.teacher: dict[str, Tensor] = {}
        self._means = RoundMeans("distillation")

    @property
    def partial(self) -> bool:
        """Return whether labels may be incomplete."""
        return self.context.task is not None and self.context.task.annotation is not None

    def decoded(self, targets: Tensor) -> Decoded:
        """Return the targets with their annotation."""
        assert self.context.task is not None
        assert self.context.task.annotation is not None
        return self.context.task.annotation.decode(targets)

    def start_round(self) -> None:
        """Make the received model the teacher."""
        if self.partial:
            state = self.context.network.state_dict()
            self.teacher = {key: value.detach().clone() for key, value in state.items()}
        self._means.clear()

    @torch.no_grad()
    def teacher_logits(self, inputs: Tensor) -> Tensor:
        with evaluating(self.context.network):
            logits: Tensor = call_with(self.context.network, self.teacher, inputs)
        return F.working_precision(logits)

    def end_round(self) -> None:
        self.teacher = {}

    def metrics(self) -> dict[str, float]:
        return self._means.read()


class DistilledSite(TeacherGuidedSite):
    r"""A site whose received global model says what is behind voxels without outline.

    It trains the setting ``partial_loss="distilled"``, at sites with classes that some case has not annotated
    (`medfedaug.federation.site.trainer.SiteTrainer`). In round r of R, with the share of the training
    ``s = (r − 1) / (R − 1)``, the loss is ::

        ℓ_marginal(w) + (1 − s) ℓ_distilled,   w = 0.01^(1 − s)

    with `medfedaug.tasks.partial_loss.merged_logits` and `medfedaug.tasks.partial_loss.distillation_loss`,
    without ℓ_distilled in round 1, whose model knows nothing. The last round has the marginal loss (Shi et
    al., Med. Image Anal. 2021).

    It is expectation-maximisation over the hidden classes of the merged background: the model of all sites
    gives their expectation once a round, and the site maximises. In the marginal loss each step of a site is
    both, so that whichever merged class is largest at the start grows there.

    Deviations:
        No paper. ConDist (Wang et al., DeCaF 2023) also learns the merged classes from the received model:
        with a Dice of softened probabilities, a weight that grows, voxels of structures that the teacher
        finds left out, and w = 1.
    """

    def __init__(self, context: SiteContext, loss: PartialLoss) -> None:
        super().__init__(context)
        self._partial_loss = loss

    def done(self) -> float:
        """Return s, the share of the training that is over; 1 in the only round of a run."""
        last = self.context.rounds - 1
        return min((self.context.round() - 1) / last, 1.0) if last > 0 else 1.0

    def start_round(self) -> None:
        super().start_round()
        self._partial_loss.share = _FIRST_SHARE ** (1 - self.done())

    def loss(self, step: Step) -> Tensor | None:
        """Return the weighted distillation loss of the batch."""
        weight = 1 - self.done()
        if self.context.round() == 1 or not weight:
            return None
        decoded = self.decoded(step.targets)
        outputs, teacher = F.working_precision(step.outputs), self.teacher_logits(step.inputs)
        term = distillation_loss(outputs, teacher, decoded)
        self._means.add(term)
        return weight * term

    def end_round(self) -> None:
        super().end_round()
        self._partial_loss.share = 1.0
