"""Single: every site trains by itself."""

from torch import nn

from medfedaug.methods.base import Method


class Single(Method):
    """Training on one site only: nothing is averaged, and each site is tested with its own model.

    A federation in which every entry of the network stays at its site, with the same rounds, epochs and
    seeds as any other: the difference is the effect of sharing. In combination with an exchange
    (``single,fedrdn``), sites share that exchange only.

    Deviations:
        One round is selected for all sites, by the mean of their validation scores, while a separate site
        would select its own. Every round has a new optimiser, as in a federation. The global model has the
        initial weights, and an unseen site gets no score.
    """

    name = "single"
    excludes = frozenset({"averaged_parameters"})

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        return frozenset(network.state_dict())
