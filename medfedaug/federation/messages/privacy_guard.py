"""`PrivacyGuard`, which stands between a site's methods and everything that they send."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from medfedaug.config.scanners import Scanners
from medfedaug.data.base import Case
from medfedaug.errors import ConfigError, PrivacyRefused
from medfedaug.methods.base import HISTOGRAM, Contributions, Payload, SiteExchange
from medfedaug.privacy.accountant import require_opacus
from medfedaug.privacy.ledger import PrivacyLedger
from medfedaug.privacy.policy import SUMMARY, PrivacyPolicy

_log = logging.getLogger(__name__)


class PrivacyGuard:
    """Stands between a site's methods and everything that they send.

    Without noise it lets `SiteExchange.collect` pass if the site has enough cases. With noise it never
    calls that: before a round's training, `observe` takes what each case contributes, brings it into the
    policy's public bounds, averages and adds noise; `collect` gives what the method makes of that.

    The mechanism. The values of one exchange fall into J blocks of diameter Dⱼ, which clipping enforces: a
    number between its bounds (D = high − low), a histogram of one channel (D = √2, between two bins). In
    units of Dⱼ one case moves the whole vector by at most √J, and the mean over n cases, when one patient
    with at most m cases is replaced by another, by Δ₂ = m√J/n. Each number of block j gets Gaussian noise
    of standard deviation z·Dⱼ·Δ₂: a Gaussian mechanism of noise multiplier z. Bringing the noisy mean back
    within its bounds, and all that follows, spends nothing.

    Args:
        site: its name, for messages.
        policy: its policy.
        cases: n, the number of its training cases. Replacing a patient does not change it: it is public.
        ledger: the account of the site's releases; by default one that lasts as long as this guard.
        unsent_state: whether the network or the transforms hold what was made from the site's images and
            never sent: normalisation layers that stay, statistics of one's own.
        generator: of the noise; the operating system's by default, since noise that follows from the seed of
            a run, or from any 32 bits, can be subtracted. A run with noise therefore never repeats.
        per_patient: the number of training cases of each patient, by the site's own list; by default one.
            With noise none has more than the policy's ``cases_per_patient``, of which the noise follows.
        identities: of the training cases, by which the ledger knows them.

    Attributes:
        samples: the training cases that a method's last payload is about, where it is not about all.
    """

    def __init__(
        self,
        site: str,
        policy: PrivacyPolicy,
        cases: int,
        ledger: PrivacyLedger | None = None,
        unsent_state: bool = False,
        generator: random.Random | None = None,
        per_patient: Sequence[int] = (),
        identities: Callable[[], Collection[bytes]] = frozenset,
    ) -> None:
        self.site, self.policy, self.cases, self.unsent_state = site, policy, cases, unsent_state
        self.per_patient, self.identities = tuple(per_patient) or (1,) * cases, identities
        self.ledger = ledger or PrivacyLedger()
        self.generator = generator or random.SystemRandom()
        self.samples: dict[str, Sequence[Case]] = {}
        self._means: dict[str, Payload] = {}
        self._epsilon: float | None = None
        if policy.adds_noise:
            require_opacus()

    def check(self, name: str, exchange: SiteExchange) -> None:
        """Check that the policy allows this exchange at all; called before any work is done.

        Counted are patients: those of the exchange's sample, or, where a value is about any k cases, as few
        as those with the most cases that have k together.
        """
        if exchange.of_losses and not self.policy.losses:
            raise PrivacyRefused(
                self.site,
                f"{name} sends losses over training images, and losses stay at this site (losses of its "
                "privacy policy; medfedaug site-config --losses)",
            )
        sample = exchange.sample()
        if sample is None:
            summarised = self._patients(exchange.fewest_cases())
        else:
            summarised = len({case.owner for case in sample})
        if summarised < self.policy.min_images:
            what = "images" if max(self.per_patient, default=1) == 1 else f"patient{'s' * (summarised != 1)}"
            raise PrivacyRefused(
                self.site,
                f"{name}'s statistics would summarise {summarised} {what}, and this site sends them from "
                f"{self.policy.min_images} on (min_images of its privacy policy)",
            )
        if self.policy.noise_multiplier:
            self._check_patients(name)
            self._contributions(name, exchange)
        elif self.policy.sgd_noise_multiplier:
            raise PrivacyRefused(
                self.site,
                f"{name}: its statistics would leave without noise beside weights with noise "
                "(noise_multiplier of its privacy policy)",
            )

    def _patients(self, cases: int | None) -> int:
        """The fewest patients who may have so many of the training cases; of all without a number."""
        if cases is None or not self.per_patient:
            return len(self.per_patient)
        reached = accumulate(sorted(self.per_patient, reverse=True))
        return min(len(self.per_patient), 1 + sum(total < cases for total in reached))

    def _check_patients(self, name: str) -> None:
        most = max(self.per_patient, default=1)
        if most > self.policy.cases_per_patient:
            raise PrivacyRefused(
                self.site,
                f"{name}: a patient has {most} training cases, and noise would hide "
                f"{self.policy.cases_per_patient} (cases_per_patient of its privacy policy)",
            )

    def train(self, steps: int, rate: float) -> None:
        """Enter the steps of DP-SGD of a round in the ledger, before the first of them.

        A patient with at most m cases, each in a step with probability q, changes the sum of clipped
        gradients by at most mC, and by nothing unless one of them is in it: noise multiplier σ/m, rate
        1 − (1 − q)ᵐ.

        Args:
            steps: their number.
            rate: q.
        """
        policy, most = self.policy, self.policy.cases_per_patient
        self._check_patients("the weights")
        noise, rate = policy.sgd_noise_multiplier / most, 1.0 - (1.0 - rate) ** most
        epsilon = self._spend("training", noise, steps, rate)
        _log.info(
            "site %s: %d steps of training with noise, each case in one of them with probability %.3g; "
            "ε = %.3g of %g spent at δ = %g over all jobs, %s",
            *(self.site, steps, rate, epsilon, policy.max_epsilon, policy.delta, self._covered()),
        )

    def _spend(self, what: str, noise: float, releases: int = 1, rate: float = 1.0) -> float:
        policy = self.policy
        assert policy.max_epsilon is not None
        try:
            budget = (noise, policy.delta, policy.max_epsilon)
            epsilon = self.ledger.spend(*budget, self.identities(), releases, rate)
        except ConfigError as error:
            raise PrivacyRefused(self.site, str(error)) from error
        if epsilon is None:
            raise PrivacyRefused(
                self.site,
                f"privacy budget spent: {what} would exceed ε = {policy.max_epsilon:g} "
                f"(δ = {policy.delta:g})",
            )
        self._epsilon = epsilon
        return epsilon

    def _contributions(self, name: str, exchange: SiteExchange) -> Contributions:
        try:
            contributions = exchange.contributions(self.policy.bounds)
            for kind in contributions.kinds.values():
                if kind != HISTOGRAM:
                    self.policy.bounds(kind)
        except ConfigError as error:
            raise PrivacyRefused(self.site, f"{name}: {error}") from error
        if contributions.through_network and self.unsent_state:
            raise PrivacyRefused(
                self.site,
                f"{name}: noise would not cover its statistics, since layers or normalisation that stay at "
                "the site let one patient move what all others contribute; run it without them",
            )
        return contributions

    def observe(self, name: str, exchange: SiteExchange) -> None:
        """Make the noisy mean of an exchange and enter it in the ledger; without noise, do nothing.

        Must be called while the network is as the server sent it. Trained on, it would depend on every
        case, and so would what each of them contributes.
        """
        policy = self.policy
        self.check(name, exchange)
        if not policy.noise_multiplier:
            return
        contributions = self._contributions(name, exchange)
        epsilon = self._spend(f"one more release of {name}", policy.noise_multiplier)
        self._means[name] = self._noisy_mean(name, contributions)
        _log.info(
            "site %s: %s: statistics of %d cases with noise; ε = %.3g of %g spent at δ = %g over all jobs, "
            "%s",
            *(self.site, name, self.cases, epsilon, policy.max_epsilon, policy.delta, self._covered()),
        )

    def _noisy_mean(self, name: str, contributions: Contributions) -> Payload:
        kinds, count = contributions.kinds, 0
        total: Payload = {}
        for values in contributions.values:
            if set(values) != set(kinds):
                raise PrivacyRefused(self.site, f"{name} contributes entries that it did not declare")
            count += 1
            for key, value in values.items():
                clipped = self._inside(kinds[key], value)
                total[key] = total[key] + clipped if key in total else clipped
        if count != self.cases:
            # The sensitivity is one over this number.
            raise PrivacyRefused(self.site, f"{name} has contributions of {count} of {self.cases} cases")
        blocks = sum(v.numel() if kinds[k] != HISTOGRAM else v[..., 0].numel() for k, v in total.items())
        sensitivity = min(self.policy.cases_per_patient, count) * math.sqrt(blocks) / count
        means: Payload = {}
        for key, value in total.items():
            std = self.policy.noise_multiplier * sensitivity * self._diameter(kinds[key])
            noise = [self.generator.gauss(0.0, 1.0) for _ in range(value.numel())]
            noisy = value / count + std * torch.tensor(noise, dtype=torch.float64).view_as(value)
            means[key] = self._inside(kinds[key], noisy)
        return means

    def _diameter(self, kind: str) -> float:
        if kind == HISTOGRAM:
            return math.sqrt(2.0)
        low, high = self.policy.bounds(kind)
        return high - low

    def _inside(self, kind: str, value: Tensor) -> Tensor:
        """The nearest value within the bounds of its kind, float64 and on the CPU; NaN becomes the middle."""
        value = value.detach().to("cpu", torch.float64)
        if kind == HISTOGRAM:
            return _onto_simplex(value)
        low, high = self.policy.bounds(kind)
        return torch.where(value.isnan(), (low + high) / 2, value).clamp(low, high)

    def collect(self, name: str, exchange: SiteExchange) -> Payload:
        """Return the payload that the site sends for an exchange, after `observe`."""
        if not self.policy.noise_multiplier:
            self.check(name, exchange)
            if (sample := exchange.sample()) is not None:
                self.samples[name] = sample
            return exchange.collect()
        if name not in self._means:
            raise PrivacyRefused(self.site, f"{name}: nothing was observed since the last release")
        return exchange.privatised(self._means.pop(name), self.cases)

    def scanners(self) -> Scanners:
        """Return the scanners that the policy names; none by default."""
        return dict(self.policy.scanners)

    def description(self, cases: Sequence[int]) -> dict[str, Any]:
        """Return the site's description of itself, with counts of its own where the policy lets them out.

        Args:
            cases: the number of cases of each patient.
        """
        told = self.policy.description
        if self.policy.scores != SUMMARY or len(cases) >= self.policy.min_images:
            patients, studies = told.patients or len(cases), told.studies or sum(cases)
            told = dataclasses.replace(told, patients=patients or None, studies=studies or None)
        return told.to_dict()

    def pending(self) -> dict[str, Payload]:
        """The noisy means that were observed and not collected yet."""
        return dict(self._means)

    def take_pending(self, means: dict[str, Payload]) -> None:
        """Put back what `pending` returned, in a new process: their noise is in the ledger."""
        self._means = dict(means)

    def _covered(self) -> str:
        on = "statistics and weights" if self.policy.sgd_noise_multiplier else "statistics alone"
        weights = [] if self.policy.sgd_noise_multiplier else ["model weights"]
        # With noise on scores these have an ε of their own, and so have losses, where any leave.
        scores = [] if self.policy.score_noise_multiplier else ["losses and scores"]
        others = ", ".join([*weights, *scores])
        return f"on {on}: {others} are not covered" if others else f"on {on}"

    def metrics(self) -> dict[str, float]:
        """ε and δ of all that the site's ledger holds, once this job has released anything with noise.

        ``privacy/weights`` is 1 where the weights are in it.
        """
        if self._epsilon is None:
            return {}
        found = {"privacy/epsilon": self._epsilon, "privacy/delta": self.policy.delta}
        return {**found, "privacy/weights": 1.0} if self.policy.sgd_noise_multiplier else found


def _onto_simplex(values: Tensor) -> Tensor:
    """The nearest histograms along the last axis; uniform ones where a value is not finite."""
    bins = values.shape[-1]
    finite = values.isfinite().all(dim=-1, keepdim=True)
    values = torch.where(finite, values, torch.ones_like(values) / bins)
    # The projection takes the same amount off every bin and cuts at zero; which amount, the largest bins
    # that stay positive decide. The same shift of all bins changes nothing, and keeps rounding small.
    values = values - values.amax(dim=-1, keepdim=True)
    largest = values.sort(dim=-1, descending=True).values
    excess = (largest.cumsum(dim=-1) - 1.0) / torch.arange(1, bins + 1, dtype=values.dtype)
    last = (largest > excess).sum(dim=-1, keepdim=True) - 1
    return (values - excess.gather(-1, last)).clamp_min(0.0)
