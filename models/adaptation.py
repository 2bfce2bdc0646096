"""Batch norm whose statistics lie between an image's own and the federation's (FedFD, FedFD-A).

`adapt_batch_norm` lets the batch norms of a network interpolate. Modules, names and state dict stay the same,
and so do all results until interpolation is switched on: by `interpolating` for a block of code, by
`AdaptiveBatchNorm.inference` for every pass in evaluation mode. `insert_instance_adapters` adds FedFD-A's
small networks, which choose for each image how far to interpolate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from medfedaug.errors import WITH_BATCH_NORM
from medfedaug.functional import mix_statistics, working_precision
from medfedaug.functional.features import normalising, scale_by_moments
from medfedaug.models.entries import evaluating

Network = TypeVar("Network", bound=nn.Module)
Statistics = tuple[Tensor, Tensor]

Interpolation = Callable[["AdaptiveBatchNorm", Statistics, Statistics], Statistics]
"""Returns mean and standard deviation for a layer's normalisation, given the layer, those of each image,
(B, C) each, and those of the federation, (C,) each."""


class AdaptiveBatchNorm(nn.modules.batchnorm._BatchNorm):
    """A batch norm that can also normalise each image with interpolated statistics (FedFD-A Eq. 6).

    `adapt_batch_norm` makes it from a batch norm, with the same parameters, buffers and names.

    Attributes:
        inference: interpolation in evaluation mode; ``None`` for plain batch norm.
        override: interpolation in both modes, see `interpolating`; ``None`` for the mode's.
        global_mean: the federation's mean, (C,); ``None``, the default, for the running mean.
        global_var: the federation's variance, likewise.
    """

    inference: Interpolation | None
    override: Interpolation | None
    global_mean: Tensor | None
    global_var: Tensor | None
    adapter: InstanceAdapter  #: only where one was inserted

    def set_global_statistics(self, mean: Tensor, var: Tensor) -> None:
        """Set the federation's mean and variance, (C,) each."""
        assert self.running_mean is not None
        self.global_mean, self.global_var = mean.to(self.running_mean), var.to(self.running_mean)

    def _global(self) -> tuple[Tensor, Tensor]:
        mean = self.running_mean if self.global_mean is None else self.global_mean
        var = self.running_var if self.global_var is None else self.global_var
        assert mean is not None
        assert var is not None
        return mean, var

    def forward(self, x: Tensor) -> Tensor:
        """Normalise features (B, C) or (B, C, *spatial)."""
        how = self.override if self.override is not None or self.training else self.inference
        if how is None:
            return super().forward(x)
        return self.interpolated(x, how)

    def interpolated(self, x: Tensor, how: Interpolation) -> Tensor:
        """Normalise with interpolated statistics, without a change of the running statistics."""
        if x.dim() == 2:
            # A feature without spatial dimensions has no instance statistics: training interpolates those of
            # the batch, and inference uses the federation's alone.
            if not isinstance(how, RandomMix):
                return nn.functional.batch_norm(x, *self._global(), self.weight, self.bias, eps=self.eps)
            return self.interpolated(x.t()[None], how)[0].t()

        def move(mean: Tensor, var: Tensor) -> Statistics:
            local = mean, (var + self.eps).sqrt()
            global_mean, global_var = map(working_precision, self._global())
            federation = global_mean, (global_var + self.eps).sqrt()
            return normalising(*how(self, local, federation), self.weight, self.bias)

        return scale_by_moments(x, move)


class AdaptiveBatchNorm1d(AdaptiveBatchNorm, nn.BatchNorm1d):
    """`AdaptiveBatchNorm` of (B, C) or (B, C, L)."""


class AdaptiveBatchNorm2d(AdaptiveBatchNorm, nn.BatchNorm2d):
    """`AdaptiveBatchNorm` of (B, C, H, W)."""


