"""`PassAgreement`: agreement of several predictions of one case, by class and by voxel."""

import torch
from torch import Tensor

from medfedaug.tasks import Prediction

_BYTE = 2**8


class PassAgreement:
    """Collects the passes of a case, by the models of an ensemble and of flipped images.

    There are K classes, with the background. `deviation` needs ``mapped``, and passes with probabilities.
    """

    def __init__(self, classes: int, *, mapped: bool = False) -> None:
        self.classes, self.mapped = classes, mapped
        self._labels: list[Tensor] = []
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None

    @property
    def count(self) -> int:
        """Number M of passes."""
        return len(self._labels)

    def add(self, prediction: Prediction) -> None:
        """Add a pass; only sums of its probabilities are kept (Welford's recurrence)."""
        small = torch.uint8 if self.classes <= _BYTE else torch.int16
        self._labels.append(prediction.label.to(small))
        if not self.mapped:
            return
        shares = prediction.probabilities
        assert shares is not None
        if self._mean is None or self._squares is None:
            self._mean, self._squares = shares.clone(), torch.zeros_like(shares)
            return
        difference = shares - self._mean
        self._mean += difference / self.count
        self._squares += difference * (shares - self._mean)

    def agreement(self) -> Tensor:
        """Return `specific_agreement` of the label maps, (K - 1,)."""
        return specific_agreement(torch.stack(self._labels), self.classes)

    def voxels(self) -> Tensor:
        """Return the lowest and the highest number of voxels of each class but the background, (2, K - 1)."""
        counts = [torch.bincount(labels.flatten().int(), minlength=self.classes) for labels in self._labels]
        return torch.stack(torch.stack(counts)[:, 1:].aminmax(dim=0))

    def deviation(self) -> Tensor:
        """Return the uncertainty map, (*spatial), float32: max over classes of √(Σₘ (pₘ - p̄)² / M).

        The standard deviation of a probability over the M passes is 0 where all agree, and 0.5 where half of
        them are sure of a class and the others of its absence. With two classes, both have the same.
        """
        assert self._squares is not None
        return (self._squares / self.count).clamp(min=0).sqrt().amax(dim=0)


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
