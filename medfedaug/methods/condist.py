"""ConDistFL: the global model teaches a site the classes that it has not annotated."""

from __future__ import annotations

import torch
from torch import Tensor

from medfedaug import functional as F
from medfedaug.data.annotation import Decoded
from medfedaug.methods.arguments import NotNegative, Positive
from medfedaug.methods.base import Method, SiteContext, SitePart, Step
from medfedaug.methods.own_loss import RoundMeans
from medfedaug.models.modes import evaluating
from medfedaug.models.substitution import call_with


class ConDist(Method):
    r"""Conditional distillation (Wang et al., DeCaF 2023, arXiv 2308.04070; arXiv 2412.18833).

    To the marginal loss of what a case has annotated comes

    .. math:: \lambda_r\, \ell_{ConDist}(z, z_{glob}), \qquad
              \lambda_r = \lambda_{min} + (\lambda_{max} - \lambda_{min}) \frac{r - 1}{R - 1}

    in round r of R: `medfedaug.functional.conditional_distillation` between the model that is trained and the
    global one that the site received in this round. Where a site has annotated all classes the method does
    nothing; a site without any outline learns from the global model alone.

    Nothing leaves a site beside the model. A step needs one more pass without gradients.

    Args:
        weight: the weight in the last round.
        first_weight: the weight in the first round.
        temperature: τ of both models' softmax.

    Raises:
        ConfigError: for a negative weight, or a temperature that is not positive.

    Deviations:
        Each class is a background group of its own; the paper has the lesions of an organ in one group with
        it. Weights, temperature and the mask of the Dice follow the paper's public code, which the text
        leaves open; it clips gradients and keeps the optimiser over rounds, which are settings of the run
        here. The distillation is of the finest output with deep supervision, as in the code.
    """

    name = "condist"
    tasks = ("segmentation",)
    requires = frozenset({"labels", "global_start"})
    provides = frozenset({"extra_passes", "unlabelled_images"})

    def __init__(
        self, weight: NotNegative = 1.0, first_weight: NotNegative = 0.01, temperature: Positive = 2.0
    ) -> None:
        self.weight, self.first_weight, self.temperature = weight, first_weight, temperature

    def at_site(self, context: SiteContext) -> SitePart:
        return ConDistSite(self, context)

    def weight_of(self, round_: int, rounds: int) -> float:
        """λ of a round, from 1; of fine-tuning after the last one that of the last."""
        share = (min(round_, rounds) - 1) / max(rounds - 1, 1) if rounds > 1 else 1.0
        return self.first_weight + (self.weight - self.first_weight) * share


class TaughtSite(SitePart):
    """A site that learns from a teacher beside its labels.

    Attributes:
        teacher: the teacher's entries that are not the network's.
    """

    def __init__(self, context: SiteContext) -> None:
        self.context = context
        self.teacher: dict[str, Tensor] = {}
        self._means = RoundMeans("distillation")

    @property
    def partial(self) -> bool:
        """Return whether labels may leave something open."""
        return self.context.task is not None and self.context.task.annotation is not None

    def decoded(self, targets: Tensor) -> Decoded:
        """The targets, and what is known of them."""
        assert self.context.task is not None
        assert self.context.task.annotation is not None
        return self.context.task.annotation.decode(targets)

    def start_round(self) -> None:
        """Keep the model that the site received."""
        if self.partial:
            state = self.context.network.state_dict()
            self.teacher = {key: value.detach().clone() for key, value in state.items()}
        self._means.clear()

    @torch.no_grad()
    def taught(self, inputs: Tensor) -> Tensor:
        """The teacher's logits."""
        with evaluating(self.context.network):
            found: Tensor = call_with(self.context.network, self.teacher, inputs)
        return F.working_precision(found)

    def end_round(self) -> None:
        """Drop the teacher."""
        self.teacher = {}

    def metrics(self) -> dict[str, float]:
        """The mean of the term over the round, before its weight."""
        return self._means.read()


class ConDistSite(TaughtSite):
    """The site's half."""

    def __init__(self, method: ConDist, context: SiteContext) -> None:
        super().__init__(context)
        self.method = method

    def loss(self, step: Step) -> Tensor | None:
        """λ times the distillation loss of the batch."""
        if not self.partial:
            return None
        decoded = self.decoded(step.targets)
        term = F.conditional_distillation(
            F.working_precision(step.outputs),
            self.taught(step.inputs),
            decoded.labels,
            decoded.annotated,
            self.method.temperature,
        )
        self._means.add(term)
        return self.method.weight_of(self.context.round(), self.context.rounds) * term
