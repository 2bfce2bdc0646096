"""`PrivacyPolicy`: a site's own rules for what its methods may send."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final

from pydantic import BeforeValidator, Field, Strict, WithJsonSchema

from medfedaug.config.options import Settings, setting, settings
from medfedaug.config.scanners import SCANNERS_SCHEMA, Scanners, check_scanners
from medfedaug.config.site_description import SiteDescription
from medfedaug.errors import ConfigError
from medfedaug.privacy.kinds import FEATURE_MEAN, FEATURE_STD, INTENSITY_MEAN, INTENSITY_STD

SUMMARY: Final = "summary"
CASES: Final = "cases"

_BOUNDED = (INTENSITY_MEAN, INTENSITY_STD, FEATURE_MEAN, FEATURE_STD)

Bounds = Annotated[tuple[float, float], Strict(False)]  # a list, as in JSON


@settings
class PrivacyPolicy(Settings):
    """A site's own rules for what its methods send; JSON in the site's settings.

    Raises:
        ConfigError: for values that make no sense.

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
        "Least training cases (volumes or photographs, not slices) that a statistic or histogram which "
        "leaves the site is of. Where the site's list says whose a case is, patients are counted, here and "
        "wherever this number is a limit.",
        at_least=1,
    )
    noise_multiplier: float = setting(
        0.0,
        "z, the standard deviation of the Gaussian noise on each release in units of what one patient can "
        "change (L2); 0 for no noise.",
        at_least=0,
    )
    delta: float = setting(
        1e-5,
        "δ, the probability for which ε does not hold; far below one over the number of patients.",
        above=0,
        below=1,
        rare=True,
    )
    max_epsilon: float | None = setting(
        None,
        "Most that the site spends, over all jobs that share its ledger; required with noise.",
        above=0,
        at_most=1e300,
    )
    sgd_noise_multiplier: float = setting(
        0.0,
        "σ, the standard deviation of the Gaussian noise on each step of local training, in units of what "
        "one case can change (DP-SGD, `medfedaug.federation.site.dp_sgd`); 0 for training without it. "
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
        "clipped to them. Public: chosen without a look at the site's own images. Needed for the kinds "
        "that a job's methods exchange under noise: intensity_mean, intensity_std (FedRDN, in the images' "
        "units), feature_mean, feature_std (FedFA; FedFAʰ takes feature_mean as its range).",
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
        "Standard deviation of the Gaussian noise on the mean scores of a model, in units of what one "
        "patient can change (L2); 0 for none. They then count against max_epsilon.",
        at_least=0,
    )
    losses: bool = setting(
        False,
        "Let losses over training cases leave the site, each patient's clipped to a public range, as "
        "rounded means over at least min_images patients (`medfedaug.privacy.released_loss`), within "
        "max_validation_scores; or keep them, and refuse methods that exchange losses (fedce, feddg_ga). "
        "None leaves with DP-SGD, and none under secure aggregation.",
        flags=("--losses/--keep-losses",),
    )
    lend_models: bool = setting(
        False,
        "Let models that the site trained for itself, alone or personal, be scored at other sites in an "
        "evaluation, or keep them.",
        flags=("--lend-models/--keep-models",),
    )
    allow_differences: bool = setting(
        False,
        "Let something about a set of cases leave that differs by fewer than min_images patients, or cases "
        "that name none, from the set of an earlier release. Their difference is about these few.",
        rare=True,
    )
    max_validation_scores: int = setting(
        100,
        "Most models whose scores on any validation case may leave within 30 days, over all jobs. A training "
        "job gets those of its rounds, one model each, and no more. As many losses on any training case may "
        "leave, where losses lets them.",
        at_least=1,
    )
    max_test_scores: int = setting(
        20, "The same of test cases. A training job gets those of one model.", at_least=1
    )
    max_unknown_models: int = setting(
        1,
        "Most models in an evaluation job that the site did not meet in a training job, the run's selected "
        "model among them; --cross-site needs more.",
        at_least=0,
    )
    scanners: Annotated[Scanners, BeforeValidator(check_scanners), WithJsonSchema(SCANNERS_SCHEMA)] = setting(
        dict,
        "Manufacturers of the site's scanners, each with its models, which all sites are told in an exchange "
        "of fingerprints (`medfedaug export --prospect`); none by default.",
        flags=None,
    )
    description: SiteDescription = setting(
        SiteDescription,
        "The site's images and patients in its own words, which leave in every job for the model card; none "
        "by default.",
        flags=None,
    )

    def __post_init__(self) -> None:
        if self.score_noise_multiplier and self.scores != SUMMARY:
            raise ConfigError(f"privacy: noise on scores is for means: scores must be {SUMMARY}")
        if self.max_epsilon is None and self.adds_noise:
            raise ConfigError("privacy: with noise, max_epsilon says where the site stops; it is missing")
        if self.max_epsilon is not None and not self.adds_noise:
            # Without noise ε is infinite: a cap would promise what nothing keeps.
            raise ConfigError("privacy: max_epsilon means nothing without a noise_multiplier")
        for kind, bounds in self.clip.items():
            _check_bounds(kind, *bounds)

    @property
    def adds_noise(self) -> bool:
        """Return whether anything gets noise: statistics, the steps of training, or scores."""
        return bool(self.noise_multiplier or self.sgd_noise_multiplier or self.score_noise_multiplier)

    def bounds(self, kind: str) -> tuple[float, float]:
        """The public bounds of a kind.

        Raises:
            ConfigError: when the policy has none.
        """
        if kind not in self.clip:
            raise ConfigError(f'noise needs public bounds: "clip": {{"{kind}": [low, high]}}')
        return self.clip[kind]

    @classmethod
    def of_simulation(cls) -> PrivacyPolicy:
        """Return a policy that lets everything pass, for sites that are all on one machine."""
        return cls(min_images=1, scores=CASES, losses=True, lend_models=True)


def _check_bounds(kind: str, low: float, high: float) -> None:
    if kind not in _BOUNDED:
        raise ConfigError(f"privacy: no kind {kind!r} to clip; there are {', '.join(_BOUNDED)}")
    if not low < high:
        raise ConfigError(f"privacy: clip of {kind} must be [low, high], got {[low, high]}")
    if (kind == FEATURE_STD and low < 0) or (kind == INTENSITY_STD and low <= 0):
        # Images are divided by the latter.
        sign = "negative" if kind == FEATURE_STD else "0 or less"
        raise ConfigError(
            f"privacy: a standard deviation cannot be {sign}: clip of {kind}, got {[low, high]}"
        )
