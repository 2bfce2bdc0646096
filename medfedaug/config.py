"""`RunConfig`: everything that defines a run, in JSON, so that one job serves every engine and every site.

What belongs to a site (its data folder, its device) is not here: it never travels with a job.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from medfedaug.errors import ConfigError

__all__ = ["RunConfig", "derive_seed"]

_CHOICES = {
    "task": ("segmentation",),
    "intensity": ("raw", "scale"),
    "optimizer": ("adam", "sgd"),
    "weighting": ("samples", "uniform"),
}
_POSITIVE = ("rounds", "local_epochs", "batch_size", "in_channels", "learning_rate")


@dataclass(frozen=True)
class RunConfig:
    """The definition of a run.

    Args:
        methods: ``[{"name": "fedfa", "args": {"prob": 0.5}}, ...]``, in the order given.
        task: ``"segmentation"``.
        network: a name of `medfedaug.models.network_names`.
        network_args: passed to the network's constructor.
        in_channels: channels of an image.
        num_classes: classes of the labels, background included.
        rounds: communication rounds.
        local_epochs: passes over a site's training samples in each round.
        batch_size: samples a step.
        optimizer: ``"adam"`` or ``"sgd"`` (momentum 0.9), created afresh in every round, so that a site
            has no hidden state.
        learning_rate: the optimiser's.
        weighting: of the sites in the average: by number of training ``"samples"`` (FedAvg, and FedRDN
            Eq. 1) or ``"uniform"`` (FedFA+ Eq. 1).
        intensity: ``"raw"``: images as stored; ``"scale"``: each volume scaled to [0, 1] before anything
            else, statistics included, for scanners whose units do not compare.
        seed: of the initial network and, by site and round, of everything random.
        limit: at most so many cases of each split a site; ``None`` for all.
        threads: CPU threads a site may use; 0 leaves PyTorch's choice. Bit-identical results need the
            same number, since the order of sums inside a convolution depends on it.
        holdout: sites that do not train although they could, and are tested as unseen sites.
        min_sites: good updates that a round needs; 0 for all training sites.
    """

    methods: tuple[dict[str, Any], ...] = ({"name": "fedavg", "args": {}},)
    task: str = "segmentation"
    network: str = "basicunet"
    network_args: dict[str, Any] = field(default_factory=dict)
    in_channels: int = 1
    num_classes: int = 2
    rounds: int = 10
    local_epochs: int = 1
    batch_size: int = 16
    optimizer: str = "adam"
    learning_rate: float = 1e-3
    weighting: str = "samples"
    intensity: str = "raw"
    seed: int = 0
    limit: int | None = None
    threads: int = 0
    holdout: tuple[str, ...] = ()
    min_sites: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(dict(m) for m in self.methods))
        object.__setattr__(self, "holdout", tuple(self.holdout))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"{name} {getattr(self, name)!r} is not known; choose from {', '.join(allowed)}"
                )
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_classes < 2:
            raise ConfigError(
                f"num_classes counts the background and must be at least 2, got {self.num_classes}"
            )
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be at least 1, got {self.limit}")
        if self.threads < 0 or self.min_sites < 0:
            raise ConfigError("threads and min_sites cannot be negative")

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain JSON types."""
        return {**dataclasses.asdict(self), "methods": list(self.methods), "holdout": list(self.holdout)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The inverse of `to_dict`; an unknown key is an error, since it would silently do nothing.

        Raises:
            ConfigError: for unknown keys and impossible values.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(
                f"unknown configuration keys: {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**dict(values))


def derive_seed(*parts: object) -> int:
    """A 32-bit seed from ``parts``; independent of the process, unlike ``hash``.

    >>> derive_seed(0, "DU", 3) == derive_seed(0, "DU", 3)
    True
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")
