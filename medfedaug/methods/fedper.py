"""FedPer: each site keeps the last layer of its network."""

from __future__ import annotations

from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.methods.base import Method
from medfedaug.methods.entries import module_entries
from medfedaug.models import find_head


class FedPer(Method):
    """Average base layers and keep personalisation layers (Arivazhagan et al., arXiv:1912.00818, 2019).

    The network of site k is ``x ↦ f(x; W_B, W_(P,k))``. In each round the site starts from the
    global base layers ``W_B`` and its own ``W_(P,k)``, trains both together on its images, and
    sends the base layers alone. The server takes their mean
    ``W_B ← Σₖ γₖ W_(B,k)`` (Algorithms 1 and 2). Here ``W_(P,k)`` is the last
    layer.

    Only the model without the last layer leaves a site. The global model is therefore not complete, and a
    site that did not train gets no score.

    Args:
        head: dotted name of the last layer, if it is not the last one in the network's order.

    Raises:
        ConfigError: for a network of one layer, which leaves nothing to average.
        ValueError: for a network without that layer.

    Deviations:
        The paper also keeps the last K_P blocks of its networks; `PartialFed` with ``strategy="bottom_up"``
        keeps everything after the first stages. Sites start with the same last layer, that of the run's
        initial network. γ_k is the site's weight in the mean.
    """

    name = "fedper"
    provides = frozenset({"method:partialfed"})

    def __init__(self, head: str | None = None) -> None:
        self.head = head

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return the entries of the last layer."""
        kept = module_entries(network, find_head(network, self.head).modules())
        if kept == frozenset(network.state_dict()):
            raise ConfigError(f"fedper: all of {type(network).__name__} would stay at the site")
        return kept
