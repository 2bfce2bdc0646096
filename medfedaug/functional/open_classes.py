"""Learning from another model about the classes that a case has not annotated."""

from __future__ import annotations

import torch
from torch import Tensor


def _over_space(annotated: Tensor, dims: int) -> Tensor:
    return annotated.reshape(*annotated.shape, *[1] * (dims - 2))


def possible_classes(labels: Tensor, known: Tensor, annotated: Tensor) -> Tensor:
    r"""Classes that each voxel may be of, as far as its case says.

    An annotated structure is itself; background is that or a class that the case has not annotated; an
    unknown voxel may be of any class.

    Args:
        labels: (B, 1, \*spatial), 0 where unknown.
        known: boolean, the same.
        annotated: boolean, (B, K), the background among them.

    Returns:
        Boolean, (B, K, \*spatial).
    """
    classes = torch.arange(annotated.shape[1], device=labels.device)
    itself = labels == classes.reshape(1, -1, *[1] * (labels.ndim - 2))
    return itself | (~_over_space(annotated, labels.ndim) & (labels == 0)) | ~known


def conditional_distillation(
    student: Tensor, teacher: Tensor, labels: Tensor, annotated: Tensor, temperature: float = 2.0
) -> Tensor:
    r"""Soft Dice loss between two models about the classes that a case has not annotated.

    With F the structures that a case has annotated and G all other classes, background included, both models
    have the probabilities of G on the condition that a voxel is not of F,

    .. math:: \tilde p_g = \frac{p_g}{1 - \sum_{n \in F} p_n} \; (g \in G), \qquad
              p = \mathrm{softmax}(z / \tau)

    and the loss is the mean of :math:`1 - 2 \sum_v \tilde s_g \tilde t_g / \sum_v (\tilde s_g + \tilde t_g)`
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
    # The background is no structure.
    others = lacking.clone()
    others[:, 0] = True
    kept = _over_space(others, student.ndim)
    structures = _over_space(~others, student.ndim)
    seen_as = teacher.argmax(dim=1, keepdim=True)
    counted = (labels == 0) & ~structures.expand_as(teacher).gather(1, seen_as)
    counted = counted & _over_space(takes_part, student.ndim)
    s, t = (
        (z / temperature).masked_fill(~kept, -torch.inf).softmax(dim=1) * counted for z in (student, teacher)
    )
    over = (0, *range(2, student.ndim))
    losses = 1 - 2 * (s * t).sum(over) / ((s + t).sum(over) + 1e-5)
    some = (others & takes_part).any(dim=0)
    return (losses * some).sum() / some.sum().clamp_min(1)


def confident_entropy(student: Tensor, teacher: Tensor, possible: Tensor, threshold: float) -> Tensor:
    r"""Cross-entropy of a model with the classes that a teacher is sure of, where labels leave them open.

    Both have the probabilities of the possible classes of a voxel alone. A voxel with one possible class, or
    in which no class of the teacher's reaches the threshold, counts 0 in the mean over the open voxels.

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
