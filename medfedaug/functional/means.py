"""Means of the sites' values: streaming and independent of their order, or robust to hostile sites."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

__all__ = ["WeightedMean", "blocks", "capped_weights"]

_BLOCK = 2**16


class WeightedMean:
    """w = Σₖ nₖ wₖ / Σₖ nₖ, one site in memory at a time.

    The sum and its rounding error (Knuth's two-sum) are float64, so that the result, rounded to float32, does
    not depend on the order of the sites. Memory is twice a float64 model, for any number of sites.

    Example:
        >>> mean = WeightedMean()
        >>> mean.add({"w": torch.tensor([0.0])}, 1.0)
        >>> mean.add({"w": torch.tensor([4.0])}, 3.0)
        >>> mean.result()
        {'w': tensor([3.])}
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._sum: dict[str, Tensor] = {}
        self._error: dict[str, Tensor] = {}

    def add(self, tensors: Mapping[str, Tensor], weight: float) -> None:
        """Add one site's tensors, with a weight above 0."""
        self.total += weight
        for key, tensor in tensors.items():
            flat = tensor.reshape(-1)
            if key not in self._sum:
                self._sum[key] = flat.to(torch.float64, copy=True).mul_(weight).view(tensor.shape)
                self._error[key] = torch.zeros_like(self._sum[key])
                continue
            for numbers, previous, error in blocks(flat, self._sum[key].view(-1), self._error[key].view(-1)):
                term = numbers.to(torch.float64, copy=True).mul_(weight)
                total = previous + term
                virtual = total - previous
                term -= virtual
                previous -= torch.sub(total, virtual, out=virtual)
                error += previous.add_(term)  # (previous - (total - virtual)) + (term - virtual)
                previous.copy_(total)

    def result(self) -> dict[str, Tensor]:
        """The mean in float32."""
        return {
            key: (value + self._error[key]).div_(self.total).to(torch.float32)
            for key, value in self._sum.items()
        }


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of equally long tensors, on a CPU so short that intermediates stay in its cache."""
    length = len(tensors[0]) if tensors[0].is_cuda else _BLOCK
    return zip(*(tensor.split(max(1, length)) for tensor in tensors), strict=True)


def capped_weights(weights: Mapping[str, float], largest: float | None) -> dict[str, float]:
    """Limit each weight to a share of the sum of weights.

    Lower the larger ones to one common level and keep the others. Where even equal weights have larger
    shares, make all equal.

    Args:
        weights: by site, above 0.
        largest: the largest share, above 0; ``None`` for no limit.

    Example:
        >>> capped_weights({"A": 10.0, "B": 20.0, "C": 2.0**31}, 0.5)
        {'A': 10.0, 'B': 20.0, 'C': 30.0}
        >>> capped_weights({"A": 10.0, "B": 20.0, "C": 2.0**31}, 0.1)
        {'A': 10.0, 'B': 10.0, 'C': 10.0}
    """
    ordered = sorted(weights.values(), reverse=True)
    if largest is None or not ordered:
        return dict(weights)
    level = ordered[-1]
    for count, weight in enumerate(ordered):
        # `above` sites at the level λ: λ = s (above λ + rest).
        if largest * count >= 1:
            break
        limit = largest * sum(ordered[count:]) / (1 - largest * count)
        if weight <= limit:
            level = limit if count else ordered[0]
            break
    return {site: min(weight, level) for site, weight in weights.items()}


def coordinate_median(values: Tensor) -> Tensor:
    """The median over the sites, coordinate by coordinate (Yin et al., ICML 2018, Definition 1).

    Of an even number of sites it is the mean of the two in the middle.

    Args:
        values: (M, ...), M at least 1.

    Returns:
        (...).

    Example:
        >>> import torch
        >>> coordinate_median(torch.tensor([[1.0, 5.0], [2.0, -9.0], [1e9, 4.0]]))
        tensor([2., 4.])
    """
    return trimmed_mean(values, (len(values) - 1) // 2)


def trimmed_mean(values: Tensor, cut: int) -> Tensor:
    """The mean over the sites, coordinate by coordinate, without the largest and smallest values.

    Yin et al., ICML 2018, Definition 2, with β = cut/M.

    Args:
        values: (M, ...), M above 2·cut.
        cut: number of values left out at each end.

    Returns:
        (...).

    Example:
        >>> import torch
        >>> trimmed_mean(torch.tensor([0.0, 1.0, 2.0, 3.0, 1e9]), 1)
        tensor(2.)
    """
    if not cut:
        return values.mean(dim=0)
    return values.sort(dim=0).values[cut : len(values) - cut].mean(dim=0)
