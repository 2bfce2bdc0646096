"""`RunConfig`, what a run computes, and `Execution`, how it is carried out.

Both are JSON, so that one job serves every engine and every site. What belongs to a site (its data folder,
its device) is not here: it never travels with a job.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypedDict

from annotated_types import Interval

from medfedaug.config.bundle_reference import check_reference
from medfedaug.config.options import Settings, defaults, setting, settings
from medfedaug.config.plan import Plan, PlanningConfig
from medfedaug.config.training_scripts import check_loop
from medfedaug.errors import ConfigError
from medfedaug.utils.validation import check_choice

__all__ = [
    "BY_PLAN",
    "DEFAULT_LOSSES",
    "MAX_SHARE",
    "SCALING",
    "TASK_DEFAULTS",
    "USUAL_AUGMENTATION",
    "Execution",
    "RunConfig",
    "asked_settings",
    "derive_seed",
    "job_hash",
    "learning_rate",
    "task_defaults",
]

TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "segmentation": {"network": "basicunet", "optimizer": "adam", "learning_rate": 1e-3, "batch_size": 16},
    "classification": {"network": "alexnet", "optimizer": "sgd", "learning_rate": 1e-2, "batch_size": 32},
}
"""Default settings of a run, by task."""


def _by_task(name: str) -> str:
    return f"By default {', '.join(f'{values[name]} for {task}' for task, values in TASK_DEFAULTS.items())}."


USUAL_AUGMENTATION = {"segmentation": "full", "classification": "none"}
"""Default of ``RunConfig.augmentation`` on the sites' own data, by task."""
DEFAULT_LOSSES = {"segmentation": "dice_ce", "classification": "cross_entropy"}
"""Default loss, by task."""
SCALING = {"segmentation": "each volume", "classification": "fixed"}
"""Meaning of ``"scale"`` by task: every volume by its own range, or all images by one number."""

BY_PLAN = "the plan"
"""``input.normalised_by`` in ``results.json`` of a run whose plan normalises the images."""

MAX_SHARE = 0.45
"""Default of ``max_share``: with three or more sites none has half of the average."""


_BY_BUNDLE = (
    *("loop", "planning", "network_args", "loss", "loss_args", "image_size", "momentum", "weight_decay"),
    *("augmentation", "surface_tolerance", "partial_loss"),
)

_MODES: dict[str, tuple[tuple[str, ...], str]] = {
    "bundle": (_BY_BUNDLE, "it follows from the Bundle"),
    "loop": (
        ("planning", "freeze"),
        "a loop prepares images and trains by itself (medfedaug plan makes a plan)",
    ),
    "planning": (("init",), "initial weights need a fixed network: make the plan first (medfedaug plan)"),
    "secure_aggregation": (
        ("buffer", "wire"),
        "masks cancel out in the sum of one round's updates, which are numbers of 64 bits",
    ),
}
"""The settings that a mode of a run excludes, with the reason. A mode is on where its setting is."""


