"""RandAugment: a few random operations of one magnitude on every training image, built from MONAI's."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Annotated, Any

import torch
from annotated_types import Interval, MinLen
from monai.transforms import (
    AdjustContrast,
    Affine,
    Flip,
    GaussianSharpen,
    GaussianSmooth,
    HistogramNormalize,
    RandGaussianNoise,
    RandHistogramShift,
    RandomizableTransform,
    ScaleIntensityFixedMean,
    ShiftIntensity,
    Transform,
)
from monai.utils import CommonKeys as Keys
from monai.utils import convert_to_tensor
from torch import Tensor

from medfedaug.methods.arguments import Count
from medfedaug.methods.base import Method, SiteContext, SitePart
from medfedaug.utils.validation import check_choice

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


class RandAugment(Method):
    """Data augmentation by N operations of magnitude M (Cubuk et al., NeurIPS 2020).

    In training each image passes N operations from a list, drawn uniformly and with replacement, with the
    strength M/10 and a random direction, for instance of a rotation. Nothing is exchanged. With
    ``num_ops=0`` it is FedAvg, bit for bit. At M = 10:

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

    Operations that move pixels fill the gaps with zeros, and move the label map too. With M = 0 the image
    stays as it is.

    Args:
        num_ops: N.
        magnitude: M, from 0 to 10.
        operations: names from the table; by default all but the flips, which have no magnitude and would
            mirror asymmetric anatomy.

    Deviations:
        The paper's 14 operations are from a library for photographs. Here they are MONAI's, which are defined
        for any number of channels and any intensities: without ``color`` and ``solarize``, and with gamma,
        zoom, noise, smoothing and histogram shift. The paper's magnitude goes beyond 10 for large networks.
        N = 2 and M = 9 are the paper's for ResNet-50; papers that compare with it do not give theirs.
    """

    name = "randaugment"
    dimensions = (2,)

    def __init__(
        self,
        num_ops: Count = 2,
        magnitude: Annotated[float, Interval(ge=0, le=LARGEST)] = 9.0,
        operations: Annotated[Sequence[str], MinLen(1)] | None = None,
    ) -> None:
        self.num_ops, self.magnitude = num_ops, magnitude
        self.operations = tuple(_DEFAULT if operations is None else operations)
        for operation in self.operations:
            check_choice("randaugment: operation", operation, (*_GEOMETRIC, *_FLIPS, *_INTENSITY))

    def at_site(self, context: SiteContext) -> SitePart:
        assert context.task is not None
        return _RandAugmentSite(self, context.task.dense)


class _RandAugmentSite(SitePart):
    def __init__(self, method: RandAugment, dense: bool) -> None:
        self.method, self.dense = method, dense

    def transforms(self, *, training: bool) -> Sequence[Transform]:
        return [RandomOperations(self.method, self.dense)] if training else ()


class RandomOperations(RandomizableTransform):
    """Transform of a sample: one draw of operations for its image and, if ``dense``, its label map."""

    def __init__(self, method: RandAugment, dense: bool) -> None:
        super().__init__(prob=1.0)
        self.method, self.dense = method, dense
        self._drawn: list[tuple[str, float, int]] = []

    def randomize(self, data: Any = None) -> None:
        """Draw the operations, their directions and a seed for each, since noise draws many numbers."""
        names = self.method.operations
        self._drawn = []
        for _ in range(self.method.num_ops):
            name = names[int(self.R.randint(len(names)))]
            sign = 1.0 if self.R.random_sample() < 0.5 else -1.0
            self._drawn.append((name, sign * self.method.magnitude / LARGEST, int(self.R.randint(2**31 - 1))))

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return a sample with a changed image, (C, H, W) in floating point."""
        self.randomize()
        out = _plain(data[Keys.IMAGE])
        changed = {**data, Keys.IMAGE: self.image(out if out.is_floating_point() else out.float())}
        if self.dense:
            changed[Keys.LABEL] = self.label(_plain(data[Keys.LABEL]))
        return changed

    def image(self, x: Tensor) -> Tensor:
        """Apply the operations that were drawn."""
        for name, strength, seed in self._drawn:
            if name in _INTENSITY:
                x = _plain(_INTENSITY[name](x, strength, seed)).to(x.dtype) if strength else x
            else:
                x = self._move(x, name, strength, "bilinear")
        return x

    def label(self, x: Tensor) -> Tensor:
        """Move the pixels of a label map like the image's."""
        for name, strength, _ in self._drawn:
            if name not in _INTENSITY:
                x = self._move(x, name, strength, "nearest")
        return x

    @staticmethod
    def _move(x: Tensor, name: str, strength: float, mode: str) -> Tensor:
        if not strength:
            return x
        if name in _FLIPS:
            return _plain(Flip(spatial_axis=_FLIPS[name])(x))
        size = (x.shape[1], x.shape[2])
        move = Affine(**_GEOMETRIC[name](strength, size), mode=mode, padding_mode="zeros", image_only=True)
        return _plain(move(x)).to(x.dtype)
