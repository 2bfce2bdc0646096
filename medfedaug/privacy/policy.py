"""`PrivacyPolicy`: a site's rules for everything that leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from pydantic import Field, Strict

from medfedaug.config.options import Settings, setting, settings
from medfedaug.config.site_description import SiteDescription
from medfedaug.errors import ConfigError
from medfedaug.privacy.kinds import FEATURE_MEAN, FEATURE_STD, INTENSITY_MEAN, INTENSITY_STD

SUMMARY: Final = "summary"
CASES: Final = "cases"

_BOUNDED = (INTENSITY_MEAN, INTENSITY_STD, FEATURE_MEAN, FEATURE_STD)

Bounds = Annotated[tuple[float, float], Strict(False)]  # a list, as in JSON


@settings
class PrivacyPolicy(Settings):
    """A site's rules for everything that leaves it; JSON in the site's settings.

    Raises:
        ConfigError: for invalid values.

    Example:
        >>> policy = PrivacyPolicy.from_dict({"min_images": 20})
        >>> policy.min_images, policy.noise_multiplier
        (20, 0.0)
    """

    TITLE: ClassVar[str] = "privacy: "
    PANEL: ClassVar[str] = "Limits of what leaves the site"
    OPEN: ClassVar[str] = "what the kit says"

    min_images: int = setting(
        10,
        "Least training cases (volumes or photographs, not slices) behind a statistic or histogram that "
        "leaves the site. Where the site's list names patients, patients are counted, here and wherever this "
        "number is a limit.",
        at_least=1,
    )
    noise_multiplier: float = setting(
        0.0,
        "z, the standard deviation of the Gaussian noise on each release, in units of one patient's largest "
        "change (L2); 0 for no noise.",
        at_least=0,
    )
    delta: float = setting(
        1e-5,
        "δ, the probability with which ε does not hold; far below one over the number of patients.",
        above=0,
        below=1,
        rare=True,
    )
    max_epsilon: float | None = setting(
        None,
        "Largest ε of all jobs that share the site's ledger; required with noise.",
        above=0,
        at_most=1e300,
    )
    sgd_noise_multiplier: float = setting(
        0.0,
        "σ, the standard deviation of the Gaussian noise on each step of local training, in units of one "
        "case's largest change (DP-SGD, `medfedaug.federation.site.dp_sgd`); 0 for training without it. "
        "Statistics then need noise too.",
        at_least=0,
    )
    sgd_clip: float = setting(
        1.0,
        "C, the largest norm of one case's gradient in a step of DP-SGD; longer ones are clipped.",
        above=0,
        rare=True,
    )
    clip: Annotated[
        Mapping[str, Bounds], Field(json_schema_extra={"propertyNames": {"enum": list(_BOUNDED)}})
    ] = setting(
        dict,
        'Public bounds by kind, as a JSON object, {"intensity_mean": [0, 255]}: the part of each case is '
        "clipped to them. Public: chosen without the site's images. Needed for the kinds that a job's "
        "methods exchange under noise: intensity_mean, intensity_std (FedRDN, in the images' units), "
        "feature_mean, feature_std (FedFA; FedFAʰ takes feature_mean as its range).",
    )
    cases_per_patient: int = setting(
        1, "Largest number of cases of one patient; the noise grows with it.", at_least=1, rare=True
    )
    scores: str = setting(
        SUMMARY,
        "Form in which validation and test scores leave the site: summary, as means over at least "
        "min_images patients, rounded so that one patient hides in them "
        "(`medfedaug.privacy.released_scores`); or cases, one by one under pseudonyms.",
        choices=(SUMMARY, CASES),
    )
    score_noise_multiplier: float = setting(
        0.0,
        "Standard deviation of the Gaussian noise on the mean scores of a model, in units of one patient's "
        "largest change (L2); 0 for none. They then count against max_epsilon.",
        at_least=0,
    )
    losses: bool = setting(
        False,
        "Let losses over training cases leave the site, each patient's clipped to a public range, as "
        "rounded means over at least min_images patients (`medfedaug.privacy.released_loss`), within "
        "max_validation_scores; or keep them, and refuse methods that exchange losses (feddg_ga). "
        "None leaves with DP-SGD, and none under secure aggregation.",
        flags=("--losses/--keep-losses",),
    )
    lend_models: bool = setting(
        False,
        "Let local and personal models of the site be scored at other sites in an evaluation, or keep them.",
        flags=("--lend-models/--keep-models",),
    )
    allow_differences: bool = setting(
        False,
        "Let a release leave whose set of cases differs from an earlier release's by fewer than min_images "
        "patients (or cases without a patient). The difference of the two reveals these few.",
        rare=True,
    )
    max_validation_scores: int = setting(
        100,
        "Most models whose scores on any validation case may leave within 30 days, over all jobs. A training "
        "job gets one model for each of its rounds. As many losses on any training case may leave, where "
        "losses lets them.",
        at_least=1,
    )
    max_test_scores: int = setting(
        20, "The same for test cases. A training job gets the scores of one model.", at_least=1
    )
    max_unknown_models: int = setting(
        1,
        "Most models in an evaluation job that the site did not meet in a training job, the run's selected "
        "model among them; --cross-site needs more.",
        at_least=0,
    )
    description: SiteDescription = setting(
        SiteDescription,
        "Description of the site's images and patients, which leaves in every job for the model card; none "
        "by default.",
        flags=None,
    )

    def __post_init__(self) -> None:
        if self.score_noise_multiplier and self.scores != SUMMARY:
            raise ConfigError(f"privacy: noise on scores is for means: scores must be {SUMMARY}")
        if self.max_epsilon is None and self.adds_noise:
            raise ConfigError("privacy: with noise, max_epsilon says where the site stops; it is missing")
        if self.max_epsilon is not None and not self.adds_noise:
            # Without noise ε is infinite: no cap can hold.
            raise ConfigError("privacy: max_epsilon means nothing without a noise_multiplier")
        for kind, bounds in self.clip.items():
            _check_bounds(kind, *bounds)

    @property
    def adds_noise(self) -> bool:
        """Return whether statistics, the steps of training, or scores get noise."""
        return bool(self.noise_multiplier or self.sgd_noise_multiplier or self.score_noise_multiplier)

    def bounds(self, kind: str) -> tuple[float, float]:
        """Return the public bounds of a kind.

        Raises:
            ConfigError: when the policy has none.
        """
        if kind not in self.clip:
            raise ConfigError(f'noise needs public bounds: "clip": {{"{kind}": [low, high]}}')
        return self.clip[kind]

    @classmethod
    def of_simulation(cls) -> PrivacyPolicy:
        """Return a policy without limits, for sites that are all on one machine."""
        return cls(min_images=1, scores=CASES, losses=True, lend_models=True)


def _check_bounds(kind: str, low: float, high: float) -> None:
    if kind not in _BOUNDED:
        raise ConfigError(f"privacy: no kind {kind!r} to clip; there are {', '.join(_BOUNDED)}")
    if not low < high:
        raise ConfigError(f"privacy: clip of {kind} must be [low, high], got {[low, high]}")
    if (kind == FEATURE_STD and low < 0) or (kind == INTENSITY_STD and low <= 0):
        sign = "negative" if kind == FEATURE_STD else "0 or less"  # images are divided by INTENSITY_STD
        text = f"privacy: a standard deviation cannot be {sign}: clip of {kind}, got {[low, high]}"
        raise ConfigError(text)