class AdaptiveBatchNorm3d(AdaptiveBatchNorm, nn.BatchNorm3d):
    """`AdaptiveBatchNorm` of (B, C, H, W, D)."""


_ADAPTIVE: dict[type[nn.Module], type[AdaptiveBatchNorm]] = {
    nn.BatchNorm1d: AdaptiveBatchNorm1d,
    nn.BatchNorm2d: AdaptiveBatchNorm2d,
    nn.BatchNorm3d: AdaptiveBatchNorm3d,
}


class RandomMix:
    """Draw u ~ U(0, 1) per channel and call, the same for all images (FedFD Eq. 2), for training."""

    def __call__(self, norm: AdaptiveBatchNorm, local: Statistics, federation: Statistics) -> Statistics:
        """Eq. 2, with the same u for the mean and the standard deviation."""
        u = torch.empty_like(federation[0]).uniform_()
        mean, std = (mix_statistics(*pair, u) for pair in zip(local, federation, strict=True))
        return mean, std


@dataclass
class LearnedAlpha:
    """FedFD-A: α of each image from the layer's `InstanceAdapter` (Eq. 7).

    Args:
        noise: draw one z ~ N(0, 1) per image, as in the adapter's training; otherwise z = 0, as at test time.
    """

    noise: bool = False

    def __call__(self, norm: AdaptiveBatchNorm, local: Statistics, federation: Statistics) -> Statistics:
        """Eq. 6 with the adapter's α; a layer without an adapter uses the federation's statistics."""
        alpha = local[0].new_zeros(len(local[0]), 1)
        if hasattr(norm, "adapter"):
            z = torch.empty_like(alpha).normal_() if self.noise else None
            alpha = norm.adapter(local[0] - federation[0], local[1] - federation[1], z)
        mean, std = (torch.lerp(federal, own, alpha) for own, federal in zip(local, federation, strict=True))
        return mean, std


class UnsavedModule(nn.Module):
    """A module whose parameters are not part of the network's state dict.

    The network's checkpoint is the same with and without it; a method exchanges these parameters by itself.
    """

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        pass


