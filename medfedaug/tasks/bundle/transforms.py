"""Parts of a Bundle's transforms: deterministic ones, random ones, and crops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from monai.transforms import (
    Compose,
    Orientationd,
    Randomizable,
    RandomizableTrait,
    ResampleToMatchd,
    Spacingd,
    SpatialResampled,
    Transform,
)
from monai.utils import CommonKeys as Keys
from monai.utils import convert_to_tensor, ensure_tuple

_CROPS, _INTENSITY = "monai.transforms.croppad", "monai.transforms.intensity"
_LOCATED = (Orientationd, ResampleToMatchd, Spacingd, SpatialResampled)


class Parts:
    """The transforms of training samples, split as by MONAI's `CacheDataset`.

    Args:
        transforms: a `Compose`, a list of transforms, or one.

    Attributes:
        once: transforms before the first random one; a site keeps their result.
        drawn: all others, for training.
        cutting: ``drawn`` without random ones that do not crop: for samples of the same size and scale
            without augmentation.
    """

    __slots__ = ("cutting", "drawn", "once")  # hides them from loaders that seed attributes

    def __init__(self, transforms: Any) -> None:
        whole = (transforms if isinstance(transforms, Compose) else Compose(transforms)).flatten()
        first = whole.get_index_of_first(
            lambda t: isinstance(t, RandomizableTrait) or not isinstance(t, Transform)
        )
        every = list(whole.transforms)
        cut = len(every) if first is None else first
        self.once = Compose(every[:cut])
        self.drawn: list[Any] = every[cut:]
        # Copies, since training draws from its own transforms.
        self.cutting = [
            deepcopy(t) for t in self.drawn if not isinstance(t, RandomizableTrait) or _within(t, _CROPS)
        ]

    @property
    def crops(self) -> bool:
        """True if samples are random crops of a case."""
        return any(isinstance(t, RandomizableTrait) for t in self.cutting)

    @property
    def located(self) -> str:
        """The transform, if any, that needs the affine after the first random one, which is not kept."""
        return next((type(t).__name__ for t in self.drawn if isinstance(t, _LOCATED)), "")

    @property
    def rescaling(self) -> str:
        """The transform, if any, that scales the image after the first random one."""
        for transform in self.drawn:
            fixed = not isinstance(transform, RandomizableTrait) and _within(transform, _INTENSITY)
            if fixed and Keys.IMAGE in ensure_tuple(getattr(transform, "keys", ())):
                return type(transform).__name__
        return ""


def _within(transform: Any, package: str) -> bool:
    return type(transform).__module__.startswith(package)


def plain_sample(sample: Any) -> Any:
    """Return image and label of one or several samples as tensors without MONAI's metadata.

    Boolean labels become 1 and 0: MONAI's losses take no norm of booleans.
    """
    if not isinstance(sample, Mapping):
        return [plain_sample(part) for part in sample]
    plain = {key: convert_to_tensor(sample[key], track_meta=False) for key in (Keys.IMAGE, Keys.LABEL)}
    return {key: value.float() if value.dtype == torch.bool else value for key, value in plain.items()}


class BundleAugmentation(Randomizable):
    """The random transforms of a Bundle, image by image, with all transforms after the first of them.

    Args:
        transforms: `Parts.drawn`.
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        self.transform = Compose(transforms)

    def set_random_state(
        self, seed: int | None = None, state: np.random.RandomState | None = None
    ) -> BundleAugmentation:
        """Set the seed of all draws."""
        self.transform.set_random_state(seed, state)
        return self

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        """Return new samples; several samples from one are a list in its place."""
        return [plain_sample(self.transform(dict(sample))) for sample in samples]