@settings
class RunConfig(Settings):
    """Settings that decide what a run computes.

    Raises:
        ConfigError: for a value of another type or out of range.
    """

    PANEL: ClassVar[str] = "The run"

    methods: tuple[dict[str, Any], ...] = setting(
        ({"name": "fedavg", "args": {}},),
        'The methods, in order: [{"name": "fedfa", "args": {"prob": 0.5}}, ...].',
        flags=None,
    )
    purpose: str = setting(
        "",
        "Purpose of the model in one line, for the sites' administrators and ethics boards. It is on the "
        "page that they approve, and changes no result.",
        rare=True,
    )
    task: str = setting(
        "segmentation", "Task: segmentation (default) or classification.", choices=tuple(TASK_DEFAULTS)
    )
    network: str = setting(
        "basicunet",
        "Network: a name (medfedaug networks) or class path. MONAI's classes have paths such as "
        f"monai.networks.nets.HighResNet. {_by_task('network')}",
        follows=True,
    )
    network_args: dict[str, Any] = setting(dict, "Arguments of the network, as a JSON object.")
    loss: str | None = setting(
        None,
        "Name of the loss. For segmentation: dice_ce (the default, Dice plus cross-entropy), dice, "
        "generalized_dice, tversky, dice_focal, focal or cross_entropy. For classification: cross_entropy "
        "(the default) or focal. Or the class path of a loss of MONAI, such as "
        "monai.losses.HausdorffDTLoss.",
    )
    loss_args: dict[str, Any] = setting(dict, "Arguments of the loss, as a JSON object.", rare=True)
    partial_loss: str = setting(
        "marginal",
        "Loss for cases in which only some classes or voxels are outlined (labelled and ignore in "
        "dataset.json). marginal: classes without outline in a case are merged with its background. "
        "exclusion: in addition, they are kept out of its outlined structures. none: they are learned as "
        "background. It has no effect where everything is outlined. Without this option, class_mean and "
        "condist join the methods of a simulation whose sites have outlined different structures.",
        choices=("marginal", "exclusion", "none"),
        rare=True,
    )
    unlabelled_weight: float = setting(
        0.0,
        "Weight of a training sample without an outline in the average, relative to a labelled one. 0 "
        "excludes cases without outlines from training; a site that has no other cases is only tested.",
        at_least=0,
        at_most=1,
        rare=True,
    )
    in_channels: int = setting(1, "Channels of an image; photographs have 3.", above=0, flags=("--channels",))
    channel_names: tuple[str, ...] = setting(
        (),
        "Name of a channel, in the order of the network's input; repeatable. A site whose dataset.json names "
        "its channels is matched by these names, and a channel that it lacks is 0 after scaling. By default "
        "channels have no names, and all sites need the same ones.",
        flags=("--channel-name",),
        rare=True,
    )
    classes: tuple[str, ...] = setting(
        ("background", "foreground"),
        "Classes, background first, separated by commas. Segmentation has them in the order of the labels.",
    )
    plan: Plan = setting(
        Plan, "Orientation, spacing and patches of volumes (`medfedaug.config.plan.Plan`).", flags=None
    )
    planning: PlanningConfig | None = setting(
        None,
        "Planning from the sites' fingerprints (`medfedaug.config.plan.PlanningConfig`); without it, the "
        "plan is made already.",
        flags=None,
    )
    image_size: int | None = setting(
        None,
        "Size in pixels to which 2D images are resized. By default they keep their size. "
        "Segmentations are resized back and scored on the volume's own grid.",
        at_least=1,
        at_most=2**14,
    )
    rounds: int = setting(10, "Communication rounds.", above=0)
    validate_every: int = setting(
        1,
        "Rounds between validations of the global model; the last round is always validated, and the best "
        "validated round is tested. More than 1 saves time where scoring whole volumes takes longer than "
        "training on patches, and fewer scores leave the sites.",
        above=0,
        rare=True,
    )
    patience: int = setting(
        0,
        "End the run early when the validation scores of the last N validated rounds are not better than "
        "those of the N before, beyond the noise between rounds (a one-sided 95% interval). 0 runs all "
        "rounds.",
        at_least=0,
        rare=True,
    )
    local_epochs: int = setting(1, "Passes over a site's samples per round.", above=0)
    local_steps: int = setting(
        0,
        "Training steps per round, instead of local epochs; 0 for whole epochs. Samples are shuffled again "
        "after each pass.",
        at_least=0,
        rare=True,
    )
    batch_size: int = setting(
        16, f"Samples per training step. {_by_task('batch_size')}", above=0, follows=True
    )
    optimizer: str = setting(
        "adam",
        "Optimiser. Its state starts afresh in every round, so that a site keeps no hidden state. bundle: "
        f"the Bundle's optimiser. {_by_task('optimizer')}",
        choices=("adam", "sgd", "bundle"),
        follows=True,
    )
    learning_rate: float = setting(
        1e-3,
        f"Learning rate of the optimiser. {_by_task('learning_rate')}",
        above=0,
        flags=("--learning-rate", "--lr"),
        follows=True,
    )
    schedule: str = setting(
        "constant",
        "Learning rate in round r of R: constant; poly, multiplied by (1 - (r-1)/R)^0.9; or cosine, "
        "multiplied by (1 + cos(pi (r-1)/R)) / 2. It does not change within a round.",
        choices=("constant", "poly", "cosine"),
        rare=True,
    )
    momentum: float = setting(0.0, "Momentum of sgd.", at_least=0, rare=True)
    weight_decay: float = setting(
        0.0, "Weight decay of the optimiser, an L2 term of the gradient.", at_least=0, rare=True
    )
    weighting: str = setting(
        "samples",
        "Weights of the sites in the average: samples, their numbers of training samples (FedAvg, and FedRDN "
        "Eq. 1), or uniform (FedFA+ Eq. 1).",
        choices=("samples", "uniform"),
        rare=True,
    )
    max_share: float = setting(
        MAX_SHARE,
        "Largest share of a site in the average and in the statistics that methods exchange, above 0 and up "
        "to 1. A larger share is lowered to this limit in every round, whatever number of samples a site "
        "claims. The default acts where three or more sites train; 1 gives every site the share of its "
        "samples, as the papers do.",
        above=0,
        at_most=1,
        rare=True,
    )
    secure_aggregation: bool = setting(
        False,
        "Let the server learn only sums over the sites. Each site adds masks "
        "to its weights and statistics that cancel out in the sum. It needs three sites in every round, "
        "and methods that need only sums; checks of single updates are lost.",
        flags=("--secure-aggregation",),
    )
    wire: str = setting(
        "float32",
        "Numbers in which weights travel, to the sites and back. float16 and bfloat16 halve the bytes of a "
        "round; sums stay float64. Vectors, such as biases and running statistics, and the methods' "
        "statistics stay float32, and so do weights beyond 65504 with float16. Sites score the model as it "
        "arrives, and the saved one is float32.",
        choices=("float32", "float16", "bfloat16"),
        rare=True,
    )
    precision: str = setting(
        "float32",
        "float32, or bfloat16 for the network's convolutions and matrix products (torch.autocast), in "
        "training and evaluation; weights, losses and statistics stay float32. auto: each site takes the "
        "faster one of a few steps on noise and reports it; it may decide otherwise another time. Finished "
        "models are used in float32.",
        choices=("float32", "bfloat16", "auto"),
        rare=True,
    )
    intensity: str = setting(
        "scale",
        "Scale of images: scale (default), raw or by_method. It applies before everything else, statistics "
        "included. scale: each volume scaled to [0, 1] by its own lowest and highest intensity, for "
        "scanners without comparable units, and photographs divided by their white, 255 or with 16 bits "
        "65535. raw: as stored. Both mean the same for every method. by_method: as stored where a method "
        "normalises the input, scaled otherwise, as in the papers' code; two methods may then see different "
        "input.",
        choices=("scale", "raw", "by_method"),
    )
    augmentation: str = setting(
        "none",
        "Augmentation: none, flip, flip_rotate, intensity, full. It precedes the methods' transforms. flip "
        "mirrors left and right with probability 1/2: of volumes the axis R or L of the plan's orientation, "
        "or without one the first axis as stored; slices across it stay unchanged. flip_rotate also rotates "
        "by an angle between -30 and 30 degrees (FedFA appendix E.2), volumes in the plane of their first "
        "two axes. intensity changes brightness and contrast, blurs, coarsens and adds noise. full also "
        "mirrors along each axis, rotates and scales, as nnU-Net does. Label maps move along. The default "
        "is full for segmentation on the sites' own data, and none for published data sets, the phantom and "
        "classification.",
        choices=("none", "flip", "flip_rotate", "intensity", "full"),
        follows=True,
    )
    surface_tolerance: float = setting(
        2.0,
        "Largest distance of two surfaces that count as one in the normalised surface Dice (NSD), in "
        "millimetres; in pixels for images that have no spacing.",
        at_least=0,
        rare=True,
    )
    bundle: dict[str, Any] = setting(
        dict,
        "Name and content hash of the MONAI Bundle that defines network, loss, optimiser, transforms, "
        "inference and metrics; empty for none.",
        flags=None,
    )
    init: str | None = setting(
        None, "Fingerprint of the weights from which the network starts; by default it is random.", flags=None
    )
    freeze: tuple[str, ...] = setting(
        (),
        "Pattern of the network's entries that are not trained, such as 'encoder.*', in which a star stands "
        "for any text; repeatable. Batch norms with matching running statistics use them in training.",
        rare=True,
    )
    loop: str | None = setting(
        None,
        "Custom training loop that sites run (`medfedaug.config.training_scripts`): its name, or file name "
        "and SHA-256.",
        flags=None,
    )
    seed: int = setting(
        0, "Seed of all random numbers. The initial network and each site and round derive theirs from it."
    )
    limit: int | None = setting(None, "Most cases per split and site; by default all.", at_least=1)
    holdout: tuple[str, ...] = setting((), "Site that is tested but does not train; repeatable.")
    buffer: int = setting(
        0,
        "Number of updates that make the next global model, in the order in which they arrive (FedBuff, "
        "Nguyen et al. 2022). A round then waits for no slow site: the late update counts in a later round, "
        "as a step from the model that it began with. 0 waits for all sites of a round.",
        at_least=0,
        rare=True,
    )
    staleness: float = setting(
        0.5,
        "Exponent a of (1 + s)^-a, the factor of an update that arrives s rounds late (buffer); 0 for no "
        "factor.",
        at_least=0,
        at_most=10,
        rare=True,
    )

    def __post_init__(self) -> None:
        for method in self.methods or ({},):
            if not isinstance(method.get("name"), str) or not isinstance(method.get("args", {}), Mapping):
                raise ConfigError(
                    f"a method is an object with a name, and args that are one too, got {str(method)[:80]}"
                )
        named = len(self.channel_names)
        if self.in_channels == 1 and named:
            object.__setattr__(self, "in_channels", named)
        if named not in (0, self.in_channels) or len(set(self.channel_names)) < named:
            raise ConfigError(
                f"{self.in_channels} channels need as many different names, got {list(self.channel_names)}"
            )
        if len(set(self.classes)) < 2 or len(set(self.classes)) < len(self.classes):
            raise ConfigError(
                f"two or more classes with different names are needed, got {list(self.classes)}"
            )
        if self.loop is not None:
            check_loop(self.loop)
        self._check_modes()
        self._check_plan()

    def _check_modes(self) -> None:
        """Check that no setting is given that a mode of the run excludes, and take those of a Bundle."""
        usual = defaults(RunConfig)
        for mode, (excluded, reason) in _MODES.items():
            for name in excluded if getattr(self, mode) else ():
                if getattr(self, name) != usual[name]:
                    raise ConfigError(f"{mode} and {name} cannot be combined: {reason}; leave {name} out")
        if self.bundle:
            check_reference(self.bundle)
            if self.plan != Plan(spatial_dims=self.plan.spatial_dims):
                raise ConfigError("a plan follows from the transforms of the Bundle; leave it out")
            settled = {"network": self.bundle["name"], "optimizer": "bundle", "intensity": "raw"}
            for name, value in settled.items():
                object.__setattr__(self, name, value)
        elif self.optimizer == "bundle":
            raise ConfigError("optimizer bundle needs a Bundle (--bundle)")

    def _check_plan(self) -> None:
        plan = self.plan
        if self.task != "segmentation" and plan != Plan():
            raise ConfigError("a plan is for volumes: give photographs to classify an image_size instead")
        if self.patience == 1:
            raise ConfigError("patience must be 0 or at least 2: one round does not show the noise")
        words = len(plan.normalisation or ())
        if words not in (0, 1, self.in_channels):
            raise ConfigError(
                f"normalisation has {words} words, and images have {self.in_channels} channels: give one "
                "word for each, or one for all"
            )
        if self.image_size is not None and (plan.spatial_dims == 3 or plan.spacing is not None):
            raise ConfigError("image_size resizes slices; with volumes, or with a spacing, leave it out")

    def validates(self, round_: int) -> bool:
        """Return whether the model of a round is scored on the validation cases; round 0 is untrained.

        Example:
            >>> config = RunConfig(rounds=5, validate_every=2)
            >>> [round_ for round_ in range(6) if config.validates(round_)]
            [2, 4, 5]
        """
        return round_ > 0 and (round_ % self.validate_every == 0 or round_ == self.rounds)

    @property
    def num_classes(self) -> int:
        """Number of classes, with the background of a segmentation."""
        return len(self.classes)

    def input_intensity(self, *, normalised: bool) -> str:
        """Return the first scaling of the images, ``"scale"`` or ``"raw"``."""
        if self.prepared_plan(normalised=normalised).normalises:
            return "raw"
        if self.intensity == "by_method":
            return "raw" if normalised else "scale"
        return self.intensity

    def prepared_plan(self, *, normalised: bool) -> Plan:
        """Return the plan of the preparation: a method's normalisation replaces the plan's."""
        if normalised and self.plan.normalises:
            return dataclasses.replace(self.plan, normalisation=None, ct_intensities=None)
        return self.plan


