"""Histogram standardisation: images with the landmarks of a standard histogram."""

from __future__ import annotations

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

__all__ = [
    "StandardizeHistogram",
    "StandardizeHistogramD",
    "StandardizeHistogramDict",
    "StandardizeHistogramd",
]


class StandardizeHistogram(Transform):
    r"""Move the landmarks of an image's histogram to those of a standard one (Nyúl, Udupa and Zhang, 2000).

    The landmarks of each channel are percentiles of the foreground (`functional.histogram_landmarks`); lines
    between them map the image (`functional.map_landmarks`). Images of scanners with different units and
    contrasts then look alike, as far as the order of their tissues' intensities is the same.

    Args:
        standard: the landmarks of the standard histogram, (C, 11), for instance the mean of images'
            landmarks, each scaled to 0 at the first and 1 at the last.
        dtype: floating point type of the result; None keeps that of the input (float32 for integers).

    Raises:
        ValueError: when the standard has another shape, is not finite or does not ascend; on a call, when the
            image has another number of channels or voxels that are not finite, or landmarks have another
            shape.

    Deviations:
        The percentiles are those of common public implementations, 1, 10, 20, ..., 90 and 99. The first and
        the last line extend beyond them.

    Example:
        >>> transform = StandardizeHistogram([[i / 10 for i in range(11)]])
        >>> [round(v, 3) for v in transform(torch.arange(102.0)[None])[0, [2, 51, 100]].tolist()]
        [0.0, 0.5, 1.0]
    """

    backend = [TransformBackends.TORCH]  # noqa: RUF012, MONAI's declaration

    def __init__(self, standard: NdarrayOrTensor | Sequence[Any], dtype: DtypeLike = np.float32) -> None:
        values = torch.as_tensor(np.asarray(standard) if not isinstance(standard, Tensor) else standard)
        self.standard = values.detach().as_subclass(Tensor).cpu().double()
        if self.standard.ndim != 2 or self.standard.shape[1] != len(F.PERCENTILES):
            raise ValueError(f"standard: expected (C, {len(F.PERCENTILES)}), got shape {tuple(values.shape)}")
        if not bool(torch.isfinite(self.standard).all()) or bool((self.standard.diff(dim=1) < 0).any()):
            raise ValueError("standard: expected finite numbers in ascending order")
        self.dtype = None if dtype is None else get_equivalent_dtype(dtype, torch.Tensor)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}, expected a floating point type")

    def __call__(self, img: NdarrayOrTensor, landmarks: NdarrayOrTensor | None = None) -> NdarrayOrTensor:
        """Standardise `img`.

        Args:
            img: the image, (C, *spatial); not modified.
            landmarks: (C, 11), of the whole image to which `img` belongs, or of `img` before augmentation; by
                default those of `img`.

        Returns:
            The image as a tensor, or as a MetaTensor with the metadata of `img` if MONAI tracks metadata.
        """
        image: Tensor = convert_to_tensor(img, track_meta=get_track_meta())
        plain = image.as_subclass(Tensor)
        if len(plain) != len(self.standard):
            raise ValueError(
                f"the standard histogram has {len(self.standard)} channels, and the image {len(plain)}"
            )
        dtype = self.dtype or (plain.dtype if plain.is_floating_point() else torch.float32)
        work = plain.to(torch.float64 if torch.float64 in (dtype, plain.dtype) else torch.float32)
        points = F.histogram_landmarks(work) if landmarks is None else torch.as_tensor(landmarks)
        expected = tuple(self.standard.shape)
        if points.shape != expected:
            raise ValueError(f"landmarks of shape {tuple(points.shape)}, expected {expected}")
        out = F.map_landmarks(work, points, self.standard).to(dtype)
        return convert_to_dst_type(out, dst=image, dtype=dtype)[0]


class StandardizeHistogramd(MapTransform):
    """Dictionary version of `StandardizeHistogram`.

    Args:
        keys: keys of the images to standardise.
        standard: as for `StandardizeHistogram`.
        landmarks_key: key of the landmarks of the whole image, (C, 11), for the images of all keys; without
            this entry, those of the image.
        dtype: as for `StandardizeHistogram`.
        allow_missing_keys: do not raise an error when a key is missing.

    Raises:
        ValueError: as for `StandardizeHistogram`.
        KeyError: on a call, when a key is missing and `allow_missing_keys` is false.

    Deviations:
        As for `StandardizeHistogram`.

    Example:
        >>> transform = StandardizeHistogramd("image", [[i / 10 for i in range(11)]])
        >>> out = transform({"image": torch.arange(102.0)[None], "label": 1})["image"]
        >>> round(float(out[0, 51]), 3)
        0.5
    """

    backend = StandardizeHistogram.backend

    def __init__(
        self,
        keys: KeysCollection,
        standard: NdarrayOrTensor | Sequence[Any],
        landmarks_key: str = "landmarks",
        dtype: DtypeLike = np.float32,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.standardizer = StandardizeHistogram(standard, dtype=dtype)
        self.landmarks_key = landmarks_key

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Standardise the images of `data` under the transform's keys; `data` is not modified."""
        d = dict(data)
        for key in self.key_iterator(d):
            d[key] = self.standardizer(d[key], d.get(self.landmarks_key))
        return d


StandardizeHistogramD = StandardizeHistogramDict = StandardizeHistogramd
