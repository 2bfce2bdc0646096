"""FedWon: no normalisation layers, and convolutions with standardised weights."""

from __future__ import annotations

import torch
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import NotNegative, Positive
from medfedaug.methods.base import Method, SiteContext, SitePart, Step
from medfedaug.models import find_head
from medfedaug.models.weight_standardisation import (
    RELU_GAIN,
    by_output_channel,
    clip_by_weights,
    remove_norms,
    standardise_weights,
)


class FedWon(Method):
    r"""Federated learning without normalisations (Zhuang and Lyu, FedWon, ICLR 2024).

    Sites with other scanners have other statistics in their normalisation layers, so the network has no such
    layers: batch, instance and group norms give what they are given. In their place each convolution uses
    standardised weights,

    .. math:: \hat W_i = \gamma\, \frac{W_i - \mu_i}{\sigma_i \sqrt N},

    with mean and deviation of the N weights that lead to output channel i. The rest is FedAvg. A batch may
    have one image.

    Nothing leaves a site beside the model.

    Args:
        gain: γ, a constant that depends on the activations; by default that of a ReLU, √2/√(1 - 1/π).
        clip: λ of adaptive gradient clipping (Brock et al., ICML 2021), by which the gradient of an output
            channel is at most so many times its weights; of all layers but the last. 0 for none.
        head: dotted name of the last layer, where the order of the network's modules says something else.

    Raises:
        ConfigError: for a ``gain`` that is not positive or a negative ``clip``, and for a network without
            convolutions or with layer norms, as transformers have.

    Deviations:
        The paper's text was not at hand: the equation is that of Brock, De and Smith (ICLR 2021), which it
        takes over, with their γ. The last layer stays as it is, also where it is a convolution; so does a
        convolution with one weight to each output channel. Norm layers stay among the network's entries, and
        are sent, but have no effect and no gradient.
    """

    name = "fedwon"
    capturable = True
    requires = frozenset({"norm_layers"})
    excludes = frozenset({"norm_layers"})

    def __init__(self, gain: Positive = RELU_GAIN, clip: NotNegative = 0.0, head: str | None = None) -> None:
        self.gain, self.clip, self.head = gain, clip, head

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Take the norm layers' effect away, and standardise the convolutions."""
        name = type(network).__name__
        if any(isinstance(module, nn.LayerNorm) for module in network.modules()):
            raise ConfigError(f"fedwon is for convolutional networks, and {name} has layer norms")
        head = list(find_head(network, self.head).modules())
        remove_norms(network)
        if not standardise_weights(network, self.gain, leave=head):
            raise ConfigError(f"fedwon: {name} has no convolutions before its last layer")
        return network

    def at_site(self, context: SiteContext) -> SitePart:
        return FedWonSite(self, context.network) if self.clip else SitePart()


class FedWonSite(SitePart):
    """Clips the gradients."""

    def __init__(self, method: FedWon, network: nn.Module) -> None:
        self.method = method
        head = set(find_head(network, method.head).parameters())
        self.clipped = [
            (module, parameter)
            for module in network.modules()
            for parameter in module.parameters(recurse=False)
            if parameter not in head
        ]

    @torch.no_grad()
    def before_step(self, step: Step) -> None:
        """Adaptive gradient clipping."""
        for module, parameter in self.clipped:
            if parameter.grad is not None:
                weight, gradient = (by_output_channel(module, t) for t in (parameter, parameter.grad))
                clipped = clip_by_weights(weight, gradient, self.method.clip)
                parameter.grad.copy_(by_output_channel(module, clipped))
