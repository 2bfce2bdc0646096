"""SiloBN: the statistics of norm layers stay at their site, their weights are averaged."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from medfedaug.errors import WITH_BATCH_NORM, ConfigError
from medfedaug.methods.unseen import KeepsNorms


class SiloBN(KeepsNorms):
    """Average everything but the running statistics of norm layers (Andreux et al., DART 2020).

    Scale and shift of the layers are shared; mean, variance and the count of batches are neither sent nor
    received. Which entries these are is decided by module type: the buffers of batch norms, and of instance
    norms that keep statistics.

    The global model alone is not complete. A site that did not train has no statistics of its own; what it is
    scored with, ``unseen`` says, or another method that knows some (`medfedaug.methods.FedFD`). Sites that
    train go on with their own whatever it says, to the same bits.

    Args:
        unseen: ``"none"``: an unseen site is reported without a score unless another method knows statistics,
            and no statistics leave their site. ``"average"``: it is scored with the average of the sites'
            statistics, weighted as the models are: the model that FedAvg would make of the same sites.
            ``"own"``: with statistics of its own images (without labels), its training images or, where it
            has none, those that it is tested with; nothing is exchanged.

    Exchange, every round, with ``"average"``: the statistics up, their average down, so that they do leave
    the site.

    Raises:
        ConfigError: for another ``unseen``, and for a network without running statistics.

    Deviations:
        The paper adapts to an unseen site by statistics of its images, which is ``"own"``; the default asks
        for no images to adapt to. FedFD-A, which compares with SiloBN on unseen sites (Tables 1, 5, 7, 8),
        speaks of statistics averaged over the sites, which is ``"average"``.
    """

    name = "silobn"

    def local_entries(self, network: nn.Module) -> frozenset[str]:
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
                f"layer with any; {WITH_BATCH_NORM}"
            )
        return entries
