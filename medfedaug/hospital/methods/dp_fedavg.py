"""DP-FedAvg: site-level differential privacy by clipping and noise at the server."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from annotated_types import Interval
from torch import Tensor

from medfedaug import functional as F
from medfedaug.errors import ConfigError
from medfedaug.hospital.privacy.accountant import epsilon_spent, noise_multiplier_for, require_opacus
from medfedaug.methods.arguments import Count, NotNegative, Positive
from medfedaug.methods.base import Aggregator, Method, shared_parameters
from medfedaug.methods.contexts import Payload, RoundMean, ServerContext
from medfedaug.methods.kept import KeptUpdates, moved, update_norms
from medfedaug.utils.secure_random import secret_normal


class DPFedAvg(Method):
    """Differentially private federated averaging (McMahan et al., ICLR 2018, Algorithm 1).

    ::

        w ← w + (1/n) Σₖ Δₖ min(1, S/‖Δₖ‖) + (zS/n) ξ,   Δₖ = wₖ − w,   ξ ~ N(0, I)

    with the norm over all averaged parameters together: the paper's flat clipping, also in Geyer, Klein and
    Nabi (2017). The messages to sites and the final model reveal little about whether one site took part. The
    server is trusted: it sees every update without noise.

    n is fixed before the first sum, and every site counts as 1/n, whatever its number of samples. A site that
    misses a round, or whose update is refused, adds nothing, and n stays. So a site moves the model by at
    most S/n in a round, and noise of zS/n in each parameter is a Gaussian mechanism of noise multiplier z.
    Every round is one release about all sites (sampling rate 1), also about absent ones. Opacus' accountant
    of Rényi differential privacy adds them up. The account is for one run, and continues when the run is
    resumed; add up several runs of the same sites by `medfedaug.hospital.privacy.epsilon_spent`.

    The noise comes from the operating system, so that a run cannot be reproduced.

    Args:
        clip: S, the largest norm of a site's update.
        noise_multiplier: z; with 0 updates are only clipped, and nothing is private.
        delta: δ, which should be far below 1/n.
        max_epsilon: the largest ε of all rounds together; a run that would exceed it does not start. ``None``
            for no limit.
        sites: n; 0 for the number of sites that can train when the first round ends.

    Raises:
        ConfigError: for arguments out of range, rounds that exceed the budget, a missing Opacus, or when no
            parameter is averaged; in combination, for anything averaged or exchanged without this noise:
            running statistics of batch norm, and every method's exchange.

    Deviations:
        The paper draws sites at random in every round, weighs them by their number of examples up to a limit,
        and has hundreds of thousands of them. Here a few hospitals take part in every round, so that drawing
        gains nothing, and the noise is divided by few sites.
    """

    name = "dp_fedavg"
    requires = frozenset({"averaged_parameters"})
    # A limit from the other sites' updates would let one site move the model through their steps too.
    excludes = frozenset({"averaged_buffers", "exchange", "compared_steps"})

    def __init__(
        self,
        clip: Positive = 1.0,
        noise_multiplier: NotNegative = 1.0,
        delta: Annotated[float, Interval(gt=0, lt=1)] = 1e-5,
        max_epsilon: Positive | None = None,
        sites: Count = 0,
    ) -> None:
        if max_epsilon is not None and not noise_multiplier:
            raise ConfigError("dp_fedavg: max_epsilon needs a noise_multiplier above 0")
        self.clip, self.noise_multiplier, self.delta = clip, noise_multiplier, delta
        self.max_epsilon, self.sites = max_epsilon, sites

    def spent(self, rounds: int) -> float:
        """Return ε of a number of rounds."""
        return epsilon_spent([(self.noise_multiplier, rounds)], self.delta)

    def aggregator(self, context: ServerContext) -> Aggregator:
        return DPFedAvgServer(self, context)


class DPFedAvgServer(KeptUpdates):
    """The server's half.

    Attributes:
        sites: n; 0 until it is fixed.
        rounds: the number of releases so far.
        clipped: the sites of the last round whose updates were longer than S.
    """

    def __init__(self, method: DPFedAvg, context: ServerContext) -> None:
        super().__init__()
        self.method, self.context = method, context
        self.keys = list(shared_parameters(context, method.name))
        self.sites, self.rounds, self.clipped = method.sites, 0, list[str]()
        if method.noise_multiplier:
            require_opacus()
        if method.max_epsilon is not None:
            self._check_budget(method.max_epsilon, context.rounds)

    def _check_budget(self, most: float, rounds: int) -> None:
        method = self.method
        epsilon = method.spent(rounds)
        if epsilon > most:
            enough = noise_multiplier_for(most, method.delta, rounds)
            raise ConfigError(
                f"dp_fedavg: {rounds} rounds with noise_multiplier {method.noise_multiplier:g} spend ε = "
                f"{epsilon:.3g} (δ = {method.delta:g}), and max_epsilon is {most:g}: take fewer rounds, or a "
                f"noise_multiplier of {enough:.2f}"
            )

    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """Return the noisy mean of the clipped updates."""
        models, previous, clip = self.take(), round_.previous, self.method.clip
        self.sites = self.sites or len(self.context.weights())
        norms = update_norms(models, previous, self.keys)
        self.clipped = [site for site, norm in norms.items() if norm > clip]
        factors = [F.clip_factor(norm, clip) / self.sites for norm in norms.values()]
        self.rounds += 1
        return {
            key: (moved(models, previous, key, factors) + self._noise(previous[key])).float()
            for key in self.keys
        }

    @property
    def std(self) -> float:
        """The standard deviation of the noise in each parameter, zS/n."""
        return self.method.noise_multiplier * self.method.clip / self.sites

    def _noise(self, like: Tensor) -> Tensor:
        if not self.method.noise_multiplier:
            return torch.zeros_like(like, dtype=torch.float64)
        return self.std * secret_normal(like.shape).to(like.device)

    def summary(self) -> dict[str, Any]:
        """Return n, the noise, the clipped sites, and ε and δ of all rounds so far."""
        entry = {"sites": self.sites, "clip": self.method.clip, "noise": self.std, "clipped": self.clipped}
        if not self.method.noise_multiplier:
            return entry
        spent = {"privacy/epsilon": self.method.spent(self.rounds), "privacy/delta": self.method.delta}
        return {**entry, **spent}

    def state(self) -> Payload:
        return {"account": torch.tensor([self.sites, self.rounds])}

    def restore(self, state: Payload) -> None:
        self.sites, self.rounds = (int(number) for number in state["account"])
