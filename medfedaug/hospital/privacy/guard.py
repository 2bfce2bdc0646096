"""`PrivacyGuard`: policy, noise and ledger between a site's methods and their messages."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from medfedaug.config.kinds import HISTOGRAM
from medfedaug.errors import PrivacyRefused, withheld
from medfedaug.federation.site.guard import Guard, Privacy
from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.federation.site.script_components import ScriptComponents
from medfedaug.federation.site.script_training import CustomLoop
from medfedaug.hospital.privacy.ledger import PrivacyLedger, require_opacus
from medfedaug.hospital.privacy.policy import PrivacyPolicy
from medfedaug.hospital.privacy.release_log import case_identities, refusing, spend_budget
from medfedaug.methods.base import Contributions, Payload, SiteExchange
from medfedaug.methods.census import Census, Contributors

if TYPE_CHECKING:
    from medfedaug.federation.site.model import SiteModel
    from medfedaug.federation.site.trainer import SiteTrainer

_log = logging.getLogger(__name__)


class PrivacyGuard(Guard):
    """Applies a site's policy to all payloads of its methods.

    Without noise it passes the result of `SiteExchange.collect` if the site has enough cases. With noise it
    never calls that: before a round's training, `observe` clips the contribution of each case to the
    policy's public bounds, averages and adds noise; `collect` returns the method's payload of the noisy mean.

    The mechanism. The values of one exchange fall into J blocks of diameter Dⱼ, which clipping enforces: a
    number between its bounds (D = high − low), a histogram of one channel (D = √2, between two bins). In
    units of Dⱼ one case moves the whole vector by at most √J, and the mean over n cases, when one patient
    with at most m cases is replaced by another, by Δ₂ = m√J/n. Each number of block j gets Gaussian noise
    of standard deviation z·Dⱼ·Δ₂: a Gaussian mechanism of noise multiplier z. Clipping the noisy mean to its
    bounds, and all further processing, spends nothing.

    Args:
        cases: n, the number of training cases. Replacing a patient does not change it: it is public.
        unsent_state: whether network or transforms hold values from the site's images that are never sent.
        generator: of the noise, by default the operating system's: noise from a seed could be subtracted.
        per_patient: the number of training cases of each patient, at most the policy's ``cases_per_patient``.
        identities: returns the ledger's identities of the training cases.
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
        census: Census | None = None,
    ) -> None:
        self.site, self.policy, self.cases, self.unsent_state = site, policy, cases, unsent_state
        self.adds_noise = policy.adds_noise
        self.per_patient, self.identities = tuple(per_patient) or (1,) * cases, identities
        self.ledger = ledger or PrivacyLedger()
        self.generator = generator or random.SystemRandom()
        self.census = census or Census(range(cases))
        self._means: dict[str, Payload] = {}
        self._epsilon: float | None = None
        if policy.adds_noise:
            require_opacus()

    def _refused(self, reason: str) -> PrivacyRefused:
        return PrivacyRefused(self.site, reason)

    def check(self, name: str, exchange: SiteExchange) -> None:
        """Check, before any work, that the policy allows this exchange."""
        summarised = len(self.per_patient)
        if summarised < self.policy.min_images:
            what = "images" if max(self.per_patient, default=1) == 1 else f"patient{'s' * (summarised != 1)}"
            raise self._refused(
                f"{name}'s statistics would summarise {withheld(summarised)} {what}, and this site needs "
                f"at least {self.policy.min_images} (min_images of its privacy policy)"
            )
        if self.policy.noise_multiplier:
            self._check_patients(name)
            self._contributions(name, exchange)
        elif self.policy.sgd_noise_multiplier:
            raise self._refused(
                f"{name}: its statistics would leave without noise beside weights with noise "
                "(noise_multiplier of its privacy policy)"
            )

    def _check_patients(self, name: str) -> None:
        most = max(self.per_patient, default=1)
        if most > self.policy.cases_per_patient:
            raise self._refused(
                f"{name}: a patient has {withheld(most)} training cases, and noise would hide "
                f"{self.policy.cases_per_patient} (cases_per_patient of its privacy policy)"
            )

    def training(self, model: SiteModel, script: ScriptComponents, loop: CustomLoop | None) -> LocalTraining:
        """Return the local training: DP-SGD where the policy asks for it."""
        self.policy.check_loop(self.site, loop)
        if not self.policy.sgd_noise_multiplier:
            return super().training(model, script, loop)
        # Imported here: Opacus is an extra, and its import takes seconds.
        from medfedaug.hospital.privacy.dp_sgd import PrivateTraining

        policy = self.policy
        return PrivateTraining(
            model, clip=policy.sgd_clip, noise=policy.sgd_noise_multiplier, spend=self.train
        )

    def train(self, steps: int, rate: float) -> None:
        """Enter the steps of DP-SGD of a round in the ledger, before the first of them.

        A patient with at most m cases, each in a step with probability q, changes the sum of clipped
        gradients by at most mC, and by nothing unless one of them is in it: noise multiplier σ/m, rate
        1 − (1 − q)ᵐ.

        ``rate`` is q.
        """
        policy, most = self.policy, self.policy.cases_per_patient
        self._check_patients("the weights")
        noise, rate = policy.sgd_noise_multiplier / most, 1.0 - (1.0 - rate) ** most
        epsilon = self._spend("training", noise, steps, rate)
        _log.info(
            "site %s: %d steps of training with noise, each case in one of them with probability %.3g; "
            "ε = %.3g of %g spent at δ = %g over all jobs",
            self.site,
            steps,
            rate,
            epsilon,
            policy.epsilon,
            policy.delta,
        )

    def _spend(self, what: str, noise: float, releases: int = 1, rate: float = 1.0) -> float:
        site, policy, identities = self.site, self.policy, self.identities
        self._epsilon = spend_budget(
            site, policy, self.ledger, what, noise, identities, releases=releases, rate=rate
        )
        return self._epsilon

    def _contributions(self, name: str, exchange: SiteExchange) -> Contributions:
        with refusing(self.site, f"{name}: "):
            contributions = exchange.contributions(self.policy.bounds)
            for kind in contributions.kinds.values():
                if kind != HISTOGRAM:
                    self.policy.bounds(kind)
        if contributions.through_network and self.unsent_state:
            raise self._refused(
                f"{name}: noise would not cover its statistics, since layers or normalisation that stay at "
                "the site let one patient move what all others contribute; run it without them"
            )
        return contributions

    def observe(self, name: str, exchange: SiteExchange) -> None:
        """Make the noisy mean of an exchange and enter it in the ledger; without noise, do nothing.

        Call it before training: contributions through a trained network depend on all cases.
        """
        policy = self.policy
        self.check(name, exchange)
        if not policy.noise_multiplier:
            return
        contributions = self._contributions(name, exchange)
        epsilon = self._spend(f"one more release of {name}", policy.noise_multiplier)
        self._means[name] = self._noisy_mean(name, contributions)
        _log.info(
            "site %s: %s: statistics of %d cases with noise; ε = %.3g of %g spent at δ = %g over all jobs",
            self.site,
            name,
            self.cases,
            epsilon,
            policy.epsilon,
            policy.delta,
        )

    def _noisy_mean(self, name: str, contributions: Contributions) -> Payload:
        kinds, count = contributions.kinds, 0
        total: Payload = {}
        for values in contributions.values:
            if set(values) != set(kinds):
                raise self._refused(f"{name} contributes entries that it did not declare")
            count += 1
            for key, value in values.items():
                clipped = self._inside(kinds[key], value)
                total[key] = total[key] + clipped if key in total else clipped
        if count != self.cases:
            # The sensitivity depends on this number.
            raise self._refused(f"{name} has contributions of {withheld(count)} of {self.cases} cases")
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
        """Clip a value to the bounds of its kind, as float64 on the CPU; NaN becomes the middle."""
        value = value.detach().to("cpu", torch.float64)
        if kind == HISTOGRAM:
            return _onto_simplex(value)
        low, high = self.policy.bounds(kind)
        return torch.where(value.isnan(), (low + high) / 2, value).clamp(low, high)

    def collect(self, name: str, exchange: SiteExchange) -> Payload:
        """Return the payload that the site sends for an exchange, after `observe`."""
        if not self.policy.noise_multiplier:
            self.check(name, exchange)
            return exchange.collect()
        if name not in self._means:
            raise self._refused(f"{name}: nothing was observed since the last release")
        private = exchange.privatised(self._means.pop(name), self.cases)
        return {key: self.census.of_all(value) for key, value in private.items()}

    def counts(self, cases: Sequence[int]) -> dict[str, int]:
        """Return the numbers of patients and studies, if the policy allows them."""
        enough = cases and Contributors(torch.tensor([[*cases]])).enough(self.policy.min_images)
        return super().counts(cases) if enough else {}

    def metrics(self) -> dict[str, float]:
        """Return ε and δ of the site's ledger, after this job's first release with noise.

        ``privacy/weights`` is 1 if ε covers the weights.
        """
        if self._epsilon is None:
            return {}
        metrics = {"privacy/epsilon": self._epsilon, "privacy/delta": self.policy.delta}
        return {**metrics, "privacy/weights": 1.0} if self.policy.sgd_noise_multiplier else metrics


