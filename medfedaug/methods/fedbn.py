"""FedBN: normalisation layers stay at their site."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from medfedaug.errors import WITH_BATCH_NORM, ConfigError
from medfedaug.methods.entries import state_entries
from medfedaug.methods.unseen import KeepsNorms

# `_NormBase` is the common base of PyTorch's batch and instance norms.
NORM_LAYERS: tuple[type[nn.Module], ...] = (_NormBase, nn.GroupNorm, nn.LayerNorm)


class FedBN(KeepsNorms):
    """Average everything but the normalisation layers (Li et al., ICLR 2021).

    Parameters and running statistics of batch, instance, group and layer norms are neither sent nor
    received: each site keeps its own across rounds. Which entries these are is decided by module type.

    The global model alone is therefore not complete: its norm entries hold the initial values, and a site
    that did not train has none of its own. How such an unseen site is scored, ``unseen`` says; sites that
    train go on with their own layers whatever it says, to the same bits.

    Args:
        unseen: ``"none"``: an unseen site is reported without a score, and no normalisation layer leaves its
            site. ``"average"``: it is scored with the average of the sites' layers, weighted as the models
            are: the model that FedAvg would make of the same sites. ``"own"``: with the average of their
            weights and biases, and with running means and variances of its own images (without labels), its
            training images or, where it has none, those that it is tested with. Statistics of the test images
            are known to no site that is asked for one image at a time; say so beside such a score.

    Exchange, every round, with ``"average"``: the normalisation layers up, their average down, so that they
    do leave the site; with ``"own"``: their weights and biases.

    Raises:
        ConfigError: for another ``unseen``, and for a network that has no normalisation layer with entries of
            its own.

    Deviations:
        The paper speaks of batch norm alone; the other norms are treated alike. The papers that test FedBN on
        unseen sites do not say with which layers: FedFD-A aggregates "parameters ... for the global model
        with the same process of FedAvg" (section 4.2) and speaks of averaged statistics, which is
        ``"average"``; FedFA+ (Table 6) says nothing.
    """

    name = "fedbn"

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return all state-dict entries of normalisation layers."""
        entries = state_entries(network, NORM_LAYERS)
        if not entries:
            raise ConfigError(
                f"fedbn keeps normalisation layers at the site, and {type(network).__name__} has none with "
                f"weights; {WITH_BATCH_NORM}"
            )
        return entries
