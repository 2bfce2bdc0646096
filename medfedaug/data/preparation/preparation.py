"""Turn, normalise and resample a volume by a plan, and return results to the grid of its file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import nibabel
import numpy as np
import torch
from monai.transforms import NormalizeIntensity
from torch import Tensor

from medfedaug.config.plan import Plan
from medfedaug.statistics import image_moments

MOST_NUMBERS = 2**29
"""Limit on the numbers of a resampled image, 2 GiB; 512 x 512 x 2,000 voxels of a CT are fewer."""

_NEAREST = "nearest-exact"
_PREFIXES = {"image": "", "foreground": "foreground_"}


class ModalityNormalisation:
    """Normalise the channels of an image by the words of a plan's ``normalisation``.

    ::

        z_score: z = (x − x̄) / s(x)
        ct:      z = (min(max(x, l), h) − μ) / σ

    x are the channel's stored intensities before resampling; mean and standard deviation (population) are
    over x, and l, h, μ, σ are the plan's ``ct_intensities`` (nnU-Net, Isensee et al., Nature Methods 2021). A
    channel with ``none`` is unchanged. A constant channel, which stands for a missing one, becomes 0.

    Attributes:
        low: lower limit of each channel; -inf without clipping.
        high: upper limit of each channel; inf without clipping.
        mean: number subtracted from each channel; ``None`` for its own mean.
        deviation: divisor of each channel; ``None`` for its own standard deviation.

    Deviations:
        nnU-Net takes mean and standard deviation of the non-zero voxels where cropping to these removes more
        than a quarter of the volumes; here they are always of all voxels.
    """

    def __init__(self, plan: Plan, channels: int) -> None:
        words = plan.normalisation or ()
        repeats = channels if len(words) == 1 else 1
        numbers = iter((plan.ct_intensities or ()) * repeats)
        self.low, self.high = [-math.inf] * channels, [math.inf] * channels
        self.mean: list[float | None] = [None] * channels
        self.deviation: list[float | None] = [None] * channels
        for index, word in enumerate(words * repeats):
            if word == "ct":
                self.low[index], self.high[index] = next(numbers), next(numbers)
                self.mean[index], self.deviation[index] = next(numbers), next(numbers)
            elif word == "none":
                self.mean[index], self.deviation[index] = 0.0, 1.0

    @property
    def clips(self) -> bool:
        """Return whether any channel is clipped."""
        return any(map(math.isfinite, self.low))

    def __call__(self, image: Tensor) -> Tensor:
        """Return the normalised image, (C, *spatial)."""
        shape = (-1, *[1] * (image.ndim - 1))
        low, high = (torch.tensor(values).reshape(shape) for values in (self.low, self.high))
        clipped = image.clamp(low, high) if self.clips else image.clone()
        normalise = NormalizeIntensity(self.mean, self.deviation, channel_wise=True)
        normalised = torch.as_tensor(normalise(clipped)).as_subclass(Tensor)
        darkest, brightest = image.flatten(1).aminmax(dim=1)
        normalised[darkest == brightest] = 0
        return normalised


@dataclass(frozen=True)
class Placement:
    """Place of a prepared volume in the grid of its file.

    Example:
        >>> place = Placement((1, 0, 2), (True, False, False), (2, 3, 1), (3, 2, 1))
        >>> stored = torch.arange(6.0).reshape(1, 2, 3, 1)
        >>> bool((place.back(place.forward(stored)) == stored).all())
        True
    """

    axes: tuple[int, ...]  # the stored axis of each prepared axis
    flips: tuple[bool, ...]  # whether each prepared axis runs against the stored one
    stored: tuple[int, ...]  # voxels along the stored axes
    size: tuple[int, ...]  # voxels along each prepared axis

    def turned(self, volume: Tensor) -> Tensor:
        """Turn the axes of the stored volume, (C, X, Y, Z)."""
        turned = volume.permute(0, *(axis + 1 for axis in self.axes))
        return turned.flip([axis + 1 for axis, flip in enumerate(self.flips) if flip])

    def forward(self, volume: Tensor, *, label: bool = False) -> Tensor:
        """Bring a volume, (C, X, Y, Z), from the file's grid to the plan's; a label map keeps its dtype."""
        return self.resampled(self.turned(volume), label=label)

    def resampled(self, turned: Tensor, *, label: bool = False) -> Tensor:
        """Resample the result of `turned` to the plan's grid."""
        return _resampled(turned, self.size, label)

    def resized_back(self, volume: Tensor) -> Tensor:
        """Resample a volume from the plan's grid to the file's voxels, along the prepared axes."""
        return _resampled(volume, tuple(self.stored[axis] for axis in self.axes))

    def put_back(self, volume: Tensor) -> Tensor:
        """Turn the axes of the result of `resized_back` to those of the file."""
        whole = volume.flip([axis + 1 for axis, flip in enumerate(self.flips) if flip])
        return whole.permute(0, *(1 + self.axes.index(axis) for axis in range(3)))

    def back(self, volume: Tensor) -> Tensor:
        """Bring a volume from the plan's grid to the file's."""
        return self.put_back(self.resized_back(volume))

    def to_tensor(self) -> Tensor:
        """Return the placement as integers, (4, 3)."""
        return torch.tensor([self.axes, self.flips, self.stored, self.size])

    @classmethod
    def from_tensor(cls, values: Tensor) -> Placement:
        """Invert `to_tensor`."""
        axes, flips, *rest = (tuple(row) for row in values.tolist())
        return cls(axes, tuple(map(bool, flips)), *rest)


