"""Mean teacher: a site learns what its labels leave open from the average of its own recent models."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from medfedaug import functional as F
from medfedaug.methods.arguments import NotNegative, Share
from medfedaug.methods.base import Method, SiteContext, SitePart, Step
from medfedaug.methods.condist import TaughtSite
from medfedaug.models.substitution import trained_entries


class Teacher(Method):
    r"""Mean teacher (Tarvainen and Valpola, NeurIPS 2017) with a confidence threshold.

    The teacher begins a round as the global model and follows the weights that are trained,
    :math:`\theta' \leftarrow \alpha \theta' + (1 - \alpha)\theta`, after every step. The loss gains

    .. math:: \lambda\, e^{-5 (1 - r / R)^2} \; \ell

    in round r of R, with the cross-entropy ℓ of the classes that the teacher gives a probability of the
    threshold or more, at the voxels whose class the labels leave open
    (`medfedaug.functional.confident_entropy`): all of an image without outlines, unknown ones, and the
    background of a case that has not annotated every class. Where a site has annotated everything the method
    does nothing.

    Nothing leaves a site beside the model. A step needs one more pass without gradients.

    Args:
        weight: λ.
        threshold: the probability from which a class is learned, above 0 and up to 1.
        decay: α, from 0 to 1.

    Raises:
        ConfigError: for values out of range.

    Deviations:
        The paper draws predictions together by their squared difference and gives teacher and student noise
        of their own; here confident classes are labels, as in later work, and both see the same image, the
        student with the layers of training and the teacher with those of evaluation. The paper's teacher goes
        on from step to step; here it begins each round anew, since the site received another model, and uses
        the running statistics of the student. No text of a federated variant was at hand.
    """

    name = "teacher"
    tasks = ("segmentation",)
    requires = frozenset({"labels", "global_start"})
    provides = frozenset({"extra_passes", "unlabelled_images"})

    def __init__(
        self,
        weight: NotNegative = 1.0,
        threshold: Annotated[float, Interval(gt=0, le=1)] = 0.9,
        decay: Share = 0.99,
    ) -> None:
        self.weight, self.threshold, self.decay = weight, threshold, decay

    def at_site(self, context: SiteContext) -> SitePart:
        return TeacherSite(self, context)

    def weight_of(self, round_: int, rounds: int) -> float:
        """The weight of the term in a round, from 1."""
        return self.weight * math.exp(-5 * (1 - min(round_, rounds) / rounds) ** 2)


class TeacherSite(TaughtSite):
    """The site's half."""

    def __init__(self, method: Teacher, context: SiteContext) -> None:
        super().__init__(context)
        self.method = method

    def start_round(self) -> None:
        """Begin as the model that the site received; running statistics are the network's."""
        super().start_round()
        trained = trained_entries(self.context.network)
        self.teacher = {key: value for key, value in self.teacher.items() if key in trained}

    def loss(self, step: Step) -> Tensor | None:
        """The weighted cross-entropy of the batch."""
        if not self.partial:
            return None
        possible = F.possible_classes(*self.decoded(step.targets))
        term = F.confident_entropy(
            F.working_precision(step.outputs), self.taught(step.inputs), possible, self.method.threshold
        )
        self._means.add(term)
        return self.method.weight_of(self.context.round(), self.context.rounds) * term

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        """Follow the trained weights."""
        if self.partial:
            trained = trained_entries(self.context.network)
            for key, value in self.teacher.items():
                value.lerp_(trained[key], 1 - self.method.decay)
