"""SiloBN: the statistics of norm layers stay at their site, their weights are averaged."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from medfedaug.errors import ConfigError
from medfedaug.methods.base import Method

__all__ = ["SiloBN"]


class SiloBN(Method):
    """Average everything but the running statistics of norm layers (Andreux et al., DART 2020).

    Scale and shift of the layers are shared; mean, variance and the count of batches are neither sent nor
    received. Which entries these are is decided by module type: the buffers of batch norms, and of instance
    norms that keep statistics.

    The global model alone is not complete. A site that did not train has no statistics of its own, and is
    reported without a score unless another method knows some (`medfedaug.methods.FedFD`).

    Raises:
        ConfigError: for a network without running statistics.

    Deviations:
        The paper adapts an unseen site by statistics of its own images; that needs many of them, and is not
        done here.
    """

    name = "silobn"

    def kept_at_site(self, network: nn.Module) -> frozenset[str]:
        """The buffers of norm layers."""
        entries = frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, module in network.named_modules()
            if isinstance(module, _NormBase)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer is not None and name not in module._non_persistent_buffers_set
        )
        if not entries:
            raise ConfigError(
                f"silobn keeps running statistics at the site, and {type(network).__name__} has no norm "
                "layer with any; choose another network or norm='batch'"
            )
        return entries
