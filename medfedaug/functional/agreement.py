"""Agreement of several label maps of one image."""

from __future__ import annotations

import torch
from torch import Tensor


def specific_agreement(labels: Tensor, classes: int) -> Tensor:
    """Return Σᵢ nᵢ (nᵢ - 1) / ((M - 1) Σᵢ nᵢ) for each class but the background.

    nᵢ of M label maps have the class in voxel i. For two label maps it is their Dice; for more it is the Dice
    of all pairs, with numerators and denominators summed.

    Source: the proportion of specific agreement, Fleiss, Levin and Paik, "Statistical Methods for Rates and
    Proportions", 3rd edition, chapter 18.

    Args:
        labels: (M, *spatial), integer, M of 2 or more.
        classes: number K of classes, background among them.

    Returns:
        (K - 1,), float64, from 0 to 1; NaN for a class that no label map has.

    Example:
        >>> specific_agreement(torch.tensor([[0, 1, 1], [1, 1, 0]]), 2).item()
        0.5
    """
    agreements = []
    for number in range(1, classes):  # one class at a time: a volume of many classes is large
        votes = (labels == number).sum(dim=0)
        pairs, total = (votes * (votes - 1)).sum().double(), votes.sum().double()
        agreements.append(pairs / ((len(labels) - 1) * total))
    return torch.stack(agreements)
