"""RandAugment: a few random operations of one magnitude, built from MONAI's transforms."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.config import KeysCollection
from monai.config.type_definitions import NdarrayOrTensor
from monai.data.meta_obj import get_track_meta
from monai.transforms import (
    AdjustContrast,
    Affine,
    Flip,
    GaussianSharpen,
    GaussianSmooth,
    HistogramNormalize,
    RandGaussianNoise,
    RandHistogramShift,
    ScaleIntensityFixedMean,
    ShiftIntensity,
)
from monai.transforms.transform import MapTransform, RandomizableTransform
from monai.utils import convert_to_dst_type, convert_to_tensor, ensure_tuple
from monai.utils.enums import TransformBackends
from torch import Tensor

__all__ = ["RandAugment", "RandAugmentD", "RandAugmentDict", "RandAugmentd"]

LARGEST = 10.0  # the magnitude for the strengths in the table

# Arguments of an operation: its strength from -1 to 1, with a random sign, and the in-plane size.
_GEOMETRIC: dict[str, Callable[[float, tuple[int, int]], dict[str, Any]]] = {
    "rotate": lambda m, size: {"rotate_params": m * math.pi / 6},
    "shear_x": lambda m, size: {"shear_params": (0.3 * m, 0.0)},
    "shear_y": lambda m, size: {"shear_params": (0.0, 0.3 * m)},
    "translate_x": lambda m, size: {"translate_params": (0.45 * m * size[0], 0.0)},
    "translate_y": lambda m, size: {"translate_params": (0.0, 0.45 * m * size[1])},
    "zoom": lambda m, size: {"scale_params": (1.5**-m,) * 2},
}
_FLIPS = {"flip_x": 0, "flip_y": 1}


def _histogram_shift(x: Tensor, m: float, seed: int) -> Tensor:
    if not _extent(x):
        return x
    shift = RandHistogramShift(prob=1.0)
    shift.set_random_state(seed)
    return torch.lerp(x, _plain(shift(x)), abs(m))


def _noise(x: Tensor, m: float, seed: int) -> Any:
    noise = RandGaussianNoise(prob=1.0, std=0.1 * abs(m) * _extent(x), sample_std=False)
    noise.set_random_state(seed)
    return noise(x)


def _posterise(x: Tensor, m: float, seed: int) -> Tensor:
    low, high = _range(x)
    levels = 2 ** (8 - round(4 * abs(m)))
    step = (high - low) / levels
    return x if step == 0 else ((x - low) / step).floor().clamp_max(levels - 1) * step + low


# Relative to the image's range or mean: images are in [0, 1], in [0, 255] or normalised.
_INTENSITY: dict[str, Callable[[Tensor, float, int], Any]] = {
    "identity": lambda x, m, seed: x,
    "gamma": lambda x, m, seed: AdjustContrast(gamma=2.5**m)(x),
    "contrast": lambda x, m, seed: ScaleIntensityFixedMean(factor=0.9 * m, preserve_range=True)(x),
    "brightness": lambda x, m, seed: ShiftIntensity(offset=0.3 * m * _extent(x))(x),
    "noise": _noise,
    "smooth": lambda x, m, seed: GaussianSmooth(sigma=1.5 * abs(m))(x),
    "sharpen": lambda x, m, seed: GaussianSharpen(sigma1=0.5, sigma2=1.0, alpha=3.0 * abs(m))(x),
    "histogram_shift": _histogram_shift,
    "equalize": lambda x, m, seed: HistogramNormalize(min=_range(x)[0], max=_range(x)[1])(x),  # type: ignore[arg-type]
    "posterize": _posterise,
}
_DEFAULT = (*_GEOMETRIC, *_INTENSITY)


def _plain(x: Any) -> Tensor:
    tensor: Tensor = convert_to_tensor(x, track_meta=False)
    return tensor


def _range(x: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(x)
    return float(low), float(high)


def _extent(x: Tensor) -> float:
    low, high = _range(x)
    return high - low


class RandAugment(RandomizableTransform):
    """Several random operations of one magnitude in sequence (Cubuk et al., NeurIPS 2020).

    Every call draws N operations from a list, uniformly and with replacement, and applies them with the
    strength M/10 and a random direction, for instance of a rotation. At M = 10:

    ================================  ==================================================================
    ``rotate``                        by 30 degrees
    ``shear_x``, ``shear_y``          by 0.3
    ``translate_x``, ``translate_y``  by 0.45 of the size
    ``zoom``                          by 1.5, in or out
    ``flip_x``, ``flip_y``            of either spatial axis, with any magnitude; not in the default list
    ``identity``                      nothing
    ``gamma``                         an exponent of 2.5 or 0.4
    ``contrast``                      about the mean, by 1.9 or 0.1, within the image's range
    ``brightness``                    shifted by 0.3 of the image's range
    ``noise``                         Gaussian, its standard deviation 0.1 of the range
    ``smooth``, ``sharpen``           Gaussian of 1.5 pixels; unsharp mask of weight 3
    ``histogram_shift``               MONAI's, blended with the image by M/10
    ``equalize``                      the histogram, within the image's range, with any magnitude
    ``posterize``                     to 16 grey levels
    ================================  ==================================================================

    Operations that move pixels fill the gaps with zeros; the dictionary version moves label maps too. With
    M = 0 or N = 0 the image stays as it is.

    Args:
        num_ops: N.
        magnitude: M, from 0 to 10.
        operations: names from the table; by default all but the flips, which have no magnitude and would
            mirror asymmetric anatomy.

    Raises:
        ValueError: for arguments out of range and unknown operations (lists the known ones); on a call, for
            an image that is not (C, H, W).

    Deviations:
        The paper's 14 operations are from a library for photographs. Here they are MONAI's, which are defined
        for any number of channels and any intensities: without ``color`` and ``solarize``, and with gamma,
        zoom, noise, smoothing and histogram shift. The paper's magnitude goes to 10 too, and beyond for large
        networks.

    Example:
        >>> transform = RandAugment(num_ops=1, magnitude=10, operations=["flip_y"]).set_random_state(0)
        >>> transform(torch.tensor([[[1.0, 2.0, 3.0]]])).tolist()
        [[[3.0, 2.0, 1.0]]]
    """

    backend = [TransformBackends.TORCH]  # noqa: RUF012, MONAI's declaration

    def __init__(
        self, num_ops: int = 2, magnitude: float = 9.0, operations: Sequence[str] | None = None
    ) -> None:
        RandomizableTransform.__init__(self, prob=1.0)
        known = (*_GEOMETRIC, *_FLIPS, *_INTENSITY)
        self.operations = tuple(_DEFAULT if operations is None else operations)
        if isinstance(operations, str) or not self.operations or not set(self.operations) <= set(known):
            raise ValueError(f"operations {operations!r}: choose a list from {', '.join(known)}")
        if num_ops < 0 or not 0 <= magnitude <= LARGEST:
            raise ValueError(f"num_ops {num_ops} ≥ 0 and magnitude {magnitude} in [0, 10] are needed")
        self.num_ops, self.magnitude = num_ops, magnitude
        self._drawn: list[tuple[str, float, int]] = []

    def randomize(self, data: Any = None) -> None:
        """Draw the operations, their directions and a seed for each, since noise draws many numbers."""
        self._drawn = []
        for _ in range(self.num_ops):
            name = self.operations[int(self.R.randint(len(self.operations)))]
            sign = 1.0 if self.R.random_sample() < 0.5 else -1.0
            self._drawn.append((name, sign * self.magnitude / LARGEST, int(self.R.randint(2**31 - 1))))

    def __call__(self, img: NdarrayOrTensor, randomize: bool = True) -> NdarrayOrTensor:
        """Augment `img`.

        Args:
            img: the image, (C, H, W); not modified.
            randomize: draw operations; otherwise apply those of the last call.

        Returns:
            The image in floating point, as a tensor, or as a MetaTensor with the metadata of `img` if MONAI
            tracks metadata.
        """
        if randomize:
            self.randomize()
        image = self._open(img)
        out = image.as_subclass(Tensor)
        if not out.is_floating_point():
            out = out.float()
        for name, strength, seed in self._drawn:
            if name in _INTENSITY:
                out = _plain(_INTENSITY[name](out, strength, seed)).to(out.dtype) if strength else out
            else:
                out = self._move(out, name, strength, "bilinear")
        return convert_to_dst_type(out, dst=image, dtype=out.dtype)[0]

    def move_label(self, label: NdarrayOrTensor) -> NdarrayOrTensor:
        """Move the pixels of a label map (C, H, W) like the image's in the last call."""
        image = self._open(label)
        out = image.as_subclass(Tensor)
        for name, strength, _ in self._drawn:
            if name not in _INTENSITY:
                out = self._move(out, name, strength, "nearest")
        return convert_to_dst_type(out, dst=image, dtype=out.dtype)[0]

    def _open(self, img: NdarrayOrTensor) -> Tensor:
        image: Tensor = convert_to_tensor(img, track_meta=get_track_meta())
        if image.ndim != 3:
            raise ValueError(f"RandAugment needs a slice or photograph (C, H, W), got {list(image.shape)}")
        return image

    @staticmethod
    def _move(x: Tensor, name: str, strength: float, mode: str) -> Tensor:
        if name in _FLIPS:
            return _plain(Flip(spatial_axis=_FLIPS[name])(x)) if strength else x
        if not strength:
            return x
        size = (x.shape[1], x.shape[2])
        move = Affine(**_GEOMETRIC[name](strength, size), mode=mode, padding_mode="zeros", image_only=True)
        return _plain(move(x)).to(x.dtype)


