"""Audits of DP-SGD: can somebody who knows all other cases, and the model, tell one case from its silence?

A site answers the same request again and again, once with the audited case and once with that case never
drawn. What comes is projected on the direction in which the case moves it, and a threshold is chosen; on
answers that took no part in the choice it then gives a lower bound on ε, which must be below what the site
claims (Jagielski et al., NeurIPS 2020; Nasr et al., USENIX Security 2023). With `-s` each audit prints a row
of the table in docs/privacy/training.md: the draws, the ε that the site claims, the lower bounds on ε for any
mechanism and for a Gaussian one, and that on μ, with 95% confidence.
"""

import random
from functools import cache

import numpy as np
import pytest
import reference
import torch
from private import PrivateSite, dropping, private, smooth
from scipy.optimize import brentq
from scipy.stats import beta, norm

from medfedaug.config.plan import Plan
from medfedaug.data.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.hospital.privacy import PrivacyLedger, ledger
from medfedaug.methods import parse_methods
from medfedaug.models import networks
from medfedaug.simulate import configure

pytestmark = pytest.mark.slow

DELTA = 1e-5
SHOWN, ASSERTED = 0.05, 1e-4
"""How often a bound may be wrong: of those that are published, and of those that must hold in every run."""
CHOOSE, JUDGE = 200, 500
ROUNDS = 10**6
ONE_STEP = {"local_steps": 1, "batch_size": 64}
COMMON = {"rounds": ROUNDS, "validate_every": ROUNDS, "learning_rate": 1.0, "optimizer": "sgd"}


def bounds(
    present: np.ndarray, silent: np.ndarray, threshold: float, mistake: float = SHOWN
) -> tuple[float, float]:
    """Lower bounds of ε at δ for any mechanism, and of μ for a Gaussian one (Clopper and Pearson).

    Args:
        present: scores with the case.
        silent: scores without.
        threshold: above it the case is said to be there.
        mistake: how often both rates of mistakes together may be underestimated.
    """

    def largest(wrong: int, of: int) -> float:
        return float(beta.ppf(1 - mistake / 2, wrong + 1, of - wrong)) if wrong < of else 1.0

    missed = largest(int((present <= threshold).sum()), len(present))
    false = largest(int((silent > threshold).sum()), len(silent))
    pairs = [(1 - missed - DELTA, false), (1 - false - DELTA, missed)]
    epsilon = max((float(np.log(a / b)) for a, b in pairs if a > 0), default=0.0)
    return max(epsilon, 0.0), float(norm.ppf(1 - false) - norm.ppf(missed))


def gaussian_epsilon(mu: float) -> float:
    """ε at δ of a Gaussian mechanism with sensitivity μ and noise of deviation 1 (Balle and Wang, 2018)."""

    def over(epsilon: float) -> float:
        tail = np.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
        return float(norm.cdf(-epsilon / mu + mu / 2) - tail - DELTA)

    return float(brentq(over, 0.0, 500.0)) if mu > 0 and over(0.0) > 0 else 0.0


class Audit:
    """Two sites, of which one never draws the audited cases.

    Args:
        make: a site with a policy.
        noise: its noise multiplier.
        cases: those that are audited.
        before: called before each request.
        policy: further settings.
    """

    def __init__(self, make, noise: float, cases=(0,), before=lambda site: None, **policy) -> None:
        self.make, self.noise, self.cases, self.before, self.policy = make, noise, cases, before, policy
        self.claimed = 0.0

    def answers(self, noise: float, count: int, silent) -> torch.Tensor:
        site = self.make(private(sgd_noise_multiplier=noise, **self.policy)).silence(silent)
        steps = []
        for _ in range(count):
            site.trainer.guard.ledger = PrivacyLedger()  # of one round alone
            self.before(site)
            steps.append(site.step().float())
        self.claimed = site.trainer.guard.metrics()["privacy/epsilon"]
        return torch.stack(steps)

    def run(self, name: str) -> tuple[float, float]:
        quiet = [self.answers(1e-7, 40, silent).mean(0) for silent in ((), self.cases)]
        direction = quiet[0] - quiet[1]
        scores = [
            (self.answers(self.noise, CHOOSE + JUDGE, silent) @ direction).numpy()
            for silent in ((), self.cases)
        ]
        chosen, judged = [s[:CHOOSE] for s in scores], [s[CHOOSE:] for s in scores]
        candidates = np.quantile(np.concatenate(chosen), np.linspace(0.02, 0.98, 97))
        by_epsilon = max(candidates, key=lambda t: bounds(*chosen, t)[0])
        by_mu = max(candidates, key=lambda t: bounds(*chosen, t)[1])
        epsilon, mu = bounds(*judged, by_epsilon)[0], bounds(*judged, by_mu)[1]
        print(f"\n| {name} | {self.claimed:.2f} | {epsilon:.2f} | {gaussian_epsilon(mu):.2f} | {mu:.2f} |")
        return bounds(*judged, by_epsilon, ASSERTED)[0], bounds(*judged, by_mu, ASSERTED)[1]


