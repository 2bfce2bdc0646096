"""A Bundle's transforms in their parts: what is done once, what is drawn anew, and what cuts samples."""

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

from medfedaug.data.preparation.preparation import LANDMARKS

_CROPS, _INTENSITY = "monai.transforms.croppad", "monai.transforms.intensity"
_LOCATED = (Orientationd, ResampleToMatchd, Spacingd, SpatialResampled)


class Parts:
    """The transforms of training samples, cut where MONAI's `CacheDataset` cuts them.

    Args:
        transforms: a `Compose`, a list of transforms, or one.

    Attributes:
        once: those before the first random one: what a site keeps of a case.
        drawn: all others, for training.
        cutting: of these all but the random ones that do not crop: samples of the same size and scale, which
            are not augmented.
    """

    __slots__ = ("cutting", "drawn", "once")  # a loader that seeds what it finds must not find these

    def __init__(self, transforms: Any) -> None:
        whole = (transforms if isinstance(transforms, Compose) else Compose(transforms)).flatten()
        first = whole.get_index_of_first(
            lambda t: isinstance(t, RandomizableTrait) or not isinstance(t, Transform)
        )
        every = list(whole.transforms)
        cut = len(every) if first is None else first
        self.once = Compose(every[:cut])
        self.drawn: list[Any] = every[cut:]
        # Copies, since training draws with its own while others look at what is not augmented.
        self.cutting = [
            deepcopy(t) for t in self.drawn if not isinstance(t, RandomizableTrait) or _within(t, _CROPS)
        ]

    @property
    def crops(self) -> bool:
        """Return whether a sample is cut at random out of a case."""
        return any(isinstance(t, RandomizableTrait) for t in self.cutting)

    @property
    def located(self) -> str:
        """The transform, if any, that needs the affine after the first random one, where it is not kept."""
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


def plain_sample(found: Any) -> Any:
    """Image, label and landmarks of a sample, or of each of several, as tensors without MONAI's meta data.

    Labels that are true or false become 1 and 0: of the others MONAI's losses cannot take a norm.
    """
    if not isinstance(found, Mapping):
        return [plain_sample(one) for one in found]
    kept = [Keys.IMAGE, Keys.LABEL, *([LANDMARKS] if LANDMARKS in found else [])]
    plain = {key: convert_to_tensor(found[key], track_meta=False) for key in kept}
    return {key: value.float() if value.dtype == torch.bool else value for key, value in plain.items()}


class BundleAugmentation(Randomizable):
    """The random transforms of a Bundle, image by image, with all that comes after the first of them.

    Args:
        transforms: `Parts.drawn`.
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        self.transform = Compose(transforms)

    def set_random_state(
        self, seed: int | None = None, state: np.random.RandomState | None = None
    ) -> BundleAugmentation:
        """Set the seed from which all draws follow."""
        self.transform.set_random_state(seed, state)
        return self

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        """New samples; a transform that makes several of one gives a list in its place."""
        return [plain_sample(self.transform(dict(sample))) for sample in samples]
