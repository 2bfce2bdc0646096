"""What a site lets its methods send beside the model: a least number of cases, noise, and a budget for it.

The policy belongs to the site and is never part of a job. Everything that a method's exchange gives passes
through the site's `PrivacyGuard`, and nothing else does: model weights, losses, scores and numbers of samples
are not covered by any ε that is printed here. ``docs/privacy.md`` has the threat model and the argument.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from medfedaug.errors import ConfigError, PrivacyRefused
from medfedaug.files import parse_json, write_atomic
from medfedaug.methods.base import (
    FEATURE_MEAN,
    FEATURE_STD,
    HISTOGRAM,
    INTENSITY_MEAN,
    INTENSITY_STD,
    Contributions,
    Payload,
    SiteExchange,
)

__all__ = ["PrivacyGuard", "PrivacyLedger", "PrivacyPolicy", "epsilon_spent", "noise_multiplier_for"]

_BOUNDED = (INTENSITY_MEAN, INTENSITY_STD, FEATURE_MEAN, FEATURE_STD)
_FORMAT, _VERSION = "medfedaug.privacy_ledger", 1
_log = logging.getLogger(__name__)

Releases = list[tuple[float, int]]

# Orders of the Rényi divergence: those of Opacus, and larger ones for budgets below 1.
_ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [2**k for k in range(6, 12)]


@dataclass(frozen=True)
class PrivacyPolicy:
    """A site's own rules for what its methods send; JSON in the site's settings.

    Args:
        min_images: statistics and histograms leave the site only if it has at least so many training cases
            (volumes or photographs, not slices).
        noise_multiplier: z, the standard deviation of the Gaussian noise on each release in units of what
            one patient can change (L2); 0 for no noise.
        delta: δ, the probability for which ε does not hold; far below one over the number of patients.
        max_epsilon: what the site spends at most, over all jobs that share its ledger; must be given where
            there is noise.
        clip: public bounds by kind, ``{"intensity_mean": [0, 255]}``: what each case contributes is clipped
            to them. Public: chosen without a look at the site's own images. Needed for the kinds that a
            job's methods exchange: ``intensity_mean``, ``intensity_std`` (FedRDN, in the images' units),
            ``feature_mean``, ``feature_std`` (FedFA; FedFAʰ takes ``feature_mean`` as its range).
        cases_per_patient: as many cases as one patient may have at most; the noise grows with it.

    Raises:
        ConfigError: for values that make no sense.

    Example:
        >>> policy = PrivacyPolicy.from_dict({"min_images": 20})
        >>> policy.min_images, policy.noise_multiplier
        (20, 0.0)
    """

    min_images: int = 10
    noise_multiplier: float = 0.0
    delta: float = 1e-5
    max_epsilon: float | None = None
    clip: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    cases_per_patient: int = 1

    def __post_init__(self) -> None:
        for name in ("min_images", "cases_per_patient"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"privacy: {name} must be a whole number from 1 on, got {value!r}")
        if not _is_number(self.noise_multiplier) or self.noise_multiplier < 0:
            raise ConfigError(
                f"privacy: noise_multiplier must be a number from 0 on, got {self.noise_multiplier!r}"
            )
        if not _is_number(self.delta) or not 0 < self.delta < 1:
            raise ConfigError(f"privacy: delta is a probability, got {self.delta!r}")
        if self.max_epsilon is None and self.noise_multiplier:
            raise ConfigError("privacy: with noise, max_epsilon says where the site stops; it is missing")
        if self.max_epsilon is not None:
            if not _is_number(self.max_epsilon) or self.max_epsilon <= 0:
                raise ConfigError(f"privacy: max_epsilon must be a positive number, got {self.max_epsilon!r}")
            if not self.noise_multiplier:
                # Without noise ε is infinite: a cap would promise what nothing keeps.
                raise ConfigError("privacy: max_epsilon means nothing without a noise_multiplier")
        if not isinstance(self.clip, Mapping):
            raise ConfigError(f"privacy: clip is a mapping from kind to [low, high], got {self.clip!r}")
        object.__setattr__(self, "clip", {kind: _bounds(kind, pair) for kind, pair in self.clip.items()})

    def bounds(self, kind: str) -> tuple[float, float]:
        """The public bounds of a kind.

        Raises:
            ConfigError: when the policy has none.
        """
        if kind not in self.clip:
            raise ConfigError(f'noise needs public bounds: "clip": {{"{kind}": [low, high]}}')
        return self.clip[kind]

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain JSON types."""
        clip = {kind: list(pair) for kind, pair in self.clip.items()}
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {"clip": clip}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPolicy:
        """The inverse of `to_dict`; what is not there keeps its default.

        Raises:
            ConfigError: for unknown keys, which would silently protect nothing, and impossible values.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"privacy: expected an object of settings, got {values!r}")
        known = [f.name for f in dataclasses.fields(cls)]
        unknown = sorted(map(str, set(values) - set(known)))
        if unknown:
            raise ConfigError(f"privacy: unknown settings {', '.join(unknown)}; known: {', '.join(known)}")
        return cls(**dict(values))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _bounds(kind: str, pair: Any) -> tuple[float, float]:
    if kind not in _BOUNDED:
        raise ConfigError(f"privacy: no kind {kind!r} to clip; there are {', '.join(_BOUNDED)}")
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(map(_is_number, pair)):
        raise ConfigError(f"privacy: clip of {kind} must be two numbers, got {pair!r}")
    low, high = float(pair[0]), float(pair[1])
    if not low < high:
        raise ConfigError(f"privacy: clip of {kind} must be [low, high], got {pair!r}")
    if (kind == FEATURE_STD and low < 0) or (kind == INTENSITY_STD and low <= 0):
        # Images are divided by the latter.
        sign = "negative" if kind == FEATURE_STD else "0 or less"
        raise ConfigError(f"privacy: a standard deviation cannot be {sign}: clip of {kind}, got {pair!r}")
    return low, high


def _opacus() -> Any:
    try:
        import opacus.accountants
        import opacus.accountants.utils
    except ImportError as error:
        raise ConfigError(
            "privacy: noise needs Opacus for its account; pip install 'medfedaug[privacy]'"
        ) from error
    return opacus.accountants


def epsilon_spent(releases: Iterable[tuple[float, int]], delta: float) -> float:
    """ε of Gaussian releases together, by Opacus' accountant of Rényi differential privacy.

    Args:
        releases: noise multiplier, and how many releases had it. Each uses all cases (sampling rate 1).
        delta: δ.

    Raises:
        ConfigError: without Opacus.
    """
    accountant = _opacus().RDPAccountant()
    accountant.history = [(noise, 1.0, count) for noise, count in releases]
    return float(accountant.get_epsilon(delta=delta, alphas=_ORDERS)) if accountant.history else 0.0


def noise_multiplier_for(epsilon: float, delta: float, releases: int) -> float:
    """The noise multiplier with which so many releases spend ε together, and no more.

    Args:
        epsilon: ε.
        delta: δ.
        releases: FedRDN has one a job, FedFA and FedFAʰ have one a round each.

    Raises:
        ConfigError: without Opacus, and for a budget that no noise keeps.
    """
    utils = _opacus().utils
    try:
        return float(
            utils.get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=1.0,
                steps=releases,
                epsilon_tolerance=min(0.01, epsilon / 100),
                alphas=_ORDERS,
            )
        )
    except ValueError as error:
        raise ConfigError(f"privacy: ε = {epsilon} with δ = {delta}: {error}") from error


class PrivacyLedger:
    """How many releases with which noise a site has made, over all of its jobs and restarts.

    Args:
        path: a JSON file, written whole; jobs that run at the same time take turns by a lock beside it.
            ``None`` keeps the account in memory, for a simulation.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self._memory: Releases = []

    def releases(self) -> Releases:
        """Noise multiplier and number of releases that had it.

        Raises:
            ConfigError: for a file that is not a ledger; what was spent is then unknown, and nothing may be.
        """
        if self.path is None:
            return list(self._memory)
        if not self.path.exists():
            return []
        try:
            content = parse_json(self.path.read_text(encoding="utf-8"))
            if content["format"] != _FORMAT or content["version"] != _VERSION:
                raise ValueError(f"format {content['format']!r}, version {content['version']!r}")
            releases = [(float(e["noise_multiplier"]), e["releases"]) for e in content["spent"]]
            if not all(_is_number(z) and z > 0 and type(n) is int and n > 0 for z, n in releases):
                raise ValueError("an entry that is no release")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.path} is not a privacy ledger of this version ({error}): what was spent is not "
                "known, so nothing more is"
            ) from error
        return releases

    def spend(self, noise_multiplier: float, delta: float, max_epsilon: float) -> float | None:
        """Enter one more release.

        It is in the file before anything leaves the site: a crash in between costs budget, and never gives
        any away.

        Returns:
            ε of all releases together; ``None``, with nothing entered, when that is more than
            ``max_epsilon``.
        """
        with self._locked():
            counts = dict[float, int]()
            for noise, count in [*self.releases(), (noise_multiplier, 1)]:
                counts[noise] = counts.get(noise, 0) + count
            releases = list(counts.items())
            epsilon = epsilon_spent(releases, delta)
            if not epsilon <= max_epsilon:
                return None
            self._write(releases)
            return epsilon

    def _write(self, releases: Releases) -> None:
        if self.path is None:
            self._memory = releases
            return
        spent = [{"noise_multiplier": noise, "releases": count} for noise, count in releases]
        content = json.dumps({"format": _FORMAT, "version": _VERSION, "spent": spent}, indent=1) + "\n"
        write_atomic(self.path, lambda file: file.write(content.encode()))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f"{self.path.name}.lock")):
            yield


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

    Raises:
        ConfigError: when noise is asked for and Opacus is not installed.
    """

    def __init__(
        self,
        site: str,
        policy: PrivacyPolicy,
        cases: int,
        ledger: PrivacyLedger | None = None,
        unsent_state: bool = False,
        generator: random.Random | None = None,
    ) -> None:
        self.site, self.policy, self.cases, self.unsent_state = site, policy, cases, unsent_state
        self.ledger = ledger or PrivacyLedger()
        self.generator = generator or random.SystemRandom()
        self._means: dict[str, Payload] = {}
        self._epsilon: float | None = None
        if policy.noise_multiplier:
            _opacus()

    def check(self, name: str, exchange: SiteExchange) -> None:
        """Whether the policy ever lets this exchange happen; called before any work is done.

        Args:
            name: the method's.
            exchange: its site half.

        Raises:
            PrivacyRefused: naming site, method and the policy's limit.
        """
        summarised = self.cases if exchange.summarises is None else min(exchange.summarises, self.cases)
        if summarised < self.policy.min_images:
            raise PrivacyRefused(
                self.site,
                f"{name}'s statistics would summarise {summarised} images, and this site sends them from "
                f"{self.policy.min_images} on (min_images of its privacy policy)",
            )
        if self.policy.noise_multiplier:
            self._contributions(name, exchange)

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
        """Make the noisy mean of an exchange and enter it in the ledger; without noise, nothing.

        Must be called while the network is as the server sent it. Trained on, it would depend on every
        case, and so would what each of them contributes.

        Raises:
            PrivacyRefused: when the policy or its budget does not allow it.
        """
        policy = self.policy
        self.check(name, exchange)
        if not policy.noise_multiplier:
            return
        contributions = self._contributions(name, exchange)
        assert policy.max_epsilon is not None
        try:
            epsilon = self.ledger.spend(policy.noise_multiplier, policy.delta, policy.max_epsilon)
        except ConfigError as error:
            raise PrivacyRefused(self.site, str(error)) from error
        if epsilon is None:
            raise PrivacyRefused(
                self.site,
                f"privacy budget spent: one more release of {name} would exceed ε = {policy.max_epsilon:g} "
                f"(δ = {policy.delta:g})",
            )
        self._means[name] = self._noisy_mean(name, contributions)
        self._epsilon = epsilon
        _log.info(
            "site %s: %s: statistics of %d cases with noise; ε = %.3g of %g spent at δ = %g over all jobs, "
            "on statistics alone: model weights, losses and scores are not covered",
            *(self.site, name, self.cases, epsilon, policy.max_epsilon, policy.delta),
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
        """The nearest value within the bounds of its kind, float64 and on the CPU; NaN is their middle."""
        value = value.detach().to("cpu", torch.float64)
        if kind == HISTOGRAM:
            return _onto_simplex(value)
        low, high = self.policy.bounds(kind)
        return torch.where(value.isnan(), (low + high) / 2, value).clamp(low, high)

    def collect(self, name: str, exchange: SiteExchange) -> Payload:
        """What the site sends for an exchange, after `observe`.

        Raises:
            PrivacyRefused: when the policy does not allow it.
        """
        if not self.policy.noise_multiplier:
            self.check(name, exchange)
            return exchange.collect()
        if name not in self._means:
            raise PrivacyRefused(self.site, f"{name}: nothing was observed since the last release")
        return exchange.privatised(self._means.pop(name), self.cases)

    def metrics(self) -> dict[str, float]:
        """ε and δ of all that the site's ledger holds, once this job has released anything with noise."""
        if self._epsilon is None:
            return {}
        return {"privacy/epsilon": self._epsilon, "privacy/delta": self.policy.delta}


def _onto_simplex(values: Tensor) -> Tensor:
    """The nearest histograms, along the last axis; uniform where there is a value that is not finite."""
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
