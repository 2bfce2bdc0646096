"""Single: every site trains for itself."""

from __future__ import annotations

from torch import nn

from medfedaug.methods.base import Method


class Single(Method):
    """Training on one site only: nothing is averaged, and each site is tested with the model of its own.

    A federation in which every entry of the network stays at its site: the same rounds, epochs and seeds as
    any other, so that the difference is what sharing brings. With an exchanging method beside it
    (``single,fedrdn``) that exchange is all that sites share.

    Deviations:
        One round is selected for all sites, by the mean of their validation scores, where a site on its own
        would choose for itself. The optimiser begins anew every round, as in a federation. The global model
        holds the initial weights, and an unseen site has no score.
    """

    name = "single"
    excludes = frozenset({"averaged_parameters"})

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        return frozenset(network.state_dict())
