"""What the tests of robust methods share: five sites, and FedAvg's loop with another rule at its end."""

from collections.abc import Callable, Sequence
from typing import Any

from reference import Federation, Round, State, copied, descend, entries
from torch import nn

SITES = {"A": 5, "B": 10, "C": 15, "D": 5, "E": 10}
"""Photographs of each class."""

PLAN = [tuple("ABCDE"), tuple("ABCE"), tuple("ABCDE")]
"""Who trains in which round."""

Rule = Callable[[Sequence[State], Sequence[str], Sequence[float], nn.Module], Any]
"""Makes the new model of the sites' models, names and weights, and of the network as the round began."""


def by_hand(run: Federation, rule: Rule) -> list[Round]:
    """The run as its papers have it, in float64."""
    network, rounds = run.network(), []
    for round_ in range(1, run.config.rounds + 1):
        sites = run.took_part(round_)
        local = {
            site: entries(descend(copied(network), run.batches[site, round_], run.config.learning_rate))
            for site in sites
        }
        weights = [float(run.server.sites[site]) for site in sites]
        model = rule(list(local.values()), sites, weights, network)
        network = copied(network, model)
        rounds.append(Round(model, local))
    return rounds
