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
    """Federated learning without normalisations (Zhuang and Lyu, FedWon, ICLR 2024).

    Sites with different scanners have different statistics in their normalisation layers. So batch, instance
    and group norms become identities, and each convolution uses standardised weights, ::

        Ŵᵢ = γ (Wᵢ − μᵢ) / (σᵢ √N),

    with mean and deviation of the N weights of output channel i. The rest is FedAvg. A batch may have one
    image.

    Only the model leaves a site.

    Args:
        gain: γ, a constant for the activation; by default a ReLU's, √2/√(1 - 1/π).
        clip: λ of adaptive gradient clipping (Brock et al., ICML 2021): the largest ratio of gradient and
            weights of an output channel, in all layers but the last. 0 for no clipping.
        head: dotted name of the last layer, if it is not the last one in the network's order.

    Raises:
        ConfigError: for a ``gain`` that is not positive or a negative ``clip``, and for a network without
            convolutions or with layer norms, as in transformers.

    Deviations:
        The paper's text was not available: the equation and γ are from Brock, De and Smith (ICLR 2021),
        which it uses. The last layer and convolutions with one weight per output channel stay as they are.
        Norm layers remain among the network's entries, and are sent, but have no effect and no gradient.
    """

    name = "fedwon"
    requires = frozenset({"norm_layers"})
    excludes = frozenset({"norm_layers"})

    def __init__(self, gain: Positive = RELU_GAIN, clip: NotNegative = 0.0, head: str | None = None) -> None:
        self.gain, self.clip, self.head = gain, clip, head

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Remove the effect of norm layers, and standardise the convolutions."""
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
    """The site's half: adaptive gradient clipping."""

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
        for module, parameter in self.clipped:
            if parameter.grad is not None:
                weight, gradient = (by_output_channel(module, t) for t in (parameter, parameter.grad))
                clipped = clip_by_weights(weight, gradient, self.method.clip)
                parameter.grad.copy_(by_output_channel(module, clipped))
