"""`Plan`: what images are brought to before training, and how they are cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from medfedaug.config.options import Settings, setting, settings
from medfedaug.errors import ConfigError
from medfedaug.utils.files import check_version, parse_json, write_versioned
from medfedaug.utils.validation import check_choice

__all__ = [
    "NORMALISATIONS",
    "PLANNED",
    "PLAN_FIELDS",
    "PLAN_MEMORY",
    "Plan",
    "load_plan",
    "planning_settings",
    "save_plan",
]

PLANNED = ("plan", "batch_size", "network_args")
"""Settings of a run that planning decides over."""


PLAN_MEMORY = 8.0
"""GiB that a training step may take where a plan is made and nothing else is said."""

NORMALISATIONS = ("none", "z_score", "ct")
"""Normalisations of a channel by its modality."""

_CT_NUMBERS = ("low", "high", "mean", "deviation")
_KIND, _VERSION = "plan", 1
_AXES = ({"R", "L"}, {"A", "P"}, {"S", "I"})
_LARGEST_PATCH = 4096


@settings
class Plan(Settings):
    """Orientation, spacing and patches of volumes for the network.

    With the defaults, networks see whole slices along a volume's last axis, as stored; training takes those
    with foreground. Whatever a plan says, scores are computed on the grid of the label map's file.

    Raises:
        ConfigError: for a value of another type or out of range, or values that do not go together.

    Example:
        >>> Plan(spatial_dims=3, spacing=(1, 1, 3), patch_size=(96, 96, 32)).patch_size
        (96, 96, 32)
    """

    PANEL: ClassVar[str] = "The plan of volumes"
    OPEN: ClassVar[str] = "what the plan says"

    spatial_dims: int = setting(
        2, "2 for slices along the last axis, or photographs; 3 for volumes.", at_least=2
    )
    orientation: str | None = setting(
        None,
        "Orientation of a volume's axes, for instance RAS: flips and permutations alone, without "
        "interpolation. By default they stay as stored.",
        rare=True,
    )
    spacing: tuple[float, ...] | None = setting(
        None,
        "Edges of a voxel in mm, along x, y and z, to which volumes are resampled. Images are interpolated "
        "linearly, and of a label map the classes' shares, of which the largest wins. By default they keep "
        "their own.",
    )
    crop: str = setting(
        "none",
        "none, or foreground: volumes are cut to the box of the voxels that are brighter, in any channel, "
        "than the darkest one. What was cut away is background.",
        choices=("none", "foreground"),
        rare=True,
    )
    patch_size: tuple[int, ...] | None = setting(
        None,
        "Voxels of a training patch along each axis. The window that slides over a volume in evaluation has "
        "the same. By default whole slices, or whole volumes.",
    )
    patches_per_volume: int = setting(
        2, "Patches that are cut from a volume for each epoch; of a slice it is one.", above=0, rare=True
    )
    foreground: float = setting(
        0.5,
        "Share of the training patches that are centred on a foreground voxel, of a class that is drawn "
        "first; the others are centred anywhere.",
        at_least=0,
        at_most=1,
        rare=True,
    )
    overlap: float = setting(
        0.5,
        "Overlap of neighbouring windows in evaluation, as a share of their size.",
        at_least=0,
        below=1,
        rare=True,
    )
    normalisation: tuple[str, ...] | None = setting(
        None,
        "Normalisation of each channel, in the place of --intensity: z_score, ct or none. z_score goes by "
        "the mean and deviation of the image itself; ct, clipped to two intensities and normalised by a "
        "mean and a deviation that are the same for all images (ct_intensities); or none, as stored. One "
        "word counts for all channels. By default, and with none for all channels, --intensity says what "
        "is done.",
    )
    ct_intensities: tuple[float, ...] | None = setting(
        None,
        "Four numbers for each channel with normalisation ct: the lowest and the highest intensity, to which "
        "it is clipped, then mean and deviation. A plan that is made takes those of the federation's "
        "foreground.",
        rare=True,
    )
    deep_supervision: bool = setting(
        False,
        "Give the network heads at several levels of its decoder, of which each weighs half of the finer one "
        "in the loss. Networks that have them are basicunetplusplus, dynunet, mednext and segresnetds.",
        rare=True,
    )

    def __post_init__(self) -> None:
        if self.spatial_dims not in (2, 3):
            raise ConfigError(f"spatial_dims must be 2 or 3, got {self.spatial_dims}")
        if self.orientation is not None and not (
            len(self.orientation) == 3
            and all(sum(c in axis for c in self.orientation) == 1 for axis in _AXES)
        ):
            raise ConfigError(
                f"orientation must have a letter of each pair R/L, A/P and S/I, got {self.orientation!r}"
            )
        if self.spacing is not None and (
            len(self.spacing) != 3 or not all(0 < v < 1e4 for v in self.spacing)
        ):
            raise ConfigError(f"spacing must be three lengths in mm, got {list(self.spacing)}")
        if self.patch_size is not None and (
            len(self.patch_size) != self.spatial_dims
            or not all(0 < v <= _LARGEST_PATCH for v in self.patch_size)
        ):
            raise ConfigError(
                f"patch_size must be {self.spatial_dims} numbers of voxels, from 1 to {_LARGEST_PATCH}, with "
                f"spatial_dims {self.spatial_dims}; got {list(self.patch_size)}"
            )
        self._check_normalisation()

    def _check_normalisation(self) -> None:
        words = self.normalisation or ()
        for word in words:
            check_choice("normalisation", word, NORMALISATIONS)
        numbers, wanted = self.ct_intensities or (), 4 * words.count("ct")
        if len(numbers) != wanted:
            counted = f"{len(numbers)} numbers, and normalisation {','.join(words) or 'null'} needs {wanted}"
            raise ConfigError(
                f"ct_intensities has {counted}: {', '.join(_CT_NUMBERS)} of each channel with ct"
            )
        for low, high, _, deviation in zip(*(numbers[k::4] for k in range(4)), strict=True):
            if not (low < high and deviation > 0):
                raise ConfigError(
                    f"ct_intensities must be {', '.join(_CT_NUMBERS)}, with low below high and a positive "
                    f"deviation, got {list(numbers)}"
                )

    @property
    def normalises(self) -> bool:
        """Return whether a channel is normalised by its modality; images are read as stored then."""
        return any(word != "none" for word in self.normalisation or ())

    @property
    def moves_voxels(self) -> bool:
        """Return whether volumes are turned, cut or resampled."""
        return self.orientation is not None or self.spacing is not None or self.crop != "none"

    @property
    def left_to_right(self) -> int | None:
        """The axis that the network sees from left to right, or back; of volumes as stored the first.

        ``None`` where slices are cut across it: mirroring changes the order of slices then, and none of them.

        Example:
            >>> [Plan(dims, orientation).left_to_right for dims in (2, 3) for orientation in (None, "ASR")]
            [0, None, 0, 2]
        """
        axis = (
            0
            if self.orientation is None
            else next(i for i, c in enumerate(self.orientation) if c in _AXES[0])
        )
        return axis if axis < self.spatial_dims else None

    @property
    def samples_per_item(self) -> int:
        """Training samples that a volume, or a slice of one, gives for an epoch."""
        return self.patches_per_volume if self.spatial_dims == 3 and self.patch_size else 1


PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(Plan))
"""Settings of `Plan`, which can be given one by one."""


def planning_settings(given: Iterable[str], memory: float | None = None) -> dict[str, Any]:
    """Return the settings of a plan from the sites' fingerprints: `medfedaug.config.run.RunConfig.planning`.

    Args:
        given: names of the settings that were given. Those that a plan would decide, which are the fields of
            `Plan` and ``batch_size``, stay as they are.
        memory: GiB for a training step; ``None`` for the default.
    """
    decided = {*PLAN_FIELDS, "batch_size"}
    return {"memory": memory or PLAN_MEMORY, "given": sorted(decided & set(given))}


def save_plan(path: str | Path, plan: Plan, beside: Mapping[str, Any] | None = None) -> None:
    """Write a plan as JSON.

    Args:
        path: the file; an existing one is replaced.
        plan: the plan.
        beside: further content for a reader of the file; it is not read again.

    Raises:
        StorageError: when the file cannot be written.
    """
    write_versioned(path, _KIND, _VERSION, {"plan": plan.to_dict(), **(beside or {})})


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `save_plan` wrote, or a JSON object with nothing but fields of `Plan`.

    Raises:
        ConfigError: when the file is no such file; names it.
    """
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
        if isinstance(content, dict) and "format" in content:
            content = check_version(content, _KIND, _VERSION).get("plan")
        return Plan.from_dict(content)
    except (OSError, ValueError, ConfigError) as error:
        raise ConfigError(f"{path}: not a plan ({error})") from error
