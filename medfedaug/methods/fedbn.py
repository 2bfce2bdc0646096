"""FedBN: normalisation layers stay at their site."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from medfedaug.errors import ConfigError
from medfedaug.methods.base import Method, state_entries

__all__ = ["NORM_LAYERS", "FedBN"]

# `_NormBase` is the common base of PyTorch's batch and instance norms.
NORM_LAYERS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm)


class FedBN(Method):
    """Average everything but the normalisation layers (Li et al., ICLR 2021).

    Parameters and running statistics of batch, instance, group and layer norms are neither sent nor
    received: each site keeps its own across rounds. Which entries these are is decided by module type.

    The global model alone is therefore not complete: its norm entries hold the initial values, and a site
    that did not train has none of its own. Such an unseen site is reported without a score.

    Raises:
        ConfigError: for a network that has no normalisation layer with entries of its own.

    Deviations:
        The paper speaks of batch norm alone; the other norms are treated alike.
    """

    name = "fedbn"

    def kept_at_site(self, network: nn.Module) -> frozenset[str]:
        """All state-dict entries of normalisation layers."""
        entries = state_entries(network, NORM_LAYERS)
        if not entries:
            raise ConfigError(
                f"fedbn keeps normalisation layers at the site, and {type(network).__name__} has none with "
                "weights; choose another network or norm='batch'"
            )
        return entries