@pytest.fixture
def photographs(make_photos, tmp_path, monkeypatch):
    """`photographs(network="reference_linear")(policy)`: site A, of six training photographs."""
    for name, network in {**reference.NETWORKS, "reference_dropping": dropping}.items():
        monkeypatch.setitem(networks._NETWORKS, name, network)
    for name in "ABC":
        make_photos(name, 5, size=8)

    def make(**changes):
        values = {"network": "reference_linear", **ONE_STEP, **COMMON, **changes}
        config = configure(find_sites(tmp_path / "photos"), methods=tuple(parse_methods("fedavg")), **values)
        return lambda policy: PrivateSite(config, tmp_path / "photos", policy)

    return make


@pytest.fixture
def volumes(tmp_path, monkeypatch, tiny_config):
    """`volumes(plan=Plan())(policy)`: site A, of three training volumes."""
    monkeypatch.setitem(networks._NETWORKS, "reference_smooth", smooth)
    make_phantom(tmp_path / "data", sites=1, patients=5, shape=(24, 24, 8))

    def make(**changes):
        values = {"network": "reference_smooth", "network_args": {}, **ONE_STEP, **COMMON, **changes}
        config = tiny_config(**values)
        return lambda policy: PrivateSite(config, tmp_path / "data/site_A", policy, "site_A")

    return make


OF_PHOTOGRAPHS = {
    "nothing random": {},
    "dropout": {"network": "reference_dropping"},
    "flip": {"augmentation": "flip"},
    "flip_rotate": {"augmentation": "flip_rotate"},
    "intensity": {"augmentation": "intensity"},
    "full": {"augmentation": "full"},
    "dropout and full": {"network": "reference_dropping", "augmentation": "full"},
}
OF_VOLUMES = {
    "slices": {},
    "slices, full": {"augmentation": "full"},
    "patches of slices": {"plan": Plan(patch_size=(16, 16))},
    "patches of volumes, full": {
        "plan": Plan(patch_size=(16, 16, 4), spatial_dims=3),
        "augmentation": "full",
    },
}


def assert_kept(audit: Audit, name: str) -> float:
    """Nothing is told beyond the claim. Returns the lower bound of μ."""
    epsilon, mu = audit.run(name)
    assert epsilon <= audit.claimed
    assert mu <= 1.0
    return mu


@pytest.mark.parametrize("name", OF_PHOTOGRAPHS)
def test_photographs(photographs, name):
    """The deviation of the noise is what one case may move the sum by: μ = 1.

    What is drawn for the other cases hides the audited one further, and all the more the more is drawn.
    """
    mu = assert_kept(Audit(photographs(**OF_PHOTOGRAPHS[name]), 1.0), name)
    if name == "nothing random":  # an audit that sees nothing would show nothing
        assert mu > 0.3


@pytest.mark.parametrize("name", OF_VOLUMES)
def test_volumes(volumes, name):
    assert_kept(Audit(volumes(**OF_VOLUMES[name]), 1.0, sgd_clip=0.02), name)


@pytest.mark.parametrize("changes", [{}, OF_PHOTOGRAPHS["dropout and full"]], ids=["plain", "random"])
def test_two_cases_of_a_patient(photographs, changes):
    """Noise twice as long, for two cases that are there together or not at all."""
    name = f"two cases of a patient{', dropout and full' if changes else ''}"
    assert_kept(Audit(photographs(**changes), 2.0, cases=(0, 1), cases_per_patient=2), name)


def test_five_steps_of_half_of_the_cases(photographs, monkeypatch):
    monkeypatch.setattr(ledger, "epsilon_spent", _remembered(ledger.epsilon_spent))
    audit = Audit(photographs(batch_size=3, local_steps=5, augmentation="flip_rotate"), 0.8)
    epsilon, _ = audit.run("five steps of half of the cases, flip_rotate")
    assert 0.0 < epsilon <= audit.claimed


def _remembered(account):
    """An account of the same releases takes a second."""
    known = cache(lambda releases, delta: account(releases, delta))
    return lambda releases, delta: known(tuple(releases), delta)


def test_the_audit_finds_draws_that_all_cases_share(photographs):
    """Where the draws follow from what everybody knows, one case more shifts those of all that follow."""

    def public(site: PrivateSite) -> None:
        site.trainer.training.random = random.Random(0)

    audit = Audit(photographs(**OF_PHOTOGRAPHS["dropout"]), 1.0, before=public)
    _, mu = audit.run("dropout, drawn from one public seed")
    assert mu > 1.0
    assert gaussian_epsilon(mu) > audit.claimed
