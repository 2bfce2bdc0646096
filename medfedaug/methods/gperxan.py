"""gPerXAN: batch norms of each site's own beside shared instance norms, guided by the global head."""

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
    r"""Assembled normalisation and a guiding regulariser (Le et al., gPerXAN, CVPR 2024).

    In the place of every batch norm stands

    .. math:: \mathrm{XAN}(h) = s_1\, \mathrm{BN}(h) + s_2\, \mathrm{IN}(h), \qquad
              s = \mathrm{softmax}(r_1, r_2)

    with trained scores r of the layer, and weights and biases for batch norm and instance norm each. The
    batch norms, with their statistics, stay at their site; scores and instance norms are averaged like all
    other weights. The loss of a site gains that of the global model's last layer :math:`h_g`, as the site
    received it in this round and fixed, on the features z that the site trains,

    .. math:: \ell = \ell(h_k(z), y) + \lambda\, \ell(h_g(z), y)

    Exchange, every round and batch norm: weight and bias of the instance norm, (C,) each, and scores, (2,),
    up; their average down, which a finished run keeps beside the model. With ``unseen="average"``, which is
    the default here, batch norms leave their site as well.

    Args:
        weight: λ. The published code has 0.5.
        unseen: with which batch norms an unseen site is scored, as for `FedBN`. The published code has
            the average.
        head: dotted name of the last layer, where the order of the network's modules says something else.

    Raises:
        ConfigError: for a negative ``weight``, for another ``unseen``, for a network without batch norms that
            keep statistics, where the network's output is not that of its last layer, and where another
            method keeps that layer at the site while ``weight`` is above 0.

    Deviations:
        The abstract and the published code were at hand, not the paper's text. The code has no segmentation;
        here the last layer's loss is the task's, also of maps. Batch norms of features without spatial
        dimensions, of which there are none in the paper's networks, get no instance norm. Where the last
        layer has batch norms of its own, which the paper's has not, they normalise with the batch in
        :math:`h_g` too, whose weights alone are fixed. Both scores of a layer are averaged; the published
        code keeps that of the batch norm (``score_batchnorm``) at the site and averages the other. The paper
        starts from weights that were trained with such layers on ImageNet.
    """

    name = "gperxan"
    capturable = True
    requires = frozenset({"global_start", "norm_layers"})
    provides = frozenset({"extra_passes"})
    excludes = frozenset({"complete_state_dict", "norm_layers"})

    def __init__(
        self, weight: NotNegative = 0.5, unseen: Unseen = "average", head: str | None = None
    ) -> None:
        super().__init__(unseen)
        self.weight, self.head = weight, head

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Put instance norms beside the batch norms."""
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
        place_branches(context.network)  # else a GPU waits for each of them in every pass
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
        """Weights, biases and scores of all layers."""
        return _branches(self.context.network)

    def collect(self) -> Payload:
        """The instance norms and scores, and what of the batch norms an unseen site is to have."""
        branches = {name: tensor.detach() for name, tensor in self.tensors().items()}
        return {**super().collect(), **branches}

    @torch.no_grad()
    def apply(self, payload: Payload) -> None:
        """Take the averages."""
        for name, tensor in self.tensors().items():
            tensor.copy_(payload[name])
        super().apply({key: payload[key] for key in self.keys})

    def start_round(self) -> None:
        """Make an optimiser, and keep the last layer that the site received, with its instance norms."""
        self._optimiser = self.context.optimiser(list(self.tensors().values()))
        self._received = {key: value.detach().clone() for key, value in self.head.state_dict().items()}
        self._branches = copied_branches(self.head)

    def after_pass(self, step: Step) -> None:
        """Take z; only the gradient of the last pass counts for the instance norms, as for the network."""
        self._drop_gradients()
        assert self._seen is not None
        (features, outputs), self._seen = self._seen, None
        if F.working_precision(outputs).shape != step.outputs.shape:
            raise ConfigError(
                f"gperxan: what {type(step.network).__name__} gives is not what its last layer gives; name "
                "that with gperxan.head"
            )
        self._features = F.working_precision(features)

    def loss(self, step: Step) -> Tensor | None:
        """λ ℓ(h_g(z), y)."""
        features, self._features = self._features, None
        assert features is not None
        if not self.weight:
            return None
        # Copies, since a batch norm in the last layer changes the running statistics that it is given.
        received = {key: value.clone() for key, value in self._received.items()}
        with with_branches(self.head, self._branches):
            outputs = call_with(self.head, received, features)
        self._seen = None
        return self.weight * step.batch_loss(outputs)

    def after_step(self, step: Step) -> None:
        """Step the instance norms and scores."""
        assert self._optimiser is not None
        self._optimiser.step()

    def end_round(self) -> None:
        """Drop what only training needs."""
        self._optimiser = None
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        for tensor in self.tensors().values():
            tensor.grad = None


def _check_head(method: GPerXAN, context: ServerContext) -> None:
    """Refuse a last layer that other methods keep at the site: there is no global one to be guided by."""
    entries = module_entries(context.network, find_head(context.network, method.head).modules())
    kept = (entries - method.local_entries(context.network)) & context.local_entries
    if method.weight and kept:
        raise ConfigError(
            f"gperxan: the last layer is to guide the sites, and its {', '.join(sorted(kept))} stay at each "
            "site; set gperxan.weight=0, or leave out the method that keeps them"
        )


def _branches(network: nn.Module) -> dict[str, Tensor]:
    """The tensors of the instance norms by their layer's dotted name and ``instance_`` their own."""
    return {
        f"{name}.instance_{entry}": value
        for name, norm in assembled_norms(network).items()
        for entry, value in vars(vars(norm)["instance"]).items()
    }
