"""FedAWA: learned weights in the mean, in favour of updates that agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from medfedaug.methods.arguments import AtLeastOne, NotNegative
from medfedaug.methods.base import Aggregator, Method, shared_parameters
from medfedaug.methods.contexts import Payload, RoundMean, ServerContext, SiteUpdate
from medfedaug.methods.kept import KeptUpdates, flattened, weighted_mean


class FedAWA(Method):
    """Adaptive weights from client vectors (Shi et al., FedAWA, CVPR 2025).

    With the client vectors ``τₖ = wₖ − w`` of the sites k and the global model w, the server takes
    steps on λ along the gradient of ::

        Σₖ pₖ (1 − cos(wₖ, w)) + Σₖ pₖ ‖τₖ − Σⱼ pⱼ τⱼ‖,   p = softmax(λ)

    and averages the models with p. λ starts as the sites' shares of the samples, and is kept
    from round to round.

    Only the model leaves a site. The server keeps the models of a round until its end.

    Args:
        rate: the learning rate of Adam (β₁ = 0.5, β₂ = 0.999), made anew in every round.
        steps: the number of steps in a round.

    Raises:
        ConfigError: for arguments out of range, and when no parameter is averaged.

    Deviations:
        This follows the paper's public code, with its values as defaults. That code averages with the weights
        before the last step, this method with those after it. The vectors have the trainable parameters; p
        averages everything. A site that misses rounds keeps its λ, and the softmax is over the
        sites of the round. With these defaults the weights change little: a step changes λ by
        0.001, and a softmax of shares is nearly even, whatever the sites' numbers of samples. No limit on a
        site's share applies.
    """

    name = "fedawa"
    requires = frozenset({"averaged_parameters"})
    excludes = frozenset({"given_shares"})

    def __init__(self, rate: NotNegative = 0.001, steps: AtLeastOne = 1) -> None:
        self.rate, self.steps = rate, steps

    def aggregator(self, context: ServerContext) -> Aggregator:
        return FedAWAServer(self, context)


class FedAWAServer(KeptUpdates):
    """The server's half.

    Attributes:
        logits: λ of every participant so far.
        shares: p of the sites of the last round.
    """

    counts_samples = True

    def __init__(self, method: FedAWA, context: ServerContext) -> None:
        super().__init__()
        self.method, self.context = method, context
        self.compared = list(shared_parameters(context, method.name))
        self.logits: dict[str, float] = {}
        self.shares: dict[str, float] = {}
        self._samples: dict[str, float] = {}

    def accept(self, update: SiteUpdate) -> None:
        super().accept(update)
        self._samples[update.site] = update.weight

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Learn the weights, and average the models with them."""
        models, samples, self._samples = self.take(), self._samples, {}
        total = sum(samples.values())
        for site in models:
            self.logits.setdefault(site, samples[site] / total)
        before = flattened(round_.previous, self.compared)
        after = torch.stack([flattened(model, self.compared) for model in models.values()])
        angles = 1 - torch.cosine_similarity(after, before[None], dim=1)
        vectors = after - before
        logits = torch.tensor([self.logits[site] for site in models], dtype=torch.float64)
        p = self._learn(logits.requires_grad_(), angles, vectors @ vectors.T)
        self.logits.update(zip(models, logits.tolist(), strict=True))
        self.shares = dict(zip(models, p.tolist(), strict=True))
        return weighted_mean(models, self.shares)

    def _learn(self, logits: Tensor, angles: Tensor, products: Tensor) -> Tensor:
        """Change λ in place and return p; inner products of the vectors give the lengths."""
        optimiser = torch.optim.Adam([logits], lr=self.method.rate, betas=(0.5, 0.999))
        for _ in range(self.method.steps):
            p = logits.softmax(dim=0)
            squares = products.diagonal() - 2 * products @ p + p @ products @ p
            # Without the clamp, two equal vectors would have an infinite derivative.
            lengths = squares.clamp_min(1e-24).sqrt()
            optimiser.zero_grad()
            ((p * angles).sum() + (p * lengths).sum()).backward()
            optimiser.step()
        return logits.detach().softmax(dim=0)

    def summary(self) -> dict[str, Any]:
        return {"weights": dict(self.shares)}

    def state(self) -> Payload:
        return {site: torch.tensor([value], dtype=torch.float64) for site, value in self.logits.items()}

    def restore(self, state: Payload) -> None:
        self.logits = {site: float(value) for site, value in state.items()}