class RandAugmentd(RandomizableTransform, MapTransform):
    """Dictionary version of `RandAugment`: one draw per call, shared by all keys.

    Args:
        keys: keys of the images.
        num_ops: as for `RandAugment`.
        magnitude: as for `RandAugment`.
        operations: as for `RandAugment`.
        label_keys: keys of label maps, for the operations that move pixels, with nearest neighbours.
        allow_missing_keys: do not raise an error when a key is missing.

    Raises:
        ValueError: as for `RandAugment`.
        KeyError: on a call, when a key is missing and `allow_missing_keys` is false.

    Deviations:
        As for `RandAugment`.

    Example:
        >>> transform = RandAugmentd("image", operations=["flip_y"], num_ops=1, label_keys="label")
        >>> out = transform({"image": torch.tensor([[[1.0, 2.0]]]), "label": torch.tensor([[[0, 1]]])})
        >>> out["image"].tolist(), out["label"].tolist()
        ([[[2.0, 1.0]]], [[[1, 0]]])
    """

    backend = RandAugment.backend

    def __init__(
        self,
        keys: KeysCollection,
        num_ops: int = 2,
        magnitude: float = 9.0,
        operations: Sequence[str] | None = None,
        label_keys: KeysCollection | None = None,
        allow_missing_keys: bool = False,
    ) -> None:
        MapTransform.__init__(self, keys, allow_missing_keys)
        RandomizableTransform.__init__(self, prob=1.0)
        self.label_keys = ensure_tuple(label_keys) if label_keys is not None else ()
        self.augment = RandAugment(num_ops, magnitude, operations)

    def set_random_state(
        self, seed: int | None = None, state: np.random.RandomState | None = None
    ) -> RandAugmentd:
        """Set the random state of the draws."""
        super().set_random_state(seed, state)
        self.augment.set_random_state(seed, state)
        return self

    def randomize(self, data: Any = None) -> None:
        """Draw the operations for all keys of the next call."""
        self.augment.randomize(data)

    def __call__(self, data: Mapping[Hashable, NdarrayOrTensor]) -> dict[Hashable, NdarrayOrTensor]:
        """Augment the images of `data` under the transform's keys; `data` is not modified."""
        d = dict(data)
        self.randomize()
        for key in self.key_iterator(d):
            d[key] = self.augment(d[key], randomize=False)
        for key in self.label_keys:
            if key in d:
                d[key] = self.augment.move_label(d[key])
            elif not self.allow_missing_keys:
                raise KeyError(f"Key `{key}` of transform `{type(self).__name__}` was missing in the data.")
        return d


RandAugmentD = RandAugmentDict = RandAugmentd
