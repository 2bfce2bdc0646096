"""HarmoFL: images with the amplitudes of an average image and their own phases."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.config import DtypeLike, KeysCollection
from monai.config.type_definitions import NdarrayOrTensor
from monai.data.meta_obj import get_track_meta
from monai.transforms.transform import MapTransform, Transform
from monai.utils import convert_to_dst_type, convert_to_tensor, get_equivalent_dtype
from monai.utils.enums import TransformBackends
from torch import Tensor

from medfedaug import functional as F

__all__ = ["NormalizeAmplitude", "NormalizeAmplitudeD", "NormalizeAmplitudeDict", "NormalizeAmplituded"]

Amplitude = NdarrayOrTensor | Sequence[Any]


class NormalizeAmplitude(Transform):
    """Replace the amplitudes of an image's Fourier transform (HarmoFL, `functional.normalise_amplitude`).

    ::

        Ψ(x) = F⁻¹(Ā e^(iP)),   P = arg F(x)

    With the amplitudes of the average image of all sites, the images of all scanners look as if from one
    scanner; the phases, which hold the image's content, stay. Volumes are processed slice by slice along
    their last axis.

    Use it last, since a later transform would change the amplitudes again. All images must have the size of
    the images behind the amplitudes.

    Args:
        amplitude: Ā of each channel, (C, H, W // 2 + 1), for instance the mean of
            `functional.amplitude_spectrum` over images.
        dtype: floating point type of the result; None keeps that of the input (float32 for integers).

    Raises:
        ValueError: when the amplitudes have another shape, are negative or not finite; on a call, when the
            image has another size or number of channels.

    Deviations:
        As for `functional.normalise_amplitude`. The paper's public code replaces only the mean of each
        channel.

    Example:
        >>> transform = NormalizeAmplitude([[[6.0, 1.0]]])
        >>> float(transform(torch.tensor([[[0.0, 1.0, 2.0]]])).mean())
        2.0
    """

    backend = [TransformBackends.TORCH]  # noqa: RUF012, MONAI's declaration

    def __init__(self, amplitude: Amplitude, dtype: DtypeLike = np.float32) -> None:
        values = torch.as_tensor(np.asarray(amplitude) if not isinstance(amplitude, Tensor) else amplitude)
        self.amplitude = values.detach().as_subclass(Tensor).double()
        if self.amplitude.ndim != 3:
            raise ValueError(f"amplitude: expected (C, H, W // 2 + 1), got shape {tuple(values.shape)}")
        if not bool(torch.isfinite(self.amplitude).all()) or bool((self.amplitude < 0).any()):
            raise ValueError("amplitude: expected finite numbers from 0 on")
        self.dtype = None if dtype is None else get_equivalent_dtype(dtype, torch.Tensor)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}, expected a floating point type")

    def __call__(self, img: NdarrayOrTensor) -> NdarrayOrTensor:
        """Normalise `img`.

        Args:
            img: the image (C, H, W), or a volume (C, H, W, D); not modified.

        Returns:
            The normalised image as a tensor, or as a MetaTensor with the metadata of `img` if MONAI tracks
            metadata.
        """
        image: Tensor = convert_to_tensor(img, track_meta=get_track_meta())
        plain = image.as_subclass(Tensor)
        dtype = self.dtype or (plain.dtype if plain.is_floating_point() else torch.float32)
        amplitude = self.amplitude.to(plain.device)
        out = F.normalise_amplitude(plain.double(), amplitude).to(dtype)
        return convert_to_dst_type(out, dst=image, dtype=dtype)[0]


class NormalizeAmplituded(MapTransform):
    """Dictionary version of `NormalizeAmplitude`.

    Args:
        keys: keys of the images to normalise.
        amplitude: as for `NormalizeAmplitude`.
        dtype: as for `NormalizeAmplitude`.
        allow_missing_keys: do not raise an error when a key is missing.

    Raises:
        ValueError: as for `NormalizeAmplitude`.
        KeyError: on a call, when a key is missing and `allow_missing_keys` is false.

    Deviations:
        As for `NormalizeAmplitude`.

    Example:
        >>> transform = NormalizeAmplituded("image", [[[6.0, 1.0]]])
        >>> float(transform({"image": torch.tensor([[[0.0, 1.0, 2.0]]]), "label": 1})["image"].mean())
        2.0
    """

    backend = NormalizeAmplitude.backend

    def __init__(
        self,
        keys: KeysCollection,
        amplitude: Amplitude,
        dtype: DtypeLike = np.float32,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.normalizer = NormalizeAmplitude(amplitude, dtype=dtype)

    def __call__(self, data: Mapping[Hashable, NdarrayOrTensor]) -> dict[Hashable, NdarrayOrTensor]:
        """Normalise the images of `data` under the transform's keys; `data` is not modified."""
        d = dict(data)
        for key in self.key_iterator(d):
            d[key] = self.normalizer(d[key])
        return d


NormalizeAmplitudeD = NormalizeAmplitudeDict = NormalizeAmplituded
