"""`PrivacyPolicy`: a site's rules for everything that leaves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Strict

from medfedaug.config.kinds import FEATURE_MEAN, FEATURE_STD, INTENSITY_MEAN, INTENSITY_STD
from medfedaug.config.options import Settings, setting, settings
from medfedaug.errors import ConfigError, JobRefused, withheld
from medfedaug.utils.validation import check_keys

OPEN_PROMISE = (
    "whoever chooses the weights of a job can reconstruct your images from what it sends; approve a job "
    "only if you trust them"
)
"""The sentence about a site without an account of ε (promise B of ``docs/privacy.md``)."""

_NOISE = {"noise_multiplier": 8.0, "sgd_noise_multiplier": 1.0, "score_noise_multiplier": 8.0}
"""The multipliers of a policy that names epsilon and none of them."""

_BOUNDED = (INTENSITY_MEAN, INTENSITY_STD, FEATURE_MEAN, FEATURE_STD)

Bounds = Annotated[tuple[float, float], Strict(False)]  # a list, as in JSON


@settings
class PrivacyPolicy(Settings):
    """A site's rules for everything that leaves it; JSON in the site's settings.

    Example:
        >>> policy = PrivacyPolicy.from_dict({"min_images": 20})
        >>> policy.min_images, policy.noise_multiplier
        (20, 0.0)
    """

    TITLE: ClassVar[str] = "privacy: "
    PANEL: ClassVar[str] = "Limits of what leaves the site"
    OPEN: ClassVar[str] = "the kit's value"

    min_images: int = setting(
        10,
        "Fewest patients with whom the site trains, and behind each number that leaves it (n). No patient "
        "has a share above 2/n. "
        "A case (a volume or a photograph, not a slice) counts as a patient where the list names none.",
        at_least=1,
    )
    noise_multiplier: float = setting(
        0.0,
        "z, the standard deviation of the Gaussian noise on each release, in units of one patient's largest "
        "change (L2); 0 for no noise, or 8 with epsilon.",
        at_least=0,
        rare=True,
    )
    delta: float = setting(
        1e-5,
        "δ, the probability with which ε does not hold; far below one over the number of patients.",
        above=0,
        below=1,
        rare=True,
    )
    epsilon: float | None = setting(
        None,
        "Largest ε of a patient over all jobs. Jobs that share the site's ledger share ε. Everything that "
        "leaves then has noise and is charged to one account; what has no bound does not leave. By default "
        "nothing has noise, and whoever chooses the weights of a job can reconstruct images from its "
        "updates.",
        above=0,
        at_most=1e300,
        flags=("--epsilon",),
    )
    sgd_noise_multiplier: float = setting(
        0.0,
        "σ, the standard deviation of the Gaussian noise on each step of local training, in units of one "
        "case's largest change (DP-SGD, `medfedaug.hospital.privacy.dp_sgd`); 0 for training without it, or "
        "1 with epsilon.",
        at_least=0,
        rare=True,
    )
    sgd_clip: float = setting(
        1.0,
        "C, the largest norm of one case's gradient in a step of DP-SGD; longer ones are clipped.",
        above=0,
        rare=True,
    )
    clip: Mapping[str, Bounds] = setting(
        dict,
        'Public bounds by kind, as a JSON object, {"intensity_mean": [0, 255]}: the part of each case is '
        "clipped to them. Public: chosen without the site's images. Needed for the kinds that a job's "
        "methods exchange under noise: intensity_mean, intensity_std (FedRDN, in the images' units), "
        "feature_mean, feature_std (FedFA; FedFAʰ takes feature_mean as its range).",
    )
    cases_per_patient: int = setting(
        1, "Largest number of cases of one patient; the noise grows with it.", at_least=1, rare=True
    )
    score_noise_multiplier: float = setting(
        0.0,
        "Standard deviation of the Gaussian noise on the mean scores of a model, in units of one patient's "
        "largest change (L2); 0 for none, or 8 with epsilon.",
        at_least=0,
        rare=True,
    )

    def __post_init__(self) -> None:
        if self.epsilon is None and self.adds_noise:
            raise ConfigError("privacy: with noise, epsilon says where the site stops; it is missing")
        if self.epsilon is not None and not self.adds_noise:
            for name, multiplier in _NOISE.items():
                object.__setattr__(self, name, multiplier)
        check_keys("privacy: clip: unknown", self.clip, _BOUNDED)
        for kind, bounds in self.clip.items():
            _check_bounds(kind, *bounds)

    def check_everything_is_private(self) -> None:
        """Check that a site with an account of ε adds noise to everything that leaves it."""
        missing = [name for name in _NOISE if not getattr(self, name)]
        if self.epsilon is not None and missing:
            raise ConfigError(
                f"privacy: with epsilon everything that leaves has noise, and {missing[0]} is 0; its usual "
                f"value is {_NOISE[missing[0]]:g}"
            )

    def check_patients(self, site: str, per_patient: Sequence[int]) -> None:
        """Check that a site has enough patients to train, given the number of training cases of each."""
        patients, cases = len(per_patient), sum(per_patient)
        if patients < self.min_images:
            of = f" of {withheld(patients)} patient{'s' * (patients != 1)}" if patients < cases else ""
            raise JobRefused(
                site,
                f"{withheld(cases)} cases{of} would train, and min_images of the site's policy is "
                f"{self.min_images}",
            )

    def check_loop(self, site: str, loop: object) -> None:
        """Check that a job brings no training loop, ``None``, where the site trains by DP-SGD."""
        if loop is not None and self.sgd_noise_multiplier:
            raise JobRefused(
                site,
                "nothing bounds what one case changes in its training loop, and the site trains with "
                "differential privacy (sgd_noise_multiplier of its privacy policy)",
            )

    @property
    def adds_noise(self) -> bool:
        """Return whether statistics, the steps of training, or scores get noise."""
        return bool(self.noise_multiplier or self.sgd_noise_multiplier or self.score_noise_multiplier)

    def bounds(self, kind: str) -> tuple[float, float]:
        """Return the public bounds of a kind."""
        if kind not in self.clip:
            raise ConfigError(f'noise needs public bounds: "clip": {{"{kind}": [low, high]}}')
        return self.clip[kind]

    @classmethod
    def of_simulation(cls) -> PrivacyPolicy:
        """Return a policy without limits, for sites that are all on one machine."""
        return cls(min_images=1)


def _check_bounds(kind: str, low: float, high: float) -> None:
    if not low < high:
        raise ConfigError(f"privacy: clip of {kind} must be [low, high], got {[low, high]}")
    if (kind == FEATURE_STD and low < 0) or (kind == INTENSITY_STD and low <= 0):
        sign = "negative" if kind == FEATURE_STD else "0 or less"  # images are divided by INTENSITY_STD
        text = f"privacy: a standard deviation cannot be {sign}: clip of {kind}, got {[low, high]}"
        raise ConfigError(text)