Speed = Annotated[float, Interval(ge=1e-6, le=1e6)]


@settings
class Execution(Settings):
    """Settings of a run's execution: none changes what a round computes from the sites' updates."""

    PANEL: ClassVar[str] = "How the run is carried out"

    threads: int = setting(
        0,
        "CPU threads per site; 0 for a share of the cores where sites are processes of one machine, and for "
        "PyTorch's choice otherwise. Bit-identical results need the same number, which decides the order of "
        "sums in a convolution.",
        at_least=0,
        rare=True,
    )
    min_sites: int = setting(
        0, "Good updates that a round needs; 0 for one from every site that it asks.", at_least=0, rare=True
    )
    round_timeout: float = setting(
        0.0, "Seconds after which the server stops waiting for a site; 0 for no limit.", at_least=0, rare=True
    )
    grace: float | None = setting(
        None,
        "Seconds for which the server waits for the other sites once it has enough good updates (min_sites); "
        "by default until the timeout.",
        at_least=0,
        rare=True,
    )
    site_speed: dict[str, Speed] = setting(
        dict,
        "Speed of sites in a simulation, as SITE=FACTOR, separated by commas. A site of speed 1 trains one "
        "simulated hour for a round, and one of speed 0.1 ten; grace and round_timeout then count simulated "
        "seconds, and results.json has the hour at which each round ended. It needs the engine inprocess.",
        rare=True,
    )
    tested: bool = setting(
        True, "Test the selected model. A search of settings leaves test cases unread.", flags=None
    )


