"""ConDistFL: the global model teaches a site the classes that it has not outlined."""

from typing import Any

import torch
from torch import Tensor

from medfedaug import functional as F
from medfedaug.data.annotation import Decoded
from medfedaug.functional.features import per_channel
from medfedaug.methods.arguments import NotNegative, Positive
from medfedaug.methods.base import Method, SiteContext, SitePart, Step
from medfedaug.methods.site_parts import MeasuredSite
from medfedaug.models.entries import call_with, evaluating


class ConDist(Method):
    """Conditional distillation (Wang et al., DeCaF 2023, arXiv 2308.04070; arXiv 2412.18833).

    The marginal loss of the annotated classes gains, in round r of R, ::

        λᵣ ℓ_ConDist(z, z_glob),   λᵣ = λ_min + (λ_max − λ_min) (r − 1) / (R − 1)

    by `conditional_distillation` between the local model and the global model that the site received in this
    round. The method does nothing at a site that has outlined all classes; a site without any outline learns
    only from the global model.

    Only the model leaves a site. A step needs one more pass without gradients.

    Args:
        weight: the weight in the last round.
        first_weight: the weight in the first round.
        temperature: τ of both models' softmax.

    Raises:
        ConfigError: for a negative weight, or a temperature that is not positive.

    Deviations:
        Each class is a separate background group; the paper groups the lesions of an organ with the organ.
        The text leaves open weights, temperature and the mask of the Dice, which follow the paper's public
        code. That code clips gradients and keeps the optimiser over rounds; here these are settings of the
        run. With deep supervision the finest output is distilled, as in the code.
    """

    name = "condist"
    tasks = ("segmentation",)
    requires = frozenset({"labels"})
    provides = frozenset({"extra_passes", "unlabelled_images"})

    def __init__(
        self, weight: NotNegative = 1.0, first_weight: NotNegative = 0.01, temperature: Positive = 2.0
    ) -> None:
        self.weight, self.first_weight, self.temperature = weight, first_weight, temperature

    def at_site(self, context: SiteContext) -> SitePart:
        return ConDistSite(self, context)

    def weight_of(self, round_: int, rounds: int) -> float:
        """Return λ of a round, from 1; fine-tuning after the last round has the λ of that round."""
        share = (min(round_, rounds) - 1) / max(rounds - 1, 1) if rounds > 1 else 1.0
        return self.first_weight + (self.weight - self.first_weight) * share


class TeacherGuidedSite(MeasuredSite):
    """A site that learns from its labels and from a teacher.

    Attributes:
        teacher: the teacher's entries; other entries are the network's.
    """

    measured = ("distillation",)

    def __init__(self, method: Any, context: SiteContext) -> None:
        self.method, self.context = method, context
        self.teacher: dict[str, Tensor] = {}

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
        super().start_round()

    @torch.no_grad()
    def teacher_logits(self, inputs: Tensor) -> Tensor:
        with evaluating(self.context.network):
            logits: Tensor = call_with(self.context.network, self.teacher, inputs)
        return F.working_precision(logits)

    def end_round(self) -> None:
        self.teacher = {}


class ConDistSite(TeacherGuidedSite):
    method: ConDist

    def loss(self, step: Step) -> Tensor | None:
        """Return λ times the distillation loss of the batch."""
        if not self.partial:
            return None
        decoded = self.decoded(step.targets)
        term = conditional_distillation(
            F.working_precision(step.outputs),
            self.teacher_logits(step.inputs),
            decoded.labels,
            decoded.annotated,
            self.method.temperature,
        )
        self.measure(term)
        return self.method.weight_of(self.context.round(), self.context.rounds) * term


def conditional_distillation(
    student: Tensor, teacher: Tensor, labels: Tensor, annotated: Tensor, temperature: float = 2.0
) -> Tensor:
    r"""Soft Dice loss between two models about the classes without outline in a case.

    With F the structures that a case has annotated and G all other classes, background included, both models
    have the probabilities of G on the condition that a voxel is not of F, ::

        p̃_g = p_g / (1 − Σ_(n∈F) pₙ) for g ∈ G,   p = softmax(z / τ)

    and the loss is the mean of ``1 − 2 (Σᵥ s̃_g t̃_g) / (Σᵥ (s̃_g + t̃_g))``
    over the classes g, over the voxels that neither the label map nor the teacher's prediction counts as F.

    Args:
        student: logits, (B, K, \*spatial).
        teacher: the same.
        labels: (B, 1, \*spatial), 0 where unknown.
        annotated: boolean, (B, K). A case with all classes takes no part.
        temperature: τ.
    """
    lacking = ~annotated
    takes_part = lacking.any(dim=1, keepdim=True)
    others = lacking.clone()
    others[:, 0] = True  # the background is no structure
    kept, structures = per_channel(others, student.ndim), per_channel(~others, student.ndim)
    predicted = teacher.argmax(dim=1, keepdim=True)
    counted = (labels == 0) & ~structures.expand_as(teacher).gather(1, predicted)
    counted = counted & per_channel(takes_part, student.ndim)
    s, t = (
        (z / temperature).masked_fill(~kept, -torch.inf).softmax(dim=1) * counted for z in (student, teacher)
    )
    over = (0, *range(2, student.ndim))
    losses = 1 - 2 * (s * t).sum(over) / ((s + t).sum(over) + 1e-5)
    present = (others & takes_part).any(dim=0)
    return (losses * present).sum() / present.sum().clamp_min(1)
