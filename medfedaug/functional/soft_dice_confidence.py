"""Soft Dice confidence: the Dice that a segmentation expects of itself; agreement of several label maps."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["label_agreement", "soft_dice_confidence"]


def soft_dice_confidence(logits: Tensor, label: Tensor) -> Tensor:
    """Return 2 Σᵢ pᵢ ŷᵢ / Σᵢ (pᵢ + ŷᵢ) for each class but the background.

    Source: Borges, Pacheco and Silva, "Soft Dice Confidence", arXiv:2402.10665.

    Args:
        logits: (K, *spatial), of the probabilities, background first; logarithms of probabilities are some.
        label: (*spatial), integer: the predicted label map.

    Returns:
        (K - 1,), float64, from 0 to 1; NaN for a class that is nowhere in the label map.

    Deviations:
        The paper has 0 where nothing is predicted; here it is NaN, since most classes may be absent.

    Example:
        >>> shares = torch.tensor([[0.75, 0.25], [0.25, 0.75]])
        >>> round(soft_dice_confidence(shares.log(), torch.tensor([0, 1])).item(), 6)
        0.75
    """
    total = logits.float().logsumexp(dim=0)
    found = []
    for number in range(1, len(logits)):  # one class at a time: a volume of many classes is large
        share, inside = (logits[number].float() - total).exp(), label == number
        mass, size = share.sum(dtype=torch.float64), inside.sum()
        hit = share[inside].sum(dtype=torch.float64)
        found.append(2 * hit / (mass + size) if size else torch.full_like(mass, torch.nan))
    return torch.stack(found)


def label_agreement(labels: Tensor, classes: int) -> Tensor:
    """Return the mean Dice of all pairs of label maps, for each class but the background.

    Args:
        labels: (M, *spatial), integer: M label maps of one image.
        classes: number K of classes, background among them.

    Returns:
        (K - 1,), float64, from 0 to 1; NaN for a class that is in none of them.

    Example:
        >>> label_agreement(torch.tensor([[0, 1, 1], [1, 1, 0]]), 2).item()
        0.5
    """
    pairs = torch.combinations(torch.arange(len(labels)))
    found = []
    for number in range(1, classes):
        masks = (labels == number).flatten(1)
        both = torch.stack([(masks[a] & masks[b]).sum() for a, b in pairs.tolist()])
        total = masks.sum(dim=1).double()[pairs].sum(dim=1)
        found.append((2 * both[total > 0] / total[total > 0]).mean())
    return torch.stack(found)
