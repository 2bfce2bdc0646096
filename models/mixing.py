"""Layers that mix the features of the images of a batch: MixStyle, MOEX and Manifold MixUp."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from medfedaug.functional import feature_statistics, working_precision
from medfedaug.functional.passes import per_channel
from medfedaug.models.stage_layer import StageLayer


class MixStyleLayer(StageLayer):
    """Mix the channel statistics of two images of the batch (Zhou et al., ICLR 2021).

    ::

        x̂ = γ (x − μ(x))/σ(x) + β,   γ = λ σ(x) + (1 − λ) σ(x̃),
        β = λ μ(x) + (1 − λ) μ(x̃)

    with ``λ ~ Beta(α, α)`` for each image, and the partner
    x̃ from a permutation of the batch. No gradient flows through the statistics. In training
    the layer is active with probability `prob`, drawn once per call from torch's generator; in evaluation it
    returns its argument.

    Args:
        num_channels: number of channels C.
        prob: probability that the layer is active in a call.
        alpha: α; with 0, λ = 1, which changes nothing.
        eps: added to the spatial variance before its root.

    Raises:
        ValueError: when an argument is out of its range.

    Deviations:
        Population variance; the paper's public code has the unbiased one.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.rand(4, 2, 8, 8)
        >>> layer = MixStyleLayer(2, prob=1.0)
        >>> layer(x).shape, layer.eval()(x) is x
        (torch.Size([4, 2, 8, 8]), True)
    """

    kind = "MixStyle"
    slug = "mixstyle"

    def __init__(self, num_channels: int, prob: float = 0.5, alpha: float = 0.1, eps: float = 1e-6) -> None:
        super().__init__(num_channels)
        if not 0.0 <= prob <= 1.0:
            raise ValueError(f"prob is {prob}, expected a probability")
        if not alpha >= 0.0:
            raise ValueError(f"alpha is {alpha}, expected a number that is not negative")
        self.prob, self.alpha, self.eps = float(prob), float(alpha), float(eps)

    def forward(self, x: Tensor) -> Tensor:
        """Mix styles in training.

        Args:
            x: features, (B, C, *spatial).

        Returns:
            Features of the same shape and dtype.
        """
        if not self.training or self.alpha == 0 or float(torch.rand(())) >= self.prob:
            return x
        work = working_precision(x)
        # Drawn on the CPU, without waiting for a GPU.
        share = torch.distributions.Beta(self.alpha, self.alpha).sample((len(x), 1))
        share = share.to(work, non_blocking=True)
        order = torch.randperm(len(x)).to(x.device, non_blocking=True)
        mean, std = (value.detach() for value in feature_statistics(work, self.eps))
        scale = torch.lerp(std[order], std, share) / std
        shift = torch.lerp(mean[order], mean, share) - mean * scale
        return (work * per_channel(scale, x.dim()) + per_channel(shift, x.dim())).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, prob={self.prob}, alpha={self.alpha}, eps={self.eps}"


class _PartnerLayer(StageLayer, ABC):
    """Layer whose partners in the batch are set by the method, which also mixes the labels."""

    def __init__(self, num_channels: int) -> None:
        super().__init__(num_channels)
        self.partners: Tensor | None = None
        """The position of each image's partner in the batch, (B,); None while the layer is not active."""

    def forward(self, x: Tensor) -> Tensor:
        """Mix features in training, if partners are set."""
        if not self.training or self.partners is None:
            return x
        if len(self.partners) != len(x):
            raise ValueError(
                f"{self.kind} layer {self.stage}: {len(self.partners)} partners for {len(x)} images"
            )
        return self.combine(x, x[self.partners.to(x.device, non_blocking=True)])

    @abstractmethod
    def combine(self, x: Tensor, partner: Tensor) -> Tensor:
        """Return the mixed features of an image and its partner."""


class MomentExchangeLayer(_PartnerLayer):
    """Give the features of an image the moments of another image (Li et al., CVPR 2021, Eq. 1-2).

    ::

        x̂_A = σ_B (x_A − μ_A)/σ_A + μ_B

    with moments over the channels, at every position.

    Args:
        num_channels: number of channels C.
        eps: added to the variance before its root.

    Deviations:
        Population variance, as in the paper's equations; its public code has the unbiased one.

    Example:
        >>> layer = MomentExchangeLayer(2)
        >>> x = torch.tensor([[[1.0], [3.0]], [[2.0], [8.0]]])  # two images, two channels, one position
        >>> layer.partners = torch.tensor([1, 0])
        >>> layer(x).squeeze(-1).round(decimals=2)
        tensor([[2., 8.],
                [1., 3.]])
    """

    kind = "MOEX"
    slug = "moex"

    def __init__(self, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__(num_channels)
        self.eps = float(eps)

    def combine(self, x: Tensor, partner: Tensor) -> Tensor:
        """Return x with the moments of its partner."""
        work = working_precision(x)
        mean, std = self._moments(work)
        other_mean, other_std = self._moments(working_precision(partner))
        return ((work - mean) / std * other_std + other_mean).to(x.dtype)

    def _moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x, dim=1, correction=0, keepdim=True)
        return mean, (variance + self.eps).sqrt()

    def extra_repr(self) -> str:
        return f"{self.num_channels}, eps={self.eps}"


class FeatureMixLayer(_PartnerLayer):
    """The weighted mean of the features of two images, ``λ x_A + (1 − λ) x_B``.

    Manifold MixUp (Verma et al., ICML 2019).

    Args:
        num_channels: number of channels C.

    Attributes:
        weight: λ, set together with the partners.
    """

    kind = "Manifold MixUp"
    slug = "manifold_mixup"

    def __init__(self, num_channels: int) -> None:
        super().__init__(num_channels)
        self.weight = 1.0

    def combine(self, x: Tensor, partner: Tensor) -> Tensor:
        """Return the weighted mean of both."""
        return torch.lerp(partner, x, self.weight)
