"""FedFD-A: FedFD with adapters that choose the share of each image's statistics."""

import torch
from torch import nn

from medfedaug.methods.arguments import BelowOne, NotNegative, Positive, Share
from medfedaug.methods.base import Payload, ServerContext, ServerExchange, SiteContext, SitePart, Step
from medfedaug.methods.exchanges import AverageServer
from medfedaug.methods.fedfd import FedFD, FedFDSite, shared_entries
from medfedaug.methods.site_parts import MeasuredSite, Reduction
from medfedaug.models import adaptation


class FedFDA(FedFD):
    """FedFD with instance feature adaptation, FedFD-A (Yang et al., section 3.3).

    In evaluation every batch norm normalises an image with statistics between its own and the federation's
    (Eq. 6), ::

        μ^* = α μᵢ + (1 − α) μ_G,   σ^* = α σᵢ + (1 − α) σ_G

    with α from a `medfedaug.models.InstanceAdapter` in each layer (Eq. 7): one forward pass, image by image,
    also at an unseen site. In training, after each step of the main network, the adapters take a step on the
    task's loss with the main network frozen.

    Exchange, every round: the exchange of `FedFD`, and the adapters, averaged with the same weights.

    Args:
        lambda1: see `FedFD`.
        lambda2: see `FedFD`. With both 0 there is no diversification, and the adapters alone remain (Table 3,
            c1).
        distance: see `FedFD`.
        adapter_lr: the adapters' learning rate.
        adapter_momentum: their momentum; the optimiser is SGD, made anew in every round.

    Deviations:
        The adapters are trained with the network in evaluation mode: dropout and the batch norms of fully
        connected layers, which get no adapter, act as at test time. The paper speaks only of the local
        adapter's loss. Of the alternatives in Table 3 (c) only BIN is there
        (`medfedaug.research.methods.bin.BIN`). All sites are scored with the federation's statistics, also
        with `SiloBN` and `FedBN`, since the adapters are trained with them.
    """

    name = "fedfd_a"
    provides = FedFD.provides | {"method:fedfd"}
    excludes = frozenset({"complete_state_dict"})

    def __init__(
        self,
        lambda1: Share = 0.1,
        lambda2: NotNegative = 4.0,
        distance: Reduction = "mean",
        adapter_lr: Positive = 0.01,
        adapter_momentum: BelowOne = 0.5,
    ) -> None:
        super().__init__(lambda1, lambda2, distance)
        self.adapter_lr, self.adapter_momentum = adapter_lr, adapter_momentum

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return adaptation.insert_instance_adapters(network)

    def at_site(self, context: SiteContext) -> SitePart:
        context.trained(_adapters(context.network).values())
        return FedFDASite(self, context.network)

    def every_round(self, context: ServerContext) -> ServerExchange:
        network = context.network
        return AverageServer({**shared_entries(network), **_adapters(network)})


class FedFDASite(MeasuredSite, FedFDSite):
    measured = ("adapter_loss",)

    def __init__(self, method: FedFDA, network: nn.Module) -> None:
        super().__init__(method, network)
        self.settings = method
        self.adapters = _adapters(network)
        self.optimiser: torch.optim.Optimizer | None = None

    def start_round(self) -> None:
        super().start_round()
        adapters, method = list(self.adapters.values()), self.settings
        self.optimiser = torch.optim.SGD(adapters, lr=method.adapter_lr, momentum=method.adapter_momentum)

    def after_step(self, step: Step) -> None:
        """Take one step of the adapters on the task's loss (Eq. 1 with Eq. 6 and 7)."""
        assert self.optimiser is not None
        if not self.ready:
            return
        with adaptation.training_adapters(step.network) as parameters:
            loss = step.criterion(step.network(step.inputs), step.targets)
            gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        self.measure(loss)

    def collect(self) -> Payload:
        return {**super().collect(), **{key: value.detach() for key, value in self.adapters.items()}}

    @torch.no_grad()
    def apply(self, payload: Payload) -> None:
        for key, parameter in self.adapters.items():
            parameter.copy_(payload[key])
        super().apply({key: value for key, value in payload.items() if key not in self.adapters})


def _adapters(network: nn.Module) -> dict[str, nn.Parameter]:
    return {
        f"{name}.adapter.{key}": parameter
        for name, adapter in adaptation.instance_adapters(network).items()
        for key, parameter in adapter.named_parameters()
    }
