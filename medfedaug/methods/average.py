"""An exchange that most methods need: tensors up, their average down."""

from __future__ import annotations

from medfedaug.averaging import WeightedMean
from medfedaug.methods.base import Payload, ServerExchange, Shapes

__all__ = ["AverageServer"]


class AverageServer(ServerExchange):
    """The server's half: the average of the sites' tensors, weighted as the average of the models is.

    Args:
        shapes: of what a site sends.
        variances: keys whose values cannot be negative.
    """

    def __init__(self, shapes: Shapes, variances: frozenset[str] = frozenset()) -> None:
        self.shapes, self.variances = shapes, variances
        self.mean = WeightedMean()

    def check(self, payload: Payload) -> None:
        """No negative variance."""
        for key in sorted(self.variances):
            if bool((payload[key] < 0).any()):
                raise ValueError(f"{key} is negative, and a variance cannot be")

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Add a site's."""
        self.mean.add(payload, weight)

    def result(self) -> Payload:
        """The average."""
        mean, self.mean = self.mean.result(), WeightedMean()
        return mean
