"""Mean teacher: a site learns missing labels from the average of its recent models."""

import math
from typing import Annotated

import torch
from annotated_types import Interval
from torch import Tensor

from medfedaug import functional as F
from medfedaug.functional.features import per_channel
from medfedaug.methods.arguments import NotNegative, Share
from medfedaug.methods.base import Method, SiteContext, SitePart, Step
from medfedaug.methods.condist import TeacherGuidedSite
from medfedaug.models.entries import trained_entries


class Teacher(Method):
    """Mean teacher (Tarvainen and Valpola, NeurIPS 2017) with a confidence threshold.

    The teacher starts a round as the global model and follows the weights in training,
    ``θ′ ← α θ′ + (1 − α) θ``, after every step. The loss gains ::

        λ e^(−5(1−r/R)²) ℓ

    in round r of R, with the cross-entropy ℓ of the classes with a probability of the teacher at or above the
    threshold, at voxels whose class the labels leave open
    (`confident_entropy`): all voxels of an image without outlines, unknown voxels, and the background of a
    case with classes that are not annotated. The method does nothing at a site that has annotated everything.

    Only the model leaves a site. A step needs one more pass without gradients.

    Args:
        weight: λ.
        threshold: the least probability to learn a class, above 0 and up to 1.
        decay: α, from 0 to 1.

    Deviations:
        The paper penalises the squared difference of predictions and gives teacher and student separate
        noise; here confident classes are labels, as in later work, and both get the same image, the student
        in training mode and the teacher in evaluation mode. The paper's teacher continues from step to step;
        here it starts anew in each round, since the site receives another model, and uses the running
        statistics of the student. No text of a federated variant was available.
    """

    name = "teacher"
    tasks = ("segmentation",)
    requires = frozenset({"labels"})
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
        """Return the weight of the term in a round, from 1."""
        return self.weight * math.exp(-5 * (1 - min(round_, rounds) / rounds) ** 2)


class TeacherSite(TeacherGuidedSite):
    method: Teacher

    def start_round(self) -> None:
        """Start as the received model, with the network's running statistics."""
        super().start_round()
        trained = trained_entries(self.context.network)
        self.teacher = {key: value for key, value in self.teacher.items() if key in trained}

    def loss(self, step: Step) -> Tensor | None:
        """Return the weighted cross-entropy of the batch."""
        if not self.partial:
            return None
        possible = possible_classes(*self.decoded(step.targets))
        outputs, teacher = F.working_precision(step.outputs), self.teacher_logits(step.inputs)
        term = confident_entropy(outputs, teacher, possible, self.method.threshold)
        self.measure(term)
        return self.method.weight_of(self.context.round(), self.context.rounds) * term

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        if self.partial:
            trained = trained_entries(self.context.network)
            for key, value in self.teacher.items():
                value.lerp_(trained[key], 1 - self.method.decay)


def possible_classes(labels: Tensor, known: Tensor, annotated: Tensor) -> Tensor:
    r"""Return the classes that each voxel may have, given the annotations of its case.

    A voxel of an annotated structure has that class. Background may be any class that the case has not
    annotated, and an unknown voxel any class.

    Label maps are (B, 1, \*spatial), 0 where unknown; annotated classes, with the background, are (B, K). The
    result is boolean, (B, K, \*spatial).
    """
    classes = torch.arange(annotated.shape[1], device=labels.device)
    itself = labels == per_channel(classes[None], labels.ndim)
    return itself | (~per_channel(annotated, labels.ndim) & (labels == 0)) | ~known


def confident_entropy(student: Tensor, teacher: Tensor, possible: Tensor, threshold: float) -> Tensor:
    r"""Cross-entropy of a model with a teacher's confident classes, over voxels that labels leave open.

    The probabilities of both are over the possible classes of a voxel. An open voxel has several of them; one
    in which no class of the teacher's reaches the threshold counts 0 in the mean over the open voxels.

    Logits of both are (B, K, \*spatial); the threshold is of the teacher's probability.
    """
    open_ = possible.sum(dim=1) > 1
    shares, classes = teacher.masked_fill(~possible, -torch.inf).softmax(dim=1).max(dim=1)
    logs = student.masked_fill(~possible, -1e4).log_softmax(dim=1).gather(1, classes[:, None])[:, 0]
    sure = open_ & (shares >= threshold)
    return -(logs * sure).sum() / open_.sum().clamp_min(1)
