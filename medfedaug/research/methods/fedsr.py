"""FedSR: random representations with little information, which generalise to other sites."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from medfedaug import functional as F
from medfedaug.methods.arguments import NotNegative, Positive
from medfedaug.methods.base import Method, ServerExchange, SitePart
from medfedaug.methods.contexts import ServerContext, SiteContext, Step
from medfedaug.methods.exchanges import AveragedParameters, AverageServer
from medfedaug.methods.site_parts import MeasuredSite, linear_head

_SMALLEST = 1e-6  # deviation: the logarithm of one that rounds to zero would be no number


class Representation(nn.Module):
    """Layers of FedSR: the standard deviation of z given an image, and r(z|y) of each class.

    Args:
        width: D, the size of z.
        classes: K.
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.deviation = nn.Linear(width, width)
        self.means = nn.Parameter(torch.zeros(classes, width))
        self.spreads = nn.Parameter(torch.ones(classes, width))

    def forward(self, features: Tensor) -> Tensor:
        """Return σ(x), (B, D), for features (B, D)."""
        return nn.functional.softplus(self.deviation(features)) + _SMALLEST

    def references(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of r(z|y) for classes (B,), (B, D) each."""
        return self.means[labels], nn.functional.softplus(self.spreads[labels]) + _SMALLEST


class FedSR(Method):
    """Simple representations (Nguyen, Torr and Lim, NeurIPS 2022), for classification.

    The head classifies a draw z of p(z|x) = N(μ(x), σ²(x)), and two terms limit its information, the second
    an upper bound of the conditional mutual information I(x; z | y)::

        ℓ = CE + α_L2R E‖z‖² + α_CMI E KL(p(z|x) ‖ r(z|y))

    with a learned Gaussian r(z|y) for every class. μ(x) are the network's features, the input of its last
    layer; σ(x) is the softplus of a layer on them. In evaluation z = μ(x): the plain network, without a draw.

    Exchange, every round: the weights of σ's layer, and means and standard deviations of r(z|y), up; averages
    down. In simulations only: the mean of a class is about the patients of that class.

    Args:
        l2: α_L2R.
        cmi: α_CMI.
        learning_rate: of σ's layer and r(z|y); the optimiser is SGD, made anew in every round.

    Deviations:
        The network is not changed, so that μ(x) has no extra layer and z is as wide as the features. The
        public code ends the network in a layer of twice the width of z for both; it uses the norm of z and
        not its square, scales p(z|x) by a learned number before the divergence, never averages r(z|y), and
        in evaluation averages the probabilities of several draws. Here r(z|y) is averaged: only then does the
        bound bring the sites' p(z|y) together. Weights of the terms are the public code's for PACS. 10⁻⁶ is
        added to standard deviations. FedFA+ reports this method for segmentation too, without a description.
    """

    name = "fedsr"
    tasks = ("classification",)
    requires = frozenset({"labels"})
    excludes = frozenset({"counted_patients"})

    def __init__(
        self, l2: NotNegative = 0.01, cmi: NotNegative = 0.001, learning_rate: Positive = 0.01
    ) -> None:
        self.l2, self.cmi, self.learning_rate = l2, cmi, learning_rate
        self._representation: Representation | None = None

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Draw the first weights of σ's layer from the run's seed, the same at all sites."""
        head = linear_head(network, self.name)
        self._representation = Representation(head.in_features, head.out_features)
        return network

    def representation(self) -> Representation:
        """Return σ's layer and r(z|y) with their initial values."""
        assert self._representation is not None, "prepare_network comes first"
        return copy.deepcopy(self._representation)

    def at_site(self, context: SiteContext) -> SitePart:
        return FedSRSite(self, context.network)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(self.representation().state_dict())


class FedSRSite(MeasuredSite, AveragedParameters):
    measured = ("l2r", "cmi")

    def __init__(self, method: FedSR, network: nn.Module) -> None:
        head = linear_head(network, method.name)
        self.method, self.representation = method, method.representation().to(head.weight)
        super().__init__(dict(self.representation.named_parameters()))
        self._optimiser: torch.optim.Optimizer | None = None
        self._drawn: tuple[Tensor, Tensor, Tensor] | None = None
        # First, so that the hooks of other methods get z.
        head.register_forward_pre_hook(self._draw, prepend=True)

    def _draw(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if not head.training:
            return None
        mean: Tensor = F.working_precision(args[0])
        deviation = F.working_precision(self.representation(mean))
        z = mean + deviation * torch.randn_like(mean)
        self._drawn = (z, mean, deviation)
        return (z,)

    def start_round(self) -> None:
        parameters = self.representation.parameters()
        self._optimiser = torch.optim.SGD(parameters, lr=self.method.learning_rate)
        super().start_round()

    def loss(self, step: Step) -> Tensor:
        """Return both terms; σ's layer and r(z|y) get their gradients with the network."""
        assert self._drawn is not None
        (z, mean, deviation), self._drawn = self._drawn, None
        self.representation.zero_grad(set_to_none=True)  # of an earlier pass at other weights
        norm = z.square().sum(dim=1).mean()
        divergence = gaussian_kl(mean, deviation, *self.representation.references(step.targets)).mean()
        self.measure(norm, divergence)
        return self.method.l2 * norm + self.method.cmi * divergence

    def after_step(self, step: Step) -> None:
        """Take one step of σ's layer and r(z|y)."""
        assert self._optimiser is not None
        self._optimiser.step()
        self._drawn = None


def gaussian_kl(mean: Tensor, std: Tensor, other_mean: Tensor, other_std: Tensor) -> Tensor:
    """Kullback-Leibler divergence of Gaussians with diagonal covariance (FedSR's KL(p(z|x) || r(z|y))).

    ::

        Σ_d [log(σ′_d / σ_d) + (σ_d² + (μ_d − μ′_d)²) / (2 σ′_d²) − 1/2]

    Means and standard deviations are (N, D), the result is (N,).

    Example:
        >>> one = torch.ones(1, 2)
        >>> float(gaussian_kl(one, one, one, one)), float(gaussian_kl(one, one, one - 2.0, one))
        (0.0, 4.0)
    """
    variances = (std.square() + (mean - other_mean).square()) / (2.0 * other_std.square())
    return (torch.log(other_std / std) + variances - 0.5).sum(dim=1)
