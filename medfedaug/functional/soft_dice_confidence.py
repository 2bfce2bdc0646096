"""Soft Dice confidence: a score that sorts segmentations, and no estimate of their Dice."""

import torch
from torch import Tensor


def soft_dice_confidence(logits: Tensor, label: Tensor) -> Tensor:
    """Return 2 Σᵢ pᵢ ŷᵢ / Σᵢ (pᵢ + ŷᵢ) for each class but the background.

    Source: Borges, Pacheco and Silva, "Soft Dice Confidence", arXiv:2402.10665. With calibrated probabilities
    it is near the expected Dice; a network's are not calibrated, so only the order of cases has a meaning.

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
    scores = []
    for number in range(1, len(logits)):  # one class at a time: a volume of many classes is large
        share, inside = (logits[number].float() - total).exp(), label == number
        mass, size = share.sum(dtype=torch.float64), inside.sum()
        hit = share[inside].sum(dtype=torch.float64)
        scores.append(2 * hit / (mass + size) if size else torch.full_like(mass, torch.nan))
    return torch.stack(scores)