class Preparation:
    """Preparation of images after the scaling of their intensities: plan and image size.

    The steps are: turn to the plan's orientation, normalise by modality, resample to the plan's spacing,
    resize in plane to ``image_size``. Resampling keeps the edges of the volume in place:
    n voxels of e mm become round(n·e/s), at least one, of about s mm.
    """

    def __init__(self, plan: Plan | None = None, image_size: int | None = None) -> None:
        self.plan, self.image_size = plan or Plan(), image_size

    def placement(self, image: Tensor, affine: Tensor | None) -> Placement | None:
        """Compute the placement of a volume, (C, X, Y, Z); ``None`` where the plan moves no voxel."""
        plan = self.plan
        if plan.orientation is None and plan.spacing is None:
            return None
        if affine is None:
            raise ValueError("the plan has a spacing or an orientation, and the file states no geometry")
        axes: tuple[int, ...] = (0, 1, 2)
        flips: tuple[bool, ...] = (False, False, False)
        matrix = np.asarray(affine, dtype=float)
        edges = np.linalg.norm(matrix[:3, :3], axis=0).tolist()
        if plan.orientation is not None:
            axes, flips = _turn(matrix, plan.orientation)
        stored = tuple(image.shape[1:])
        lengths = size = tuple(stored[axis] for axis in axes)
        if plan.spacing is not None:
            grid = zip(lengths, axes, plan.spacing, strict=True)
            size = tuple(max(1, round(n * edges[axis] / edge)) for n, axis, edge in grid)
            # The plan may be a server's, and must not exhaust the memory of a site.
            if size != lengths and image.shape[0] * math.prod(size) > MOST_NUMBERS:
                spacing, text = " x ".join(f"{edge:g}" for edge in plan.spacing), " x ".join(map(str, size))
                raise ValueError(
                    f"resampled to {spacing} mm it would have {text} voxels, and at most {MOST_NUMBERS:,} "
                    "numbers are prepared of one case"
                )
        return Placement(axes, flips, stored, size)

    def on_grid(self, image: Tensor, placement: Placement | None) -> Tensor:
        """Return the normalised image on the plan's grid, before it is resized in plane."""
        turned = placement.turned(image) if placement else image
        if self.plan.normalises:
            turned = ModalityNormalisation(self.plan, len(image))(turned)
        return placement.resampled(turned) if placement else turned

    def image(self, image: Tensor, placement: Placement | None) -> Tensor:
        """Return the prepared image, (C, *spatial)."""
        return resize_in_plane(self.on_grid(image, placement), self.image_size)

    def label(self, label: Tensor, placement: Placement | None) -> Tensor:
        """Return the label map on the grid of `image`, (1, *spatial)."""
        moved = placement.forward(label, label=True) if placement else label
        return resize_in_plane(moved, self.image_size, _NEAREST)

    def moments(self, image: Tensor, over: str = "image") -> dict[str, Tensor]:
        """Compute the moments (`medfedaug.statistics.image_moments`) of an image, (C, *spatial).

        Both are over the ``"image"``, or over its ``"foreground"`` (`foreground_voxels`)
        where it has any.
        """
        inside = image[:, foreground_voxels(image)] if over == "foreground" else image
        return image_moments(inside if inside.numel() else image)

    def of_whole(self, image: Tensor) -> dict[str, Tensor]:
        """Compute a prepared image's `moments` over either."""
        return {
            prefix + key: value
            for over, prefix in _PREFIXES.items()
            for key, value in self.moments(image, over).items()
        }

    @staticmethod
    def kept_moments(read: Callable[[str], Tensor], over: str = "image") -> dict[str, Tensor]:
        """Read the `moments` of an image from the stored result of `of_whole`."""
        return {key: read(_PREFIXES[over] + key) for key in ("mean", "std")}

    def __repr__(self) -> str:
        """Return the settings that change the result, for the names of cached files."""
        plan, more = self.plan, ""
        if plan.normalises:
            more = f", {plan.normalisation}, {plan.ct_intensities}"
        return f"({plan.orientation}, {plan.spacing}, {self.image_size}{more})"