class InstanceAdapter(UnsavedModule):
    """Network that computes α of an image from the difference between its and the federation's statistics.

    ::

        α = clamp(z δ + ε, 0, 1),   [δ; ε] = G([μᵢ − μ_G; σᵢ − σ_G])

    FedFD-A Eq. 7: one α per image and layer. G is Linear(2C → C/16), ReLU, Linear(→ 2).

    The parameters' `requires_grad` is off outside `training_adapters`, so that the network's optimiser does
    not train them.

    The size of the hidden layer reproduces the paper's 11.31 M → 11.53 M parameters of a ResNet-18.

    Deviations:
        The paper has no initial values. The last layer starts with weights 0 and biases δ = 0, ε = 0.1: close
        to the plain network, and inside [0, 1], outside of which α has no gradient.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(1, channels // 16)
        first = nn.Linear(2 * channels, hidden)
        self.hidden_weight, self.hidden_bias = first.weight, first.bias
        self.out_weight = nn.Parameter(torch.zeros(2, hidden))
        self.out_bias = nn.Parameter(torch.tensor([0.0, 0.1]))
        self.requires_grad_(False)

    def forward(self, mean_difference: Tensor, std_difference: Tensor, z: Tensor | None = None) -> Tensor:
        """Return α, (B, 1), given two differences (B, C) and z (B, 1); without z, z = 0, its mean."""
        differences = torch.cat([mean_difference, std_difference], dim=1)
        # A network in half precision has rounded weights, and statistics in float32.
        kind = differences.dtype
        hidden = nn.functional.linear(
            differences, self.hidden_weight.to(kind), self.hidden_bias.to(kind)
        ).relu()
        out = nn.functional.linear(hidden, self.out_weight.to(kind), self.out_bias.to(kind)).to(kind)
        delta, epsilon = out.split(1, dim=1)
        alpha: Tensor = (epsilon if z is None else z * delta + epsilon).clamp(0.0, 1.0)
        return alpha


def adapt_batch_norm(net: Network) -> Network:
    """Make every batch norm with running statistics an `AdaptiveBatchNorm`.

    The modules stay the same objects, with their hooks, names and entries; only their class changes, as with
    PyTorch's parametrisations. The network, changed in place and returned, has the same results in training
    and evaluation. A ValueError is raised when there is no batch norm with running statistics.
    """
    for module in net.modules():
        adaptive = _ADAPTIVE.get(type(module))
        if adaptive is not None and getattr(module, "running_mean", None) is not None:
            module.__class__ = adaptive
            assert isinstance(module, AdaptiveBatchNorm)
            module.inference = module.override = None
            module.register_buffer("global_mean", None, persistent=False)
            module.register_buffer("global_var", None, persistent=False)
    if not adaptive_norms(net):
        kind = type(net).__name__
        raise ValueError(f"{kind} has no batch norm with running statistics; {WITH_BATCH_NORM}")
    return net


def insert_instance_adapters(net: Network) -> Network:
    """FedFD-A: an `InstanceAdapter` before each batch norm, used in evaluation mode.

    Evaluation takes one forward pass, whose result for an image does not depend on the batch. In training
    mode nothing changes; `training_adapters` is the context to train adapters. The network's state dict does
    not hold them (`instance_adapters` returns them by name).

    The network, 2D or 3D, is changed in place and returned; one without batch norms that have running
    statistics is refused.

    Deviations:
        Batch norms of fully connected layers get no adapter, since a feature without spatial dimensions has
        no instance statistics.

    Example:
        >>> from monai.networks.nets import resnet18
        >>> net = resnet18(spatial_dims=2, n_input_channels=3, num_classes=7)
        >>> before = sum(p.numel() for p in net.parameters())
        >>> sum(p.numel() for p in insert_instance_adapters(net).parameters()) - before
        218540
    """
    for norm in adaptive_norms(adapt_batch_norm(net)).values():
        norm.inference = LearnedAlpha()
        if not isinstance(norm, nn.BatchNorm1d):
            norm.add_module("adapter", InstanceAdapter(norm.num_features).to(norm.weight.device))
    return net


def adaptive_norms(net: nn.Module) -> dict[str, AdaptiveBatchNorm]:
    """Return the adaptive batch norms by dotted name, in the order of the network's modules."""
    return {name: module for name, module in net.named_modules() if isinstance(module, AdaptiveBatchNorm)}


def instance_adapters(net: nn.Module) -> dict[str, InstanceAdapter]:
    """Return the adapters by the dotted name of their batch norm, in the order of the network's modules."""
    return {name: norm.adapter for name, norm in adaptive_norms(net).items() if hasattr(norm, "adapter")}


@contextmanager
def interpolating(net: nn.Module, how: Interpolation) -> Iterator[None]:
    """A context in which all adaptive batch norms interpolate, in training mode too.

    Running statistics do not change in it.
    """
    norms = adaptive_norms(net).values()
    before = [norm.override for norm in norms]
    try:
        for norm in norms:
            norm.override = how
        yield
    finally:
        for norm, override in zip(norms, before, strict=True):
            norm.override = override


@contextmanager
def training_adapters(net: nn.Module) -> Iterator[list[nn.Parameter]]:
    """A context for the forward pass that trains the adapters; its value is the list of their parameters.

    The network is in evaluation mode, as at test time: running statistics do not change and random layers are
    off. z is drawn (Eq. 7). Compute the gradients of these parameters with `torch.autograd.grad`, which skips
    the gradients of the network.
    """
    parameters = [p for adapter in instance_adapters(net).values() for p in adapter.parameters()]
    trained = [p for p in net.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        with evaluating(net), interpolating(net, LearnedAlpha(noise=True)):
            yield parameters
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
