"""`PrivacyPolicy`: a site's own rules for what its methods may send."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, ClassVar, Final, Literal

from annotated_types import Ge, Gt, Lt
from pydantic import BeforeValidator, Field, Strict, WithJsonSchema
from pydantic.dataclasses import dataclass

from medfedaug.config.scanners import SCANNERS_SCHEMA, Scanners, check_scanners
from medfedaug.config.site_description import SiteDescription
from medfedaug.config.validated import STRICT, OneLineErrors
from medfedaug.errors import ConfigError
from medfedaug.privacy.kinds import FEATURE_MEAN, FEATURE_STD, INTENSITY_MEAN, INTENSITY_STD
from medfedaug.utils.validation import check_keys

__all__ = ["CASES", "SUMMARY", "PrivacyPolicy"]

SUMMARY: Final = "summary"
CASES: Final = "cases"

_BOUNDED = (INTENSITY_MEAN, INTENSITY_STD, FEATURE_MEAN, FEATURE_STD)

Count = Annotated[int, Ge(1)]
Multiplier = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Bounds = Annotated[tuple[float, float], Strict(False)]  # a list, as in JSON


def _described(value: Any) -> SiteDescription:
    return value if isinstance(value, SiteDescription) else SiteDescription.from_dict(value)


@dataclass(frozen=True, config=STRICT)
class PrivacyPolicy(OneLineErrors):
    """A site's own rules for what its methods send; JSON in the site's settings.

    Args:
        min_images: statistics and histograms leave the site only if they are of at least this many training
            cases (volumes or photographs, not slices). Where the site's list says whose a case is, patients
            are counted, here and wherever this number is a limit.
        noise_multiplier: z, the standard deviation of the Gaussian noise on each release in units of what
            one patient can change (L2); 0 for no noise.
        delta: δ, the probability for which ε does not hold; far below one over the number of patients.
        max_epsilon: the most that the site spends, over all jobs that share its ledger; required with noise.
        sgd_noise_multiplier: σ, the standard deviation of the Gaussian noise on each step of local training,
            in units of what one case can change (DP-SGD, `medfedaug.federation.site.dp_sgd`); 0 for
            training without it. Statistics then need noise too.
        sgd_clip: C, the largest norm of one case's gradient in a step of DP-SGD; longer ones are clipped.
        clip: public bounds by kind, ``{"intensity_mean": [0, 255]}``: what each case contributes is clipped
            to them. Public: chosen without a look at the site's own images. Needed for the kinds that a
            job's methods exchange: ``intensity_mean``, ``intensity_std`` (FedRDN, in the images' units),
            ``feature_mean``, ``feature_std`` (FedFA; FedFAʰ takes ``feature_mean`` as its range).
        cases_per_patient: the largest number of cases of one patient; the noise grows with it.
        scores: how validation and test scores leave the site: ``"summary"``, as means over at least
            ``min_images`` patients, rounded so that one patient hides in them
            (`medfedaug.privacy.released_scores`); or ``"cases"``, one by one.
        score_noise_multiplier: the standard deviation of the Gaussian noise on the mean scores of a model, in
            units of what one patient can change (L2); 0 for none. They then count against ``max_epsilon``.
        losses: whether losses over training cases leave the site, each patient's clipped to a public range,
            as a rounded mean (`medfedaug.privacy.released_loss`). Otherwise none does, and methods that
            exchange losses are refused. None leaves with DP-SGD, and none under secure aggregation.
        allow_differences: whether something about a set of cases may leave that differs by fewer than
            ``min_images`` patients, or cases that name none, from the set of an earlier release. Their
            difference is about these few.
        max_validation_scores: of how many models the scores on any validation case may leave within 30 days,
            over all jobs. A training job gets those of its rounds, one model each, and no more. As many
            losses on any training case may leave, where ``losses`` lets them.
        max_test_scores: the same of test cases. A training job gets those of one model.
        max_unknown_models: how many models an evaluation job may have scored that this site did not meet in
            a training job, the run's selected model among them.
        lend_models: whether the site sends a model of its own, trained by it alone or personal, to be scored
            at other sites in an evaluation.
        scanners: manufacturers of the site's scanners, each with its models, which all sites are told in an
            exchange of fingerprints (`medfedaug export --prospect`); none by default.
        description: the site's images and patients in its own words, which leave in every job for the model
            card; none by default.

    Raises:
        ConfigError: for values that make no sense.

    Example:
        >>> policy = PrivacyPolicy.from_dict({"min_images": 20})
        >>> policy.min_images, policy.noise_multiplier
        (20, 0.0)
    """

    SETTINGS: ClassVar[str] = "privacy: "

    min_images: Count = 10
    noise_multiplier: Multiplier = 0.0
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    max_epsilon: Positive | None = None
    sgd_noise_multiplier: Multiplier = 0.0
    sgd_clip: Positive = 1.0
    clip: Annotated[
        Mapping[str, Bounds], Field(json_schema_extra={"propertyNames": {"enum": list(_BOUNDED)}})
    ] = field(default_factory=dict)
    cases_per_patient: Count = 1
    scores: Literal["summary", "cases"] = SUMMARY
    score_noise_multiplier: Multiplier = 0.0
    losses: bool = False
    lend_models: bool = False
    allow_differences: bool = False
    max_validation_scores: Count = 100
    max_test_scores: Count = 20
    max_unknown_models: Annotated[int, Ge(0)] = 1
    scanners: Annotated[Scanners, BeforeValidator(check_scanners), WithJsonSchema(SCANNERS_SCHEMA)] = field(
        default_factory=dict
    )
    description: Annotated[SiteDescription, BeforeValidator(_described)] = field(
        default_factory=SiteDescription
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

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain JSON types."""
        clip = {kind: list(pair) for kind, pair in self.clip.items()}
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        told = {"scanners": dict(self.scanners), "description": self.description.to_dict()}
        return values | {"clip": clip, **told}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyPolicy:
        """The inverse of `to_dict`; what is not there keeps its default.

        Raises:
            ConfigError: for unknown keys, which would silently protect nothing, and impossible values.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"privacy: expected an object of settings, got {values!r}")
        check_keys("privacy: unknown settings", values, [f.name for f in dataclasses.fields(cls)])
        return cls(**dict(values))


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
