"""gPerXAN: personal batch norms assembled with shared instance norms, guided by the global head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug import functional as F
from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.average import AverageServer
from medfedaug.methods.base import Payload, ServerContext, ServerExchange, SiteContext, SitePart, Step
from medfedaug.methods.entries import module_entries
from medfedaug.methods.unseen import KeepsNorms, Unseen, UnseenNorms
from medfedaug.models import find_head
from medfedaug.models.assembled_norm import (
    InstanceBranch,
    assemble_norms,
    assembled_norms,
    copied_branches,
    place_branches,
    with_branches,
)
from medfedaug.models.substitution import call_with


class GPerXAN(KeepsNorms):
    """Assembled normalisation and a guiding regulariser (Le et al., gPerXAN, CVPR 2024).

    Every batch norm becomes ::

        XAN(h) = s₁ BN(h) + s₂ IN(h),   s = softmax(r₁, r₂)

    with trained scores r of the layer, and separate weights and biases of batch norm and instance norm. The
    batch norms, with their statistics, stay at their site; scores and instance norms are averaged like all
    other weights. The loss of a site gains the loss of the global last layer ``h_g`` of this round, with
    fixed weights, on the features z that the site trains, ::

        ℓ = ℓ(hₖ(z), y) + λ ℓ(h_g(z), y)

    Exchange, every round and batch norm: weight and bias of the instance norm, (C,) each, and scores, (2,),
    up; their average down, which a finished run keeps. With ``unseen="average"``, the default here, batch
    norms leave their site too.

    Args:
        weight: λ, 0.5 in the published code.
        unseen: the batch norms for unseen sites, as for `FedBN`; the average in the published code.
        head: dotted name of the last layer, if it is not the last one in the network's order.

    Raises:
        ConfigError: for a negative ``weight``, for another ``unseen``, for a network without batch norms that
            keep statistics, when the network's output is not its last layer's, and when another method
            keeps that layer at the site while ``weight`` is above 0.

    Deviations:
        The abstract and the published code were available, not the paper's text. The code has no
        segmentation; here the last layer's loss is the task's, also for maps. Batch norms of features without
        spatial dimensions, which the paper's networks lack, get no instance norm. Batch norms in the last
        layer, which the paper's lacks, normalise with the batch in ``h_g`` too, whose weights alone are
        fixed. Both scores of a layer are averaged; the published code keeps the batch norm's
        (``score_batchnorm``) at the site and averages the other. The paper starts from weights that were
        trained with such layers on ImageNet.
    """

    name = "gperxan"
    requires = frozenset({"global_start", "norm_layers"})
    provides = frozenset({"extra_passes"})
    excludes = frozenset({"complete_state_dict", "norm_layers"})

    def __init__(
        self, weight: NotNegative = 0.5, unseen: Unseen = "average", head: str | None = None
    ) -> None:
        super().__init__(unseen)
        self.weight, self.head = weight, head

    def prepare_network(self, network: nn.Module) -> nn.Module:
        try:
            return assemble_norms(network)
        except ValueError as error:
            raise ConfigError(f"gperxan: {error}") from error

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return all entries of the batch norms that keep statistics."""
        norms = [m for m in network.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        return module_entries(network, norms)

    def at_site(self, context: SiteContext) -> SitePart:
        return GPerXANSite(self, context)

    def every_round(self, context: ServerContext) -> ServerExchange:
        _check_head(self, context)
        return AverageServer({**self.averaged(context.network), **_branches(context.network)})


class GPerXANSite(UnseenNorms):
    """The instance norms, and the loss of the global last layer.

    Instance norms and scores are stepped after the network, along the gradient of the same loss, with the
    run's optimiser, which is made anew in every round.
    """

    def __init__(self, method: GPerXAN, context: SiteContext) -> None:
        super().__init__(method, context)
        place_branches(context.network)  # otherwise a GPU waits for each of them in every pass
        self.every_round = self
        self.weight = method.weight
        self.head = find_head(context.network, method.head)
        self._received: dict[str, Tensor] = {}
        self._branches: dict[str, InstanceBranch] = {}
        self._seen: tuple[Tensor, Tensor] | None = None
        self._features: Tensor | None = None
        self._optimiser: torch.optim.Optimizer | None = None
        self.head.register_forward_hook(self._keep)

    def _keep(self, _head: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self._seen = args[0], output

    def tensors(self) -> dict[str, Tensor]:
        return _branches(self.context.network)

    def collect(self) -> Payload:
        """Return instance norms and scores, and the batch norms' entries for unseen sites."""
        branches = {name: tensor.detach() for name, tensor in self.tensors().items()}
        return {**super().collect(), **branches}

    @torch.no_grad()
    def apply(self, payload: Payload) -> None:
        for name, tensor in self.tensors().items():
            tensor.copy_(payload[name])
        super().apply({key: payload[key] for key in self.keys})

    def start_round(self) -> None:
        """Make an optimiser, and keep the received last layer with its instance norms."""
        self._optimiser = self.context.optimiser(list(self.tensors().values()))
        self._received = {key: value.detach().clone() for key, value in self.head.state_dict().items()}
        self._branches = copied_branches(self.head)

    def after_pass(self, step: Step) -> None:
        """Take z, and drop gradients of earlier passes, as the network does."""
        self._drop_gradients()
        assert self._seen is not None
        (features, outputs), self._seen = self._seen, None
        if F.working_precision(outputs).shape != step.outputs.shape:
            raise ConfigError(
                f"gperxan: the output of {type(step.network).__name__} is not its last layer's; name "
                "this layer with gperxan.head"
            )
        self._features = F.working_precision(features)

    def loss(self, step: Step) -> Tensor | None:
        """Return λ ℓ(h_g(z), y)."""
        features, self._features = self._features, None
        assert features is not None
        if not self.weight:
            return None
        # Copies, since a batch norm in the last layer changes its running statistics.
        received = {key: value.clone() for key, value in self._received.items()}
        with with_branches(self.head, self._branches):
            outputs = call_with(self.head, received, features)
        self._seen = None
        return self.weight * step.batch_loss(outputs)

    def after_step(self, step: Step) -> None:
        assert self._optimiser is not None
        self._optimiser.step()

    def end_round(self) -> None:
        self._optimiser = None
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for tensor in self.tensors().values():
            tensor.grad = None


def _check_head(method: GPerXAN, context: ServerContext) -> None:
    """Refuse a last layer that other methods keep at the site, so that no global one guides it."""
    entries = module_entries(context.network, find_head(context.network, method.head).modules())
    kept = (entries - method.local_entries(context.network)) & context.local_entries
    if method.weight and kept:
        raise ConfigError(
            f"gperxan: the last layer is to guide the sites, and its {', '.join(sorted(kept))} stay at each "
            "site; set gperxan.weight=0, or leave out the method that keeps them"
        )


def _branches(network: nn.Module) -> dict[str, Tensor]:
    """Return the instance norms' tensors by the layer's dotted name and ``instance_`` with their name."""
    return {
        f"{name}.instance_{entry}": value
        for name, norm in assembled_norms(network).items()
        for entry, value in vars(vars(norm)["instance"]).items()
    }
