"""MOON: features close to the global model's, and far from the site's last model's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from medfedaug.methods.arguments import NotNegative, Positive
from medfedaug.methods.base import Method, Payload, SiteContext, SitePart, Step, shared_parameters
from medfedaug.methods.class_features import FeatureSite
from medfedaug.models.modes import evaluating
from medfedaug.models.substitution import call_with


class MOON(Method):
    """Model-contrastive learning (Li, He and Song, CVPR 2021, Eq. 3 and 4).

    With the features z of an image under the weights in training, ``z_glob`` under the global weights
    of this round, and ``z_prev`` under the site's weights at the end of its last round, the loss gains ::

        μ ℓ_con = −μ log(exp(sim(z, z_glob)/τ) / (exp(sim(z, z_glob)/τ) + exp(sim(z, z_prev)/τ)))

    averaged over the images of the batch, with the cosine as similarity. Gradients flow through z alone.

    Only the model leaves a site. A step needs two more passes without gradients.

    Args:
        weight: μ. The paper's best are 5, 1 and 1 for CIFAR-10, CIFAR-100 and Tiny-ImageNet, of 0.1, 1, 5
            and 10.
        temperature: τ.
        head: dotted name of the module whose input the features are; by default the network's last layer.

    Raises:
        ConfigError: for a negative ``weight``, for a ``temperature`` that is not positive, when no parameter
            is averaged, and for a method with weights or statistics outside of the state dict, of which the
            earlier models have no copy.

    Deviations:
        z is the input of the network's last layer. The paper puts a projection head of two layers before that
        layer; here networks are not changed. The paper is about classification: for feature maps, as in
        segmentation, z is the mean over space. ``z_glob`` and ``z_prev`` are in evaluation mode,
        in which layers of other methods change nothing; the paper does not name the mode. A site's first
        round has no earlier model and no term; with the initial model instead, the term would be constant.
    """

    name = "moon"
    requires = frozenset({"averaged_parameters", "complete_state_dict"})
    provides = frozenset({"extra_passes"})

    def __init__(
        self, weight: NotNegative = 1.0, temperature: Positive = 0.5, head: str | None = None
    ) -> None:
        self.weight, self.temperature, self.head = weight, temperature, head

    def at_site(self, context: SiteContext) -> SitePart:
        shared_parameters(context, self.name)
        return MOONSite(self, context.network)


class MOONSite(FeatureSite):
    """The site's half, with the weights of the comparison.

    Attributes:
        previous: all entries of the model at the end of the site's last round; empty before.
    """

    def __init__(self, method: MOON, network: nn.Module) -> None:
        super().__init__(network, method.head)
        self.method, self.network = method, network
        self.previous: Payload = {}
        self._received: Payload = {}
        self._terms: list[Tensor] = []

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        super()._keep(module, args)
        if self._seen is not None and self._seen.ndim > 2:
            self._seen = self._seen.flatten(2).mean(dim=2)

    def start_round(self) -> None:
        self._received, self._terms = _entries(self.network), []

    def loss(self, step: Step) -> Tensor | None:
        """Return μ ℓ_con of the batch."""
        features = self.step_features()
        if not self.previous or not self.method.weight:
            return None
        with torch.no_grad(), evaluating(step.network):
            others = [self._under(weights, step.inputs) for weights in (self._received, self.previous)]
        near, far = (torch.cosine_similarity(features, z) / self.method.temperature for z in others)
        term = nn.functional.softplus(far - near).mean()  # -log(e^near / (e^near + e^far))
        self._terms.append(term.detach())
        return self.method.weight * term

    def _under(self, weights: Payload, inputs: Tensor) -> Tensor:
        call_with(self.network, weights, inputs)
        return self.last_features()

    def end_round(self) -> None:
        self.previous, self._received = _entries(self.network), {}

    def metrics(self) -> dict[str, float]:
        return {"contrast": float(torch.stack(self._terms).mean())} if self._terms else {}

    def state(self) -> Payload:
        return self.previous

    def restore(self, state: Payload) -> None:
        device = next(self.network.parameters()).device
        self.previous = {key: value.to(device) for key, value in state.items()}


def _entries(network: nn.Module) -> Payload:
    return {key: value.detach().clone() for key, value in network.state_dict().items()}