def task_defaults(task: str, plan: Plan | None = None, *, own_data: bool = False) -> dict[str, Any]:
    """Return network, optimiser's settings and augmentation of a task, as in the papers.

    Photographs have AlexNet, SGD at 0.01 and batches of 32; slices a U-Net, Adam at 0.001 and batches of 16;
    volumes, with a plan of three spatial dimensions, batches of 2.

    Args:
        own_data: whether the sites train on their own data, with `USUAL_AUGMENTATION`; a published data set
            has its protocol's.
    """
    check_choice("task", task, TASK_DEFAULTS)
    volumes = {"batch_size": 2} if plan is not None and plan.spatial_dims == 3 else {}
    augmentation = {"augmentation": USUAL_AUGMENTATION[task]} if own_data else {}
    return {**TASK_DEFAULTS[task], **volumes, **augmentation}


def asked_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user gave, before the sites' fingerprints decided other values."""
    return dict(record.get("planned", {}).get("asked", record["config"]))


def learning_rate(config: RunConfig, round_: int) -> float:
    """Return the learning rate of a round (`RunConfig.schedule`).

    It depends only on the round, so it is the same at every site and in a resumed run. A round after the
    last one has the rate of the last.

    Example:
        >>> [learning_rate(RunConfig(schedule="poly", rounds=2, learning_rate=1.0), r) for r in (1, 2)]
        [1.0, 0.5358867312681466]
    """
    done = (min(round_, config.rounds) - 1) / config.rounds
    if config.schedule == "poly":
        rate: float = config.learning_rate * (1 - done) ** 0.9
        return rate
    if config.schedule == "cosine":
        return config.learning_rate * (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate


def derive_seed(*parts: object) -> int:
    """Make a 32-bit seed from ``parts``; independent of the process, unlike ``hash``.

    >>> derive_seed(0, "DU", 3) == derive_seed(0, "DU", 3)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def job_hash(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a job's configuration (`RunConfig.to_dict`), which determines its computation."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


class RunKeywords(TypedDict, total=False):
    """The fields of `RunConfig` and `Execution`, but for ``methods``; a test compares them."""

    purpose: str
    task: str
    network: str
    network_args: Mapping[str, Any]
    loss: str | None
    loss_args: Mapping[str, Any]
    partial_loss: str
    unlabelled_weight: float
    in_channels: int
    channel_names: Sequence[str]
    classes: Sequence[str]
    plan: Plan
    planning: PlanningConfig | None
    image_size: int | None
    rounds: int
    validate_every: int
    patience: int
    local_epochs: int
    local_steps: int
    batch_size: int
    optimizer: str
    learning_rate: float
    schedule: str
    momentum: float
    weight_decay: float
    weighting: str
    max_share: float
    secure_aggregation: bool
    wire: str
    precision: str
    intensity: str
    augmentation: str
    surface_tolerance: float
    bundle: str | Path | None
    init: str | Path | None
    freeze: Sequence[str]
    loop: str | Path | None
    seed: int
    limit: int | None
    holdout: Sequence[str]
    buffer: int
    staleness: float
    threads: int
    min_sites: int
    round_timeout: float
    grace: float | None
    site_speed: Mapping[str, Speed]
    tested: bool
