"""`Plan`: orientation, spacing, normalisation and patches of images; `PlanningConfig`."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from medfedaug.config.options import Settings, setting, settings
from medfedaug.errors import ConfigError, config_errors
from medfedaug.utils.files import check_version, parse_json, write_versioned
from medfedaug.utils.validation import check_choice

__all__ = [
    "NORMALISATIONS",
    "PLANNED",
    "PLAN_FIELDS",
    "Plan",
    "PlanningConfig",
    "load_plan",
    "save_plan",
]

PLANNED = ("plan", "batch_size", "network_args")
"""Settings of a run that planning decides."""
NORMALISATIONS = ("none", "z_score", "ct")
"""Normalisations of a channel by its modality."""

_CT_NUMBERS = ("low", "high", "mean", "standard deviation")
_KIND, _VERSION = "plan", 1
_AXES = ({"R", "L"}, {"A", "P"}, {"S", "I"})
_LARGEST_PATCH = 4096


@settings
class Plan(Settings):
    """Orientation, spacing and patches of volumes for the network.

    With the defaults, networks see whole slices along a volume's last axis, as stored; training takes those
    with foreground. With every plan, scores are computed on the grid of the label map's file.

    Raises:
        ConfigError: for a value of another type or out of range, or values that do not go together.
    """

    PANEL: ClassVar[str] = "The plan of volumes"
    OPEN: ClassVar[str] = "the plan's value"

    spatial_dims: int = setting(2, "2 for slices or photographs, 3 for volumes.", at_least=2, at_most=3)
    orientation: str | None = setting(
        None,
        "Orientation of a volume's axes, for instance RAS, by flips and permutations without interpolation. "
        "By default axes stay as stored.",
        rare=True,
    )
    spacing: tuple[float, ...] | None = setting(
        None,
        "Voxel size in mm (x,y,z) to which volumes are resampled. Images are interpolated "
        "linearly; so are the classes' shares of a label map, and the largest share wins. By default volumes "
        "keep their spacing.",
    )
    patch_size: tuple[int, ...] | None = setting(
        None,
        "Patch size in voxels, also of the sliding window of evaluation. By default whole slices, or whole "
        "volumes.",
    )
    patches_per_volume: int = setting(
        2, "Patches per volume and epoch; a slice gives one.", above=0, rare=True
    )
    foreground: float = setting(
        0.5,
        "Share of the training patches that are centred on a foreground voxel of a randomly drawn class; "
        "the others are centred anywhere.",
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
        "Normalisation of each channel, instead of --intensity: z_score, ct or none. z_score normalises by "
        "the image's mean and standard deviation; ct clips to two intensities and normalises by a mean and "
        "a standard deviation that are the same for all images (ct_intensities); none keeps the intensities "
        "as stored. One word counts for all channels. By default, and with none for all channels, "
        "--intensity decides.",
        rare=True,
    )
    ct_intensities: tuple[float, ...] | None = setting(
        None,
        "Four numbers for each channel with normalisation ct: the lowest and the highest intensity for "
        "clipping, then mean and standard deviation. Planning takes those of the federation's foreground.",
        rare=True,
    )
    deep_supervision: bool = setting(
        False,
        "Train heads at several levels of the decoder; each weighs half of the next finer one in the loss. "
        "Networks with such heads are dynunet, mednext and segresnetds.",
        rare=True,
    )

    def __post_init__(self) -> None:
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
        words, numbers = self.normalisation or (), self.ct_intensities or ()
        for word in words:
            check_choice("normalisation", word, NORMALISATIONS)
        expected = 4 * words.count("ct")
        if len(numbers) != expected:
            raise ConfigError(
                f"ct_intensities has {len(numbers)} numbers; normalisation {','.join(words) or 'null'} "
                f"needs {expected}: {', '.join(_CT_NUMBERS)} of each channel with ct"
            )
        for low, high, _, deviation in zip(*(numbers[k::4] for k in range(4)), strict=True):
            if not (low < high and deviation > 0):
                raise ConfigError(
                    f"ct_intensities must be {', '.join(_CT_NUMBERS)}, with low below high and a positive "
                    f"standard deviation, got {list(numbers)}"
                )

    @property
    def normalises(self) -> bool:
        """Return whether a channel is normalised by its modality; images are read as stored then."""
        return any(word != "none" for word in self.normalisation or ())

    @property
    def left_to_right(self) -> int | None:
        """Return the axis from left to right, or back; the first axis of volumes as stored.

        It is ``None`` where slices are cut across it: mirroring then changes only the order of slices.

        Example:
            >>> [Plan(dims, orientation).left_to_right for dims in (2, 3) for orientation in (None, "ASR")]
            [0, None, 0, 2]
        """
        axis = next((i for i, letter in enumerate(self.orientation or "") if letter in _AXES[0]), 0)
        return axis if axis < self.spatial_dims else None

    @property
    def samples_per_item(self) -> int:
        """Return the training samples of a volume or slice in an epoch."""
        return self.patches_per_volume if self.spatial_dims == 3 and self.patch_size else 1


PLAN_FIELDS = tuple(field.name for field in dataclasses.fields(Plan))
"""Settings of `Plan`, each of which is an option too."""


_DECIDED = {*PLAN_FIELDS, "batch_size"}


@settings
class PlanningConfig(Settings):
    """Planning: a job that makes its plan from the sites' fingerprints (`medfedaug.federation.planning`).

    Raises:
        ConfigError: for a value of another type or out of range.
    """

    TITLE: ClassVar[str] = "planning: "

    memory: float = setting(8.0, "Memory of a training step in GiB.", above=0, flags=None)
    given: tuple[str, ...] = setting(
        (), "Settings that planning keeps: fields of `Plan`, and ``batch_size``.", flags=None
    )

    def __post_init__(self) -> None:
        for name in self.given:
            check_choice(f"{self.TITLE}given", name, sorted(_DECIDED))

    @classmethod
    def keeping(cls, names: Iterable[str], memory: float | None = None) -> Self:
        """Return the planning that keeps those of the named settings on which planning decides."""
        return cls(memory=memory or cls.memory, given=tuple(sorted(_DECIDED & set(names))))


def save_plan(path: str | Path, plan: Plan, extra: Mapping[str, Any] | None = None) -> None:
    """Write a plan as JSON, with ``extra`` content for a reader of the file, which `load_plan` ignores."""
    write_versioned(path, _KIND, _VERSION, {"plan": plan.to_dict(), **(extra or {})})


def load_plan(path: str | Path) -> Plan:
    """Read a plan that `save_plan` wrote, or a JSON object of fields of `Plan`.

    Raises:
        ConfigError: when the file is no such file; names it.
    """
    with config_errors(f"{path}: not a plan", OSError, ValueError, ConfigError):
        content = parse_json(Path(path).read_text(encoding="utf-8"))
        if isinstance(content, dict) and "format" in content:
            content = check_version(content, _KIND, _VERSION).get("plan")
        return Plan.from_dict(content)
