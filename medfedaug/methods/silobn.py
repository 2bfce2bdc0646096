"""SiloBN: the statistics of norm layers stay at their site, their weights are averaged."""

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from medfedaug.methods.base import check_norms
from medfedaug.methods.fedbn import KeepsNorms


class SiloBN(KeepsNorms):
    """Average everything but the running statistics of norm layers (Andreux et al., DART 2020).

    Scale and shift of the layers are shared. Mean, variance and the count of batches, the buffers of batch
    norms and of instance norms that keep statistics, are neither sent nor received.

    The global model is not complete: a site that did not train has no statistics. ``unseen``, or another
    method with statistics (`medfedaug.methods.FedFD`), decides how it is scored, and does not change a bit of
    the training.

    Args:
        unseen: ``"none"``: an unseen site gets no score, unless another method has statistics, and no
            statistics leave their site. ``"average"``: the average of the sites' statistics, with the weights
            of the models, as in the model that FedAvg would make.

    Exchange, every round, with ``"average"``: the statistics up, their average down, so that they leave the
    site.

    Deviations:
        The paper adapts to an unseen site by statistics of its images, which is not offered. FedFD-A, which
        compares with SiloBN on unseen sites (Tables 1, 5, 7, 8), speaks of statistics averaged over the
        sites, which is ``"average"``.
    """

    name = "silobn"

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return the buffers of norm layers."""
        entries = frozenset(
            f"{prefix}.{name}" if prefix else name
            for prefix, module in network.named_modules()
            if isinstance(module, _NormBase)
            for name, buffer in module.named_buffers(recurse=False)
            if buffer is not None and name not in module._non_persistent_buffers_set
        )
        check_norms(self.name, network, entries, "norm layer with running statistics")
        return entries
