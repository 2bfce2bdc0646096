"""PartialFed: sites load a part of the global model and keep their own weights in the rest."""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import AtLeastOne
from medfedaug.methods.base import Method
from medfedaug.methods.entries import module_entries, state_entries
from medfedaug.methods.fedbn import NORM_LAYERS
from medfedaug.models import find_head
from medfedaug.models.modes import evaluating
from medfedaug.models.sizes import some_size
from medfedaug.models.stages import Stage, find_stage
from medfedaug.models.substitution import call_with, first_names

Strategy = Literal["norm+head", "norm", "head", "bottom_up", "top_down"]


class PartialFed(Method):
    """Partial initialisation with a fixed strategy: PartialFed-Fix (Sun et al., NeurIPS 2021).

    At the start of a round a site loads some layers of the global model, and keeps its own others from the
    previous round. They are chosen by module type, and for stages by the dependences of their features:

    ============= ==========================================================================================
    ``norm``      normalisation layers are the site's own, as in FedBN
    ``head``      the last layer is, as in FedPer (Arivazhagan et al., arXiv:1912.00818, 2019)
    ``norm+head`` both are
    ``bottom_up`` the first stages of the encoder are loaded, and all that follows is the site's own
    ``top_down``  the first stages are the site's own, and all that follows is loaded
    ============= ==========================================================================================

    The global model is not complete, and a site that did not train gets no score.

    Args:
        strategy: the choice of loaded layers.
        stages: the number of first stages of the encoder, for ``bottom_up`` and ``top_down``.
        head: dotted name of the last layer, if it is not the last one in the network's order.

    Raises:
        ConfigError: for an unknown strategy, and for a network in which it loads everything, or nothing, or
            whose stages are unknown.

    Deviations:
        The paper's sites send all layers, and load some. Here they do not send layers that no site loads: the
        sites are the same, and the global model lacks these layers. PartialFed-Adaptive, which learns what to
        load, is not implemented.
    """

    name = "partialfed"

    def __init__(
        self, strategy: Strategy = "norm+head", stages: AtLeastOne = 1, head: str | None = None
    ) -> None:
        self.strategy, self.stages, self.head = strategy, stages, head

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return the entries of the layers that are not loaded."""
        everything = frozenset(first_names(network).values())
        if self.strategy == "bottom_up":
            kept = everything - self._first_stages(network)
        elif self.strategy == "top_down":
            kept = self._first_stages(network)
        else:
            kept = self._by_type(network)
        if kept == everything:
            raise ConfigError(
                f"partialfed: {self.strategy} leaves all of {type(network).__name__} at the site"
            )
        return kept

    def _by_type(self, network: nn.Module) -> frozenset[str]:
        kept: frozenset[str] = frozenset()
        if "norm" in self.strategy:
            kept = state_entries(network, NORM_LAYERS)
            if not kept:
                raise ConfigError(
                    f"partialfed: {type(network).__name__} has no normalisation layer with weights; choose "
                    "another strategy or network"
                )
        if "head" in self.strategy:
            kept |= module_entries(network, find_head(network, self.head).modules())
        return kept

    def _first_stages(self, network: nn.Module) -> frozenset[str]:
        """Return the entries on which the features of the last of the first stages depend."""
        try:
            return module_entries(network, _modules_before(network, find_stage(network, self.stages)))
        except ValueError as error:
            raise ConfigError(f"partialfed: {type(network).__name__}: {error}") from error


class _Reached(Exception):
    """Raised when the pass reaches the stage."""


def _modules_before(net: nn.Module, stage: Stage) -> list[nn.Module]:
    """Return the modules with parameters on which the features of a stage depend.

    One pass in evaluation mode, with shapes and gradients but no values (PyTorch's ``meta`` device), finds
    them: the order in which a network registers its modules need not be the order of its layers.
    """
    named = dict(net.named_parameters(remove_duplicate=False))
    parameters = {key: torch.empty_like(p, device="meta").requires_grad_() for key, p in named.items()}
    named_buffers = net.named_buffers(remove_duplicate=False)
    buffers = {key: torch.empty_like(buffer, device="meta") for key, buffer in named_buffers}
    outputs: list[Tensor] = []

    def keep(features: Tensor) -> None:
        outputs.append(features)
        raise _Reached

    handle = stage.watch(net, keep)
    try:
        with evaluating(net), torch.enable_grad():
            call_with(net, {**parameters, **buffers}, torch.empty(_image(net), device="meta"))
    except _Reached:
        pass
    except Exception as error:
        raise ValueError(f"no image reaches stage {stage.name}: {error}") from error
    finally:
        handle.remove()
    if not outputs:
        raise ValueError(f"no image reaches stage {stage.name}")
    gradients = torch.autograd.grad(outputs[0].sum(), list(parameters.values()), allow_unused=True)
    reached = {name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}
    owners = {name.rpartition(".")[0] for name in reached}
    return [module for name, module in net.named_modules(remove_duplicate=False) if name in owners]


def _image(net: nn.Module) -> tuple[int, ...]:
    """Return the shape of a batch that a network takes, (B, C, *spatial)."""
    first = next(module for module in net.modules() if isinstance(module, _ConvNd))
    return 1, first.in_channels, *some_size(net, first.weight.dim() - 2)
