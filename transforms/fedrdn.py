"""FedRDN: normalisation with the statistics of a randomly drawn site."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from monai.config import DtypeLike, KeysCollection
from monai.config.type_definitions import NdarrayOrTensor
from monai.data.meta_obj import get_track_meta
from monai.transforms.transform import MapTransform, RandomizableTransform
from monai.utils import convert_to_tensor, get_equivalent_dtype
from monai.utils.enums import TransformBackends
from torch import Tensor

from medfedaug.statistics import ChannelStatistics, check_alike, load_statistics, usable_pairs

__all__ = ["FedRDN", "FedRDND", "FedRDNDict", "FedRDNd"]

Statistics = Mapping[str, Any] | str | os.PathLike[str]


def _site_statistics(statistics: Statistics) -> dict[str, ChannelStatistics]:
    """Return validated statistics by site name, from any accepted form."""
    if isinstance(statistics, (str, os.PathLike)):
        return load_statistics(statistics)
    result: dict[str, ChannelStatistics] = {}
    for site, values in statistics.items():
        if isinstance(values, ChannelStatistics):
            result[site] = values.validate(site)
            continue
        # Configurations may leave out the number of images, which is not used here.
        pair = values if isinstance(values, Mapping) else dict(zip(("mean", "std"), values, strict=False))
        result[site] = ChannelStatistics.from_dict({"count": 1, **pair}, site)
    check_alike(result)
    return result


class FedRDN(RandomizableTransform):
    """Normalise an image with the statistics of a random site (FedRDN Eq. 7 and 8).

    ::

        x̂ = (x − μʲ)/σʲ,   (μʲ, σʲ) ~ {(μᵏ, σᵏ) : k = 1..K}

    In training every call draws one site j, uniformly, and uses both its mean and its standard deviation.
    With `site` the transform is deterministic: that site's own pair, as the method does at test time.

    A site outside of training computes the statistics of its images
    (`medfedaug.statistics.channel_statistics`; no labels, no training) and passes them with its name:
    `FedRDN({"new": statistics}, site="new")`.

    Use it instead of `NormalizeIntensity`: after loading and resampling, before or after spatial
    augmentation. Compute the statistics from the input of this transform without augmentation: cropped,
    resampled and resized, since resizing averages pixels and reduces the standard deviation.

    A channel that is constant at a site has σ = 0 there; `medfedaug.statistics.usable_pairs` replaces its
    pair, and with `site` it becomes 0.

    Args:
        statistics: the statistics of all sites: a mapping from site to `ChannelStatistics`, to
            `{"mean": [...], "std": [...], "count": n}` or to a pair `[mean, std]`; or the path of a file of
            `medfedaug.statistics.save_statistics`.
        site: use this site's pair instead of a random one.
        average: use the average pair of the sites instead of a random one, in training and at test: the
            variant FedRDN-V of the paper's Table 4.
        dtype: floating point type of the result; None keeps that of the input (float32 for integers).

    Raises:
        ValueError: when statistics are not valid (names the site), channel counts differ between sites,
            `site` is not among them (lists them), or both `site` and `average` are given; on a call, when the
            image has another number of channels.

    Deviations:
        None from the paper. Its public code draws the mean and the standard deviation from different sites,
        once per batch, and computes the statistics over augmented images.

    Example:
        >>> transform = FedRDN({"A": [[0.0], [1.0]], "B": [[1.0], [2.0]]}, site="B")
        >>> transform(torch.tensor([[3.0, 5.0]])).tolist()
        [[1.0, 2.0]]
    """

    backend = [TransformBackends.TORCH, TransformBackends.NUMPY]  # noqa: RUF012, MONAI's declaration

    def __init__(
        self,
        statistics: Statistics,
        site: str | None = None,
        average: bool = False,
        dtype: DtypeLike = np.float32,
    ) -> None:
        RandomizableTransform.__init__(self, prob=1.0)
        by_site = _site_statistics(statistics)
        self.sites = tuple(by_site)
        self.site = site
        self.average = average
        if site is not None and (average or site not in by_site):
            raise ValueError(f"site '{site}': known are {', '.join(self.sites)}, without average")
        self.dtype = None if dtype is None else get_equivalent_dtype(dtype, torch.Tensor)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}, expected a floating point type")

        pairs = usable_pairs(by_site, None if site is None else by_site[site]).values()
        means = torch.stack([values.mean for values in pairs])
        stds = torch.stack([values.std for values in pairs])
        if average:
            means, stds = means.mean(dim=0, keepdim=True), stds.mean(dim=0, keepdim=True)
        self._pairs = {dtype: (means.to(dtype), stds.to(dtype)) for dtype in (torch.float32, torch.float64)}
        self._fixed = 0 if average else None if site is None else self.sites.index(site)
        self._index = self._fixed or 0

    @property
    def pair(self) -> tuple[Tensor, Tensor] | None:
        """Mean and standard deviation for every image, (C,) float64 each; ``None`` if a site is drawn."""
        means, stds = self._pairs[torch.float64]
        return None if self._fixed is None else (means[self._fixed], stds[self._fixed])

    def randomize(self, data: Any = None) -> None:
        """Draw the site whose pair normalises the next image."""
        if self._fixed is None:
            self._index = int(self.R.randint(len(self.sites)))

    def __call__(self, img: NdarrayOrTensor, randomize: bool = True) -> NdarrayOrTensor:
        """Normalise `img`.

        Args:
            img: the image, (C, *spatial); not modified.
            randomize: draw a site; otherwise use that of the last call.

        Returns:
            The normalised image as a tensor, or as a MetaTensor with the metadata of `img` if MONAI tracks
            metadata.
        """
        if randomize:
            self.randomize()
        image: Tensor = convert_to_tensor(img, track_meta=get_track_meta())
        out_dtype = self.dtype or (image.dtype if image.is_floating_point() else torch.float32)
        work_dtype = torch.float64 if torch.float64 in (image.dtype, out_dtype) else torch.float32
        means, stds = self._pairs[work_dtype]
        channels = means.shape[1]
        if image.ndim < 2 or image.shape[0] != channels:
            raise ValueError(
                f"the statistics have {channels} channels: expected an image of shape "
                f"({channels}, *spatial), got {tuple(image.shape)}"
            )
        shape = (channels, *[1] * (image.ndim - 1))
        mean = means[self._index].view(shape).to(image.device)
        std = stds[self._index].view(shape).to(image.device)

        if not image.is_floating_point():
            image = image.to(work_dtype)
        # The first operation, on the MetaTensor, copies the metadata; the second is on the plain tensor.
        out = torch.sub(image, mean)
        out.as_subclass(Tensor).div_(std)
        return out if out.dtype == out_dtype else out.to(out_dtype)


class FedRDNd(RandomizableTransform, MapTransform):
    """Dictionary version of `FedRDN`: a random site's pair in training, the own pair at test.

    Each call draws one site for all keys. Use it instead of `NormalizeIntensityd`: after loading and
    resampling, with statistics of its input.

    Args:
        keys: keys of the images to normalise.
        statistics: mean and standard deviation of each channel, of every site. The path of a file of
            `medfedaug.statistics.save_statistics` or of a run (`statistics.json`); or a mapping from site to
            `medfedaug.statistics.ChannelStatistics`, to `{"mean": [...], "std": [...]}` or to a pair
            `[mean, std]`.
        site: the site of the images, for validation and test: use its own pair, without a draw. Leave it out
            in training: each call draws a site. A site outside of training passes statistics of its images
            under its name.
        average: use the average of all sites' pairs, in training and at test (FedRDN-V); excludes `site`.
        dtype: floating point type of the result; None keeps that of the input (float32 for integers).
        allow_missing_keys: do not raise an error when a key is missing.

    Raises:
        ValueError: as for `FedRDN`.
        KeyError: on a call, when a key is missing and `allow_missing_keys` is false.

    Deviations:
        As for `FedRDN`: none from the paper.

    Example:
        Training draws, and the test does not:

        >>> transform = FedRDNd("image", {"A": [[0.0], [1.0]], "B": [[1.0], [2.0]]})
        >>> transform.set_random_state(0)({"image": torch.tensor([[3.0]]), "label": 1})["image"].tolist()
        [[3.0]]
        >>> own = FedRDNd("image", {"A": [[0.0], [1.0]], "B": [[1.0], [2.0]]}, site="B")
        >>> own({"image": torch.tensor([[3.0]])})["image"].tolist()
        [[1.0]]
    """

    backend = FedRDN.backend

    def __init__(
        self,
        keys: KeysCollection,
        statistics: Statistics,
        site: str | None = None,
        average: bool = False,
        dtype: DtypeLike = np.float32,
        allow_missing_keys: bool = False,
    ) -> None:
        MapTransform.__init__(self, keys, allow_missing_keys)
        RandomizableTransform.__init__(self, prob=1.0)
        self.normalizer = FedRDN(statistics, site=site, average=average, dtype=dtype)

    def set_random_state(
        self, seed: int | None = None, state: np.random.RandomState | None = None
    ) -> FedRDNd:
        """Set the random state for the draw of the site."""
        super().set_random_state(seed, state)
        self.normalizer.set_random_state(seed, state)
        return self

    def randomize(self, data: Any = None) -> None:
        """Draw the site whose pair normalises the images of the next call."""
        self.normalizer.randomize(data)

    def __call__(self, data: Mapping[Hashable, NdarrayOrTensor]) -> dict[Hashable, NdarrayOrTensor]:
        """Normalise the images of `data` under the transform's keys; `data` is not modified."""
        d = dict(data)
        self.randomize()
        for key in self.key_iterator(d):
            d[key] = self.normalizer(d[key], randomize=False)
        return d


FedRDND = FedRDNDict = FedRDNd
