"""PartialFed: sites load a part of the global model and keep their own weights in the rest."""

from collections.abc import Iterable
from typing import Literal

from torch import nn

from medfedaug.methods.base import Method, check_norms
from medfedaug.methods.fedbn import NORM_LAYERS
from medfedaug.models import find_head
from medfedaug.models.entries import state_entries

Strategy = Literal["norm+head", "norm", "head"]


class PartialFed(Method):
    """Partial initialisation with a fixed strategy: PartialFed-Fix (Sun et al., NeurIPS 2021).

    At the start of a round a site loads some layers of the global model, and keeps its own others from the
    previous round, chosen by module type:

    ============= ================================================================================
    ``norm``      normalisation layers are the site's own, as in FedBN
    ``head``      the last layer is, as in FedPer (Arivazhagan et al., arXiv:1912.00818, 2019)
    ``norm+head`` both are
    ============= ================================================================================

    The global model is not complete, and a site that did not train gets no score.

    Args:
        strategy: the choice of loaded layers.

    Deviations:
        The paper's sites send all layers, and load some. Here they do not send layers that no site loads: the
        sites are the same, and the global model lacks these layers. Strategies by stages and
        PartialFed-Adaptive, which learns what to load, are not implemented.
    """

    name = "partialfed"

    def __init__(self, strategy: Strategy = "norm+head") -> None:
        self.strategy = strategy

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return the entries of the layers that are not loaded."""
        kept: frozenset[str] = frozenset()
        if "norm" in self.strategy:
            kept = state_entries(network, NORM_LAYERS)
            check_norms(self.name, network, kept, "norm layer with weights")
        if "head" in self.strategy:
            kept |= module_entries(network, find_head(network).modules())
        return kept


def module_entries(network: nn.Module, modules: Iterable[nn.Module]) -> frozenset[str]:
    """Return the state-dict keys of modules, without their submodules' keys."""
    wanted = set(modules)
    return frozenset(
        f"{prefix}.{key}" if prefix else key
        for prefix, module in network.named_modules()
        if module in wanted
        for key in module.state_dict()
        if "." not in key
    )