class SitePrivacy(Privacy):
    """The policy of a site, and the ledger of its releases, by default in memory only."""

    def __init__(self, policy: PrivacyPolicy, ledger: str | Path | None = None) -> None:
        self.policy, self.ledger = policy, PrivacyLedger(ledger)
        self.min_patients = policy.min_images

    def guard(self, model: SiteModel) -> PrivacyGuard:
        """Return the guard of a site's opened job."""
        folder, parts = model.folder, model.parts.values()
        return PrivacyGuard(
            model.name,
            self.policy,
            cases=len(folder.cases["training"]),
            ledger=self.ledger,
            unsent_state=bool(model.composition.kept_keys)
            or any(part.uses_unsent_statistics for part in parts),
            per_patient=folder.cases_of_patients("training"),
            identities=lambda: case_identities(folder, "training", self.ledger),
            census=model.census,
        )


def own_privacy(trainer: SiteTrainer) -> SitePrivacy:
    """Return the privacy of a trainer of a real federation, which always has one."""
    assert isinstance(trainer.privacy, SitePrivacy)
    return trainer.privacy


def _onto_simplex(values: Tensor) -> Tensor:
    """Project onto histograms along the last axis; uniform for values that are not finite."""
    bins = values.shape[-1]
    finite = values.isfinite().all(dim=-1, keepdim=True)
    values = torch.where(finite, values, torch.ones_like(values) / bins)
    # The projection subtracts one amount from every bin and cuts at zero; the bins that stay positive decide
    # the amount. A common shift of all bins changes nothing, and keeps rounding small.
    values = values - values.amax(dim=-1, keepdim=True)
    largest = values.sort(dim=-1, descending=True).values
    excess = (largest.cumsum(dim=-1) - 1.0) / torch.arange(1, bins + 1, dtype=values.dtype)
    last = (largest > excess).sum(dim=-1, keepdim=True) - 1
    return (values - excess.gather(-1, last)).clamp_min(0.0)
