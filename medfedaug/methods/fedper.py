"""FedPer: each site keeps the last layer of its network."""

from __future__ import annotations

from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.methods.base import Method
from medfedaug.methods.entries import module_entries
from medfedaug.models import find_head


class FedPer(Method):
    r"""Base layers are averaged, personalisation layers stay (Arivazhagan et al., arXiv:1912.00818, 2019).

    The network of site k is :math:`x \mapsto f(x; W_B, W_{P_k})`. In each round the site starts from the
    global base layers :math:`W_B` and its own :math:`W_{P_k}`, trains both together on its images, and
    sends the base layers alone, of which the server takes the mean
    :math:`W_B \leftarrow \sum_k \gamma_k W_{B,k}` (Algorithms 1 and 2). Here :math:`W_{P_k}` is the last
    layer.

    Nothing leaves a site beside the model, and the last layer does not. The global model alone is therefore
    not complete: a site that did not train is reported without a score.

    Args:
        head: dotted name of the last layer, where the order of the network's modules says something else.

    Raises:
        ConfigError: for a network of one layer, of which nothing would be averaged.
        ValueError: for a network without that layer.

    Deviations:
        The paper also keeps the last blocks of its networks, whose number is its K_P; `PartialFed` with
        ``strategy="bottom_up"`` keeps all that follows the first stages. Sites start with the same last
        layer, that of the run's initial network. γ_k is the weight that the site has in the mean.
    """

    name = "fedper"
    provides = frozenset({"method:partialfed"})

    def __init__(self, head: str | None = None) -> None:
        self.head = head

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """The entries of the last layer."""
        kept = module_entries(network, find_head(network, self.head).modules())
        if kept == frozenset(network.state_dict()):
            raise ConfigError(f"fedper: all of {type(network).__name__} would stay at the site")
        return kept