def foreground_voxels(image: Tensor) -> Tensor:
    """Return the mask, (*spatial), of the voxels at which any channel is brighter than its darkest voxel."""
    darkest = image.flatten(1).amin(dim=1).reshape(-1, *[1] * (image.ndim - 1))
    return (image > darkest).any(dim=0)


def _turn(affine: np.ndarray, orientation: str) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    now = nibabel.io_orientation(affine)
    goal = nibabel.orientations.axcodes2ornt(tuple(orientation))
    turn = nibabel.orientations.ornt_transform(now, goal)  # stored axis -> (prepared axis, direction)
    axes = [int(np.flatnonzero(turn[:, 0] == axis)[0]) for axis in range(3)]
    return tuple(axes), tuple(bool(turn[axis, 1] < 0) for axis in axes)


def _resampled(volume: Tensor, size: tuple[int, ...], label: bool = False) -> Tensor:
    if tuple(volume.shape[1:]) == size:
        return volume
    if not label:
        return torch.nn.functional.interpolate(volume[None], size, mode="trilinear", align_corners=False)[0]
    # The class with the largest share of a voxel; the nearest class would move edges by half a voxel.
    largest = torch.zeros(1, *size)
    label_map = torch.zeros(1, *size, dtype=volume.dtype)
    for value in torch.unique(volume).tolist():
        share = _resampled((volume == value).float(), size)
        label_map = torch.where(share > largest, torch.tensor(value, dtype=volume.dtype), label_map)
        largest = torch.maximum(largest, share)
    return label_map


def resize_in_plane(image: Tensor, size: int | None, mode: str = "bilinear") -> Tensor:
    """Resize a photograph, a slice or a volume in plane; the dtype stays.

    Bilinear interpolation is anti-aliased like Pillow's: shrinking averages, like a coarser scan.

    Args:
        image: (C, H, W), or (C, H, W, D), slice by slice; uint8 or floating point, labels also int32 below
            2^24.
        size: pixels in both directions; ``None`` for no change.
        mode: ``"bilinear"``, or ``"nearest-exact"`` for labels.
    """
    if size is None or tuple(image.shape[1:3]) == (size, size):
        return image
    smooth = {"antialias": True} if mode == "bilinear" else {}
    planes = image.permute(3, 0, 1, 2) if image.dim() == 4 else image[None]
    planes = planes.float() if planes.dtype == torch.int32 else planes  # PyTorch interpolates no int32
    resized = torch.nn.functional.interpolate(planes, (size, size), mode=mode, **smooth).to(image.dtype)
    return resized.permute(1, 2, 3, 0) if image.dim() == 4 else resized[0]
