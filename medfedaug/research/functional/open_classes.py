"""Losses by which a model learns from another one about classes that a case has not annotated."""

import torch
from torch import Tensor

from medfedaug.functional.passes import per_channel


def possible_classes(labels: Tensor, known: Tensor, annotated: Tensor) -> Tensor:
    r"""Return the classes that each voxel may have, given the annotations of its case.

    A voxel of an annotated structure has that class. Background may be any class that the case has not
    annotated, and an unknown voxel any class.

    Args:
        labels: (B, 1, \*spatial), 0 where unknown.
        known: boolean, of the same shape.
        annotated: boolean, (B, K), the background among them.

    Returns:
        Boolean, (B, K, \*spatial).
    """
    classes = torch.arange(annotated.shape[1], device=labels.device)
    itself = labels == per_channel(classes[None], labels.ndim)
    return itself | (~per_channel(annotated, labels.ndim) & (labels == 0)) | ~known


def conditional_distillation(
    student: Tensor, teacher: Tensor, labels: Tensor, annotated: Tensor, temperature: float = 2.0
) -> Tensor:
    r"""Soft Dice loss between two models about the classes that a case has not annotated.

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


def confident_entropy(student: Tensor, teacher: Tensor, possible: Tensor, threshold: float) -> Tensor:
    r"""Cross-entropy of a model with a teacher's confident classes, over voxels that labels leave open.

    The probabilities of both are over the possible classes of a voxel. An open voxel has several of them; one
    in which no class of the teacher's reaches the threshold counts 0 in the mean over the open voxels.

    Args:
        student: logits, (B, K, \*spatial).
        teacher: the same.
        possible: of `possible_classes`.
        threshold: of the teacher's probability.
    """
    open_ = possible.sum(dim=1) > 1
    shares, classes = teacher.masked_fill(~possible, -torch.inf).softmax(dim=1).max(dim=1)
    logs = student.masked_fill(~possible, -1e4).log_softmax(dim=1).gather(1, classes[:, None])[:, 0]
    sure = open_ & (shares >= threshold)
    return -(logs * sure).sum() / open_.sum().clamp_min(1)
