"""Training samples of an epoch: augmented batch by batch, prefetched during computation."""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from monai.transforms import (
    Compose,
    RandAdjustContrastd,
    RandAffined,
    RandFlipd,
    RandGaussianNoised,
    RandGaussianSmoothd,
    Randomizable,
    RandScaleIntensityd,
    RandScaleIntensityFixedMeand,
    RandSimulateLowResolutiond,
)
from monai.utils import CommonKeys as Keys
from monai.utils import convert_to_tensor
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import ConcatDataset, Dataset

from medfedaug.config.run import derive_seed

Sample = dict[Hashable, Tensor]
"""An image with its label, by MONAI's keys."""

PAPERS_ANGLE = math.pi / 6
"""30 degrees, FedFA appendix E.2."""

_NEAREST = "nearest"
_ANISOTROPIC = 3  # ratio of edges from which nnU-Net augments a volume as a stack of slices


class FlipRotate(Randomizable):
    r"""Mirror left and right with probability 1/2, then rotate about the centre by a uniformly drawn angle.

    Volumes are rotated in the plane of their first two axes.

    The result equals MONAI's `RandFlipd` and `RandRotated`, up to rounding, with as many draws for each image
    and a single interpolation for all images of one size: image by image, the calls would cost more than the
    arithmetic, on a GPU tens of times more. Voxels from outside the image are zero.

    Args:
        max_angle: largest angle in radians; 0 for only flips.
        axis: the spatial axis from left to right: 0 for volumes indexed by (x, y, z), 1 for photographs;
            ``None`` for no flips.
        modes: the interpolation of each key: ``"bilinear"`` or ``"nearest"``, which keeps the dtype.

    Example:
        >>> augment = FlipRotate(max_angle=0.0, axis=1)
        >>> _ = augment.set_random_state(6)
        >>> [sample["image"].tolist() for sample in augment([{"image": torch.tensor([[[1.0, 2.0]]])}] * 2)]
        [[[[1.0, 2.0]]], [[[2.0, 1.0]]]]
    """

    def __init__(
        self,
        max_angle: float,
        axis: int | None = 0,
        modes: Sequence[tuple[Hashable, str]] = (("image", "bilinear"),),
    ) -> None:
        self.max_angle, self.axis, self.modes = max_angle, axis, tuple(modes)
        self.flips, self.angles = torch.zeros(0, dtype=torch.bool), torch.zeros(0)

    def randomize(self, data: int) -> None:
        """Draw flips and angles for a number of images."""
        self.flips = torch.from_numpy(self.R.uniform(size=data) < 0.5)
        if self.max_angle:
            self.angles = torch.from_numpy(self.R.uniform(-self.max_angle, self.max_angle, size=data)).float()

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return new samples; images of different sizes are processed separately, with the same draws."""
        self.randomize(len(samples))
        by_size: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for i, sample in enumerate(samples):
            by_size[tuple(sample[self.modes[0][0]].shape)].append(i)
        out = [dict(sample) for sample in samples]
        for indices in by_size.values():
            for key, mode in self.modes:
                values = self._apply([samples[i][key] for i in indices], indices, mode)
                for i, value in zip(indices, values, strict=True):
                    out[i][key] = value
        return out

    def _apply(self, images: Sequence[Tensor], indices: Sequence[int], mode: str) -> Sequence[Tensor]:
        flipped = [*images]
        if self.axis is not None:
            flips = self.flips[indices].tolist()
            # Image by image, since one fits into a processor's cache, and a batch does not.
            flipped = [x.flip(1 + self.axis) if flip else x for x, flip in zip(images, flips, strict=True)]
        if not self.max_angle:
            return flipped
        batch = torch.stack(flipped)
        # All slices of a volume have one rotation, like channels.
        planes = batch.movedim(-1, 2).flatten(1, 2) if batch.ndim == 5 else batch
        grid = _rotation(self.angles[indices].to(batch.device), planes.shape[-2:])
        turned = torch.nn.functional.grid_sample(
            planes.float(), grid, mode=mode, padding_mode="zeros", align_corners=False
        )
        if batch.ndim == 5:
            turned = turned.unflatten(1, (batch.shape[1], -1)).movedim(2, -1)
        return list(turned.to(batch.dtype) if mode == _NEAREST else turned)


def _rotation(angles: Tensor, size: Sequence[int]) -> Tensor:
    """Return the origin of each pixel of the rotated image, (B, H, W, 2), for `grid_sample`."""
    height, width = size
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    # Coordinates run from -1 to 1 along sides of any length: hence the ratio of the sides.
    rows = [torch.stack([cos, sin * height / width, zero]), torch.stack([-sin * width / height, cos, zero])]
    theta = torch.stack(rows).permute(2, 0, 1)
    return torch.nn.functional.affine_grid(theta, [len(angles), 1, height, width], align_corners=False)


class MonaiAugmentation(Randomizable):
    """MONAI's random transforms, image by image, with the strengths of nnU-Net (Isensee et al., 2021).

    ``intensity``, in independent draws on channels with mean 0 and standard deviation 1, which is undone
    afterwards: noise of standard deviation up to 0.1 with probability 0.1 (`RandGaussianNoised`), a blur of
    0.5 to 1 voxels with 0.2 (`RandGaussianSmoothd`), a factor of 0.75 to 1.25 with 0.15
    (`RandScaleIntensityd`), the same within the image's range with 0.15 (`RandScaleIntensityFixedMeand`), a
    resolution down to half with 0.25 (`RandSimulateLowResolutiond`), and a power of 0.7 to 1.5 with 0.3, of
    the inverted image with 0.1 (`RandAdjustContrastd`, mean and standard deviation kept).

    ``full``: before that, a flip along each of some axes with probability 1/2 (`RandFlipd`), and with
    probability 0.3 a rotation by up to 30 degrees about every axis, of slices in their plane, and a scaling
    by a factor from 0.7 to 1.4 (`RandAffined`). A volume with an edge of more than three times the shortest
    one is rotated and scaled only in the plane of the two longer edges. Voxels from outside have the
    intensity of the darkest voxel.

    Args:
        name: ``"intensity"`` or ``"full"``.
        spatial_dims: number of spatial axes of the images.
        keys: key of the image and, where the label map is moved along, its key.
        mirrored: the spatial axes that ``full`` mirrors; ``None`` for all.

    Deviations:
        nnU-Net draws rotation and scaling separately, and fills voxels from outside with the mean.
    """

    def __init__(
        self, name: str, spatial_dims: int, keys: Sequence[str], mirrored: Sequence[int] | None = None
    ) -> None:
        self.image = keys[0]
        self.flips, self.affines = Compose(), dict[int | None, RandAffined]()
        if name == "full":
            axes = range(spatial_dims) if mirrored is None else mirrored
            self.flips = Compose([RandFlipd(keys, prob=0.5, spatial_axis=axis) for axis in axes])
            for short in (None, *range(3)) if spatial_dims == 3 else (None,):
                self.affines[short] = _affine(spatial_dims, keys, short)
        key, blur, gamma = self.image, (0.5, 1.0), (0.7, 1.5)
        mode = "trilinear" if spatial_dims == 3 else "bilinear"
        self.looks = Compose(
            [
                RandGaussianNoised(key, std=0.1, prob=0.1),
                RandGaussianSmoothd(key, sigma_x=blur, sigma_y=blur, sigma_z=blur, prob=0.2),
                RandScaleIntensityd(key, factors=0.25, prob=0.15),
                RandScaleIntensityFixedMeand(key, factors=0.25, preserve_range=True, prob=0.15),
                RandSimulateLowResolutiond(key, zoom_range=(0.5, 1.0), prob=0.25, upsample_mode=mode),
                RandAdjustContrastd(key, gamma=gamma, invert_image=True, retain_stats=True, prob=0.1),
                RandAdjustContrastd(key, gamma=gamma, retain_stats=True, prob=0.3),
            ]
        )

    def set_random_state(
        self, seed: int | None = None, state: np.random.RandomState | None = None
    ) -> MonaiAugmentation:
        """Set the seed of all draws."""
        super().set_random_state(seed, state)
        parts: tuple[Randomizable, ...] = (self.flips, *self.affines.values(), self.looks)
        for transform in parts:
            transform.set_random_state(int(self.R.randint(2**32, dtype=np.uint32)))
        return self

    def __call__(self, samples: Sequence[Sample]) -> list[Sample]:
        return [self._augmented(sample) for sample in samples]

    def _augmented(self, sample: Sample) -> Sample:
        moved = self._moved(sample) if self.affines else sample
        flat = moved[self.image].flatten(1)
        over = (-1, *[1] * (moved[self.image].ndim - 1))
        mean, std = flat.mean(dim=1).view(over), flat.std(dim=1, correction=0).view(over)
        scaled = (moved[self.image] - mean) / torch.where(std > 0, std, 1.0)
        looks = convert_to_tensor(self.looks({self.image: scaled})[self.image], track_meta=False)
        image = (looks * std + mean).to(sample[self.image].dtype)
        return {**moved, self.image: image}

    def _moved(self, sample: Sample) -> Sample:
        image = sample[self.image]
        darkest = image.flatten(1).amin(dim=1).view(-1, *[1] * (image.ndim - 1))
        affine = self.affines[_short_axis(image.shape[1:]) if image.ndim == 4 else None]
        moved = affine(self.flips({**sample, self.image: image - darkest}))
        plain = {
            key: convert_to_tensor(value, track_meta=False).to(sample[key].dtype)
            for key, value in moved.items()
        }
        return {**plain, self.image: plain[self.image] + darkest}


def _affine(spatial_dims: int, keys: Sequence[str], short: int | None) -> RandAffined:
    """Rotate and scale about and along every axis, or in the plane across a short axis."""
    volume_angles = [PAPERS_ANGLE if short in (None, axis) else 0.0 for axis in range(3)]
    # Of the sampling grid: an object is scaled by the inverse.
    scale = (1 / 1.4 - 1, 1 / 0.7 - 1)
    return RandAffined(
        keys,
        prob=0.3,
        rotate_range=volume_angles if spatial_dims == 3 else PAPERS_ANGLE,
        scale_range=[(0.0, 0.0) if axis == short else scale for axis in range(spatial_dims)],
        mode=["bilinear", *[_NEAREST] * (len(keys) - 1)],
        padding_mode="zeros",
    )


def _short_axis(size: Sequence[int]) -> int | None:
    """Return the axis along which a volume is flat, with another more than three times as long."""
    shortest = min(range(len(size)), key=lambda axis: size[axis])
    return shortest if max(size) > _ANISOTROPIC * size[shortest] else None


class Augmentation(Protocol):
    """Augmentation of a batch, with all draws from a seed."""

    def set_random_state(self, seed: int | None = None) -> Any:
        """Set the seed of all draws."""

    def __call__(self, samples: Sequence[Sample]) -> list[Any]:
        """Return new samples, in order; a list instead of a sample that becomes several."""


class DrawnSamples(Protocol):
    """Samples with random patches: see `medfedaug.federation.site.samples.TrainingSamples`."""

    def __len__(self) -> int: ...

    def draw(self, index: int, random: np.random.RandomState) -> Sample:
        """Draw a sample."""


class TrainingDataset(Dataset[Sample]):
    """A site's training samples as the network sees them, batch by batch.

    A sample is drawn and transformed by ``before``, augmented with its batch, and transformed by ``after``.

    Attributes:
        drawn: the indices of the batches that were made and not yet trained on, oldest first.
    """

    def __init__(
        self,
        samples: DrawnSamples,
        before: Compose,
        augmentation: Augmentation | None,
        after: Compose,
        seed: int,
    ) -> None:
        self.samples, self.before, self.augmentation, self.after = samples, before, augmentation, after
        self.drawn = deque[Sequence[int]]()
        self.reseed(seed)

    def reseed(self, seed: int) -> None:
        """Set the seed of all draws from now on."""
        self.patches = np.random.RandomState(derive_seed(seed, "patches"))
        if self.augmentation is not None:
            self.augmentation.set_random_state(seed)
        for transforms in (self.before, self.after):
            transforms.set_random_state(seed)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch, for a `DataLoader`."""
        self.drawn.append(indices)
        return self.transformed([self.samples.draw(i, self.patches) for i in indices])

    def transformed(self, drawn: Sequence[Sample]) -> list[Sample]:
        """Transform and augment stored samples."""
        samples: list[Any] = [self.before(sample) for sample in drawn]
        if self.augmentation is not None:
            samples = self.augmentation(samples)
        return [self.after(sample) for sample in samples]


