"""`RunConfig`, what a run computes, and `Execution`, how it is carried out.

Both are JSON, so that one job serves every engine and every site. What belongs to a site (its data folder,
its device) is not here: it never travels with a job.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from medfedaug.checks import check_choice, check_keys
from medfedaug.errors import ConfigError

__all__ = ["SCALING", "Execution", "RunConfig", "derive_seed", "recorded_settings", "task_defaults"]

_TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "segmentation": {"network": "basicunet", "optimizer": "adam", "learning_rate": 1e-3, "batch_size": 16},
    "classification": {"network": "alexnet", "optimizer": "sgd", "learning_rate": 1e-2, "batch_size": 32},
}
SCALING = {"segmentation": "each volume", "classification": "fixed"}
"""What ``"scale"`` does by task: every volume by its own range, or all images by one number."""
_CHOICES = {
    "task": tuple(_TASK_DEFAULTS),
    "intensity": ("scale", "raw", "by_method"),
    "optimizer": ("adam", "sgd"),
    "weighting": ("samples", "uniform"),
    "precision": ("float32", "bfloat16"),
    "augmentation": ("none", "flip", "flip_rotate"),
}
# By annotation; `true` is a whole number to Python and to nobody else.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "text"),
    "bool": ((bool,), "true or false"),
    "int": ((int,), "a whole number"),
    "int | None": ((int, type(None)), "a whole number or null"),
    "float": ((int, float), "a number"),
    "float | None": ((int, float, type(None)), "a number or null"),
    "dict[str, Any]": ((dict,), "a JSON object"),
}
_POSITIVE = ("rounds", "local_epochs", "batch_size", "in_channels", "learning_rate")


@dataclass(frozen=True)
class RunConfig:
    """The definition of a run.

    Args:
        methods: ``[{"name": "fedfa", "args": {"prob": 0.5}}, ...]``, in the order given.
        task: ``"segmentation"`` or ``"classification"``.
        network: a name of `medfedaug.models.network_names`.
        network_args: passed to the network's constructor.
        in_channels: channels of an image.
        classes: their names; of a segmentation in the order of the labels, the background first.
        image_size: photographs, and the slices of volumes, are resized to so many pixels in both directions;
            ``None`` leaves them. A segmentation is resized back, and scored on the volume as it is.
        rounds: communication rounds.
        local_epochs: passes over a site's training samples in each round.
        local_steps: so many steps in each round in place of ``local_epochs``, the samples shuffled anew
            whenever all were used; 0 for whole epochs.
        batch_size: samples a step.
        augmentation: of the training images before anything that a method does: ``"none"``, ``"flip"`` (left
            and right are exchanged with probability 1/2) or ``"flip_rotate"`` (and turned by an angle between
            -30 and 30 degrees, FedFA appendix E.2); label maps go along.
        optimizer: ``"adam"`` or ``"sgd"``, created afresh in every round, so that a site has no hidden state.
        momentum: of ``"sgd"``.
        weight_decay: the optimiser's, as an L2 term of the gradient.
        learning_rate: the optimiser's.
        weighting: of the sites in the average: by number of training ``"samples"`` (FedAvg, and FedRDN
            Eq. 1) or ``"uniform"`` (FedFA+ Eq. 1).
        precision: ``"float32"``, or ``"bfloat16"``: the network's convolutions and matrix products are
            computed so (`torch.autocast`), in training and in evaluation; weights, losses and statistics stay
            float32.
        intensity: what every image is brought to before anything else, statistics included.
            ``"scale"``: each volume scaled to [0, 1] by its own lowest and highest intensity, for scanners
            whose units do not compare, and photographs divided by 255. ``"raw"``: as stored. Both mean the
            same for every method. ``"by_method"``: as stored where a method normalises the input, scaled
            where none does, as the papers' code has it; two methods may then see different input.
        seed: of the initial network and, by site and round, of everything random.
        limit: at most so many cases of each split a site; ``None`` for all.
        holdout: sites that do not train although they could, and are tested as unseen sites.
        participation: share of the training sites that each round asks, drawn anew in every round.
    """

    methods: tuple[dict[str, Any], ...] = ({"name": "fedavg", "args": {}},)
    task: str = "segmentation"
    network: str = "basicunet"
    network_args: dict[str, Any] = field(default_factory=dict)
    in_channels: int = 1
    classes: tuple[str, ...] = ("background", "foreground")
    image_size: int | None = None
    rounds: int = 10
    local_epochs: int = 1
    local_steps: int = 0
    batch_size: int = 16
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    weighting: str = "samples"
    precision: str = "float32"
    intensity: str = "scale"
    augmentation: str = "none"
    seed: int = 0
    limit: int | None = None
    holdout: tuple[str, ...] = ()
    participation: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict(m) for m in self.methods))
        for name in ("holdout", "classes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_kinds(self)
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if len(set(self.classes)) < 2 or len(set(self.classes)) < len(self.classes):
            raise ConfigError(
                f"two or more classes with different names are needed, got {list(self.classes)}"
            )
        if not 0 < self.participation <= 1:
            raise ConfigError(f"participation is a share of the sites, got {self.participation}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")
        for name in ("local_steps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} cannot be negative, got {getattr(self, name)}")

    @property
    def num_classes(self) -> int:
        """Number of classes; of a segmentation with the background."""
        return len(self.classes)

    def input_intensity(self, *, normalised: bool) -> str:
        """``"scale"`` or ``"raw"``: what the images are brought to before anything else.

        Args:
            normalised: whether a method normalises the input.
        """
        if self.intensity == "by_method":
            return "raw" if normalised else "scale"
        return self.intensity

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON types."""
        return {
            **dataclasses.asdict(self),
            "methods": list(self.methods),
            "holdout": list(self.holdout),
            "classes": list(self.classes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The inverse of `to_dict`; an unknown key is an error, since it would silently do nothing.

        Raises:
            ConfigError: for unknown keys and impossible values.
        """
        # Records and checkpoints from before `Execution` hold its settings here too.
        moved = {entry.name for entry in dataclasses.fields(Execution)}
        given = {name: value for name, value in values.items() if name not in moved}
        _check_keys(cls, given)
        return cls(**given)


@dataclass(frozen=True)
class Execution:
    """How a run is carried out: nothing of it changes what a round computes from the sites' updates.

    Args:
        threads: CPU threads a site uses; 0 leaves PyTorch's choice. Bit-identical results need the same
            number, since the order of sums inside a convolution depends on it.
        min_sites: good updates that a round needs; 0 for all that it asks.
        round_timeout: seconds after which a site's answer is no longer waited for; 0 for no limit.
        grace: seconds for which the others are waited for once there are ``min_sites`` good answers; ``None``
            to wait until the timeout.

    Raises:
        ConfigError: for a value of another type, or below 0.
    """

    threads: int = 0
    min_sites: int = 0
    round_timeout: float = 0.0
    grace: float | None = None

    def __post_init__(self) -> None:
        _check_kinds(self)
        for entry in dataclasses.fields(self):
            if (getattr(self, entry.name) or 0) < 0:
                raise ConfigError(f"{entry.name} cannot be negative, got {getattr(self, entry.name)}")

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain JSON types."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Execution:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: for unknown keys and impossible values.
        """
        _check_keys(cls, values)
        return cls(**dict(values))


def _check_kinds(settings: RunConfig | Execution) -> None:
    for entry in dataclasses.fields(settings):
        value, (kinds, needed) = getattr(settings, entry.name), _KINDS.get(str(entry.type), ((object,), ""))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds and needed):
            raise ConfigError(f"{entry.name} must be {needed}, got {value!r}")


def _check_keys(settings: type[RunConfig | Execution], values: Mapping[str, Any]) -> None:
    known = sorted(entry.name for entry in dataclasses.fields(settings))
    check_keys("unknown configuration keys:", values, known)


def task_defaults(task: str) -> dict[str, Any]:
    """Network and optimiser's settings for a task, as the papers have them.

    AlexNet, SGD at 0.01 and batches of 32 for photographs; a U-Net, Adam at 0.001 and batches of 16 for
    volumes.

    Raises:
        ConfigError: for a task that is not known.
    """
    check_choice("task", task, _TASK_DEFAULTS)
    return dict(_TASK_DEFAULTS[task])


def recorded_settings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a ``results.json`` or a checkpoint, as this release names them.

    A record without ``input`` is of an earlier release, whose ``"raw"`` was what is ``"by_method"`` now.

    >>> recorded_settings({"config": {"intensity": "raw"}})
    {'intensity': 'by_method'}
    """
    settings = dict(record["config"])
    if "input" not in record and settings.get("intensity", "raw") == "raw":
        settings["intensity"] = "by_method"
    return settings


def derive_seed(*parts: object) -> int:
    """A 32-bit seed from ``parts``; independent of the process, unlike ``hash``.

    >>> derive_seed(0, "DU", 3) == derive_seed(0, "DU", 3)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
