"""FedAvgM: momentum at the server."""

from typing import Any

import torch
from torch import Tensor

from medfedaug.methods.arguments import BelowOne, Positive
from medfedaug.methods.base import Aggregator, Method, shared_parameters
from medfedaug.methods.contexts import Payload, RoundMean, ServerContext, shapes_of, zeros


class FedAvgM(Method):
    """Server momentum: v ← βv + (w − w̄), w ← w − ηv, with w̄ the mean of the sites' models.

    Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, section 4.3. With β = 0 and η = 1 it is FedAvg, bit for bit.

    Args:
        momentum: β.
        server_lr: η, the server's learning rate.

    Deviations:
        Heavy-ball momentum, as in the paper's equation; its experiments use Nesterov's. The velocity is
        float64. Running statistics of norm layers are not parameters, and become their mean.
    """

    name = "fedavgm"
    requires = frozenset({"averaged_parameters"})

    def __init__(self, momentum: BelowOne = 0.9, server_lr: Positive = 1.0) -> None:
        self.momentum, self.server_lr = momentum, server_lr

    def aggregator(self, context: ServerContext) -> Aggregator:
        return FedAvgMServer(self, context)


class FedAvgMServer(Aggregator):
    def __init__(self, method: FedAvgM, context: ServerContext) -> None:
        self.method = method
        self.velocity = zeros(shapes_of(shared_parameters(context, method.name)))

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Take one step of the server's optimiser."""
        beta, rate = self.method.momentum, self.method.server_lr
        previous, mean = round_.previous, round_.mean
        updated = dict(mean)
        for key, velocity in self.velocity.items():
            step = previous[key].double() - mean[key].double()
            # w − ηv, in a form without rounding for β = 0 and η = 1.
            moved = mean[key].double() + (1 - rate) * step - rate * beta * velocity
            updated[key] = moved.to(mean[key].dtype)
            velocity.mul_(beta).add_(step)
        return updated

    def summary(self) -> dict[str, Any]:
        return {"velocity": float(torch.stack([v.norm() for v in self.velocity.values()]).norm())}

    def state(self) -> Payload:
        return self.velocity

    def restore(self, state: Payload) -> None:
        self.velocity = {key: value.clone() for key, value in state.items()}