class ConcatenatedDataset(ConcatDataset[Sample]):
    """The training samples of several sites, batched site by site."""

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        """Return the samples of a batch, in the order of the indices."""
        owners = [bisect_right(self.cumulative_sizes, i) for i in indices]
        samples: dict[int, Sample] = {}
        for owner in sorted(set(owners)):
            part = [i for i, other in zip(indices, owners, strict=True) if other == owner]
            start = self.cumulative_sizes[owner - 1] if owner else 0
            dataset: TrainingDataset = self.datasets[owner]  # type: ignore[assignment]
            samples.update(zip(part, dataset.__getitems__([i - start for i in part]), strict=True))
        return [samples[i] for i in indices]


Batch = TypeVar("Batch")


def prefetch(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Prepare the next batch in a thread during the use of one, unless PyTorch uses all cores of the CPU.

    Unlike MONAI's `ThreadBuffer`, this function raises errors of the thread. For a GPU, CPU tensors go to
    pinned memory, which is copied while the GPU computes.
    """
    # PyTorch's threads wait for each other after every operation: a thread that shares its core with this
    # one delays all, which costs more than the batch.
    if device.type == "cpu" and torch.get_num_threads() >= (os.cpu_count() or 1):
        yield from batches
        return
    source = iter(batches)

    def make() -> Batch | None:
        batch = next(source, None)
        return tree_map_only(Tensor, _pinned, batch) if device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as pool:
        # Each context shares the decoded images with the thread.
        waiting = pool.submit(copy_context().run, make)
        while (batch := waiting.result()) is not None:
            waiting = pool.submit(copy_context().run, make)
            yield batch


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor


def on_device(batch: Mapping[Any, Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy a batch's images and its targets to a device."""
    images, targets = (batch[key].to(device, non_blocking=True) for key in (Keys.IMAGE, Keys.LABEL))
    return images, targets
