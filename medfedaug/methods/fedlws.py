"""FedLWS: the mean of the models, with layers shrunk by the sites' disagreement."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import NotNegative
from medfedaug.methods.base import Aggregator, Method, RoundMean, ServerContext, shared_parameters
from medfedaug.methods.kept import KeptUpdates, flattened, stacked


class FedLWS(Method):
    """Layer-wise weight shrinking (Shi et al., FedLWS, ICLR 2025).

    For each layer l, with the update ``g_(k,l) = w_(k,l) − wₗ`` of site k and the mean update
    ``gₗ = Σₖ pₖ g_(k,l)``, the server computes ::

        wₗ ← γₗ Σₖ pₖ w_(k,l),   γₗ = ‖wₗ‖ / (‖wₗ‖ + τₗ ‖gₗ‖),
        τₗ = β (1/M) Σₖ ‖g_(k,l) − ḡₗ‖,   τ_min ≤ τₗ ≤ τ_max

    with the unweighted mean ḡₗ over the M sites of the round. The more the sites disagree about
    a layer, the more it shrinks.

    Only the model leaves a site. The server keeps the models of a round until its end.

    Args:
        beta: β.
        least: τ_min.
        most: τ_max.

    Raises:
        ConfigError: for arguments out of range, and when no parameter is averaged.

    Deviations:
        This follows the paper's public code, with its values as defaults. Its layers are the entries of the
        state dict up to the next bias, with running statistics; here a layer is a module's own trainable
        parameters, and the rest is the plain mean. A layer with all weights zero does not shrink.
    """

    name = "fedlws"
    requires = frozenset({"averaged_parameters"})

    def __init__(self, beta: NotNegative = 0.03, least: float = 0.01, most: float = 0.2) -> None:
        if not 0 <= least <= most:
            raise ConfigError(f"fedlws: 0 ≤ least {least} ≤ most {most} is needed")
        self.beta, self.least, self.most = beta, least, most

    def aggregator(self, context: ServerContext) -> Aggregator:
        return FedLWSServer(self, context)


class FedLWSServer(KeptUpdates):
    """The server's half.

    Attributes:
        layers: the names of each layer's parameters.
        shrinking: γ of each layer in the last round.
    """

    counts_samples = True

    def __init__(self, method: FedLWS, context: ServerContext) -> None:
        super().__init__()
        self.method = method
        self.layers: dict[str, list[str]] = {}
        for key in shared_parameters(context, method.name):
            self.layers.setdefault(key.rpartition(".")[0], []).append(key)
        self.shrinking: dict[str, float] = {}

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Return the shrunk mean."""
        models, method, updated = self.take(), self.method, dict(round_.mean)
        for layer, keys in self.layers.items():
            before, mean = flattened(round_.previous, keys), flattened(round_.mean, keys)
            sites = torch.cat([stacked(models, key).flatten(1) for key in keys], dim=1)
            disagreement = (sites - sites.mean(dim=0)).norm(dim=1).mean()  # w cancels out
            tau = (method.beta * disagreement).clamp(method.least, method.most)
            length = before.norm()
            gamma = float(length / (length + tau * (mean - before).norm())) if length > 0 else 1.0
            self.shrinking[layer] = gamma
            for key in keys:
                updated[key] = (gamma * round_.mean[key].double()).to(round_.mean[key].dtype)
        return updated

    def summary(self) -> dict[str, Any]:
        values = list(self.shrinking.values())
        return {"smallest": min(values), "mean": sum(values) / len(values)}
