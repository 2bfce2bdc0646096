"""`PrivacyLedger`: what a site has spent of its budget, and what a release costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from medfedaug.checks import is_number
from medfedaug.errors import ConfigError
from medfedaug.files import parse_versioned, write_versioned

__all__ = ["PrivacyLedger", "epsilon_spent", "noise_multiplier_for"]

_KIND, _VERSION = "privacy_ledger", 1

Releases = list[tuple[float, int]]

# Orders of the Rényi divergence: those of Opacus, and larger ones for budgets below 1.
_ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64)) + [2**k for k in range(6, 12)]


def require_opacus() -> Any:
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
        releases: noise multipliers, each with its number of releases. Each uses all cases (sampling rate 1).
        delta: δ.

    Raises:
        ConfigError: without Opacus.
    """
    accountant = require_opacus().RDPAccountant()
    accountant.history = [(noise, 1.0, count) for noise, count in releases]
    return float(accountant.get_epsilon(delta=delta, alphas=_ORDERS)) if accountant.history else 0.0


def noise_multiplier_for(epsilon: float, delta: float, releases: int) -> float:
    """The smallest noise multiplier with which a number of releases spend at most ε together.

    Args:
        epsilon: ε.
        delta: δ.
        releases: their number: FedRDN has one per job, FedFA and FedFAʰ have one per round each.

    Raises:
        ConfigError: without Opacus, and for a budget that no noise keeps.
    """
    utils = require_opacus().utils
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
    """The number and noise of the releases that a site has made, over all of its jobs and restarts.

    Args:
        path: a JSON file, written whole; jobs that run at the same time take turns by a lock beside it.
            ``None`` keeps the account in memory, for a simulation.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self._memory: Releases = []

    def releases(self) -> Releases:
        """The noise multipliers so far, each with its number of releases.

        Raises:
            ConfigError: for a file that is not a ledger; what was spent is then unknown, and nothing may be.
        """
        if self.path is None:
            return list(self._memory)
        if not self.path.exists():
            return []
        try:
            content = parse_versioned(self.path.read_text(encoding="utf-8"), _KIND, _VERSION)
            releases = [(float(e["noise_multiplier"]), e["releases"]) for e in content["spent"]]
            if not all(is_number(z) and z > 0 and type(n) is int and n > 0 for z, n in releases):
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
        write_versioned(self.path, _KIND, _VERSION, {"spent": spent})

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self.path is None:
            yield
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(self.path.with_name(f"{self.path.name}.lock")):
            yield
