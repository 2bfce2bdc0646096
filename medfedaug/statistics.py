"""Channel statistics of a site's images, and the JSON file with the statistics of a federation.

Sites exchange them once before training for FedRDN, and `medfedaug simulate` writes them next to the model:

.. code-block:: json

    {"format": "medfedaug.statistics", "version": 1,
     "intensity": "scale",
     "sites": {"DU": {"mean": [0.21], "std": [0.13], "count": 120}}}

``intensity`` is the scale of the images: ``"raw"``, as stored, or ``"scale"``, scaled to [0, 1]
(`medfedaug.config.run.RunConfig`). A file without it has an unknown scale.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfedaug.errors import translated
from medfedaug.utils.files import parse_versioned, write_versioned
from medfedaug.utils.structure import count, entries, list_of, map_of, number

__all__ = [
    "SIGMA_FLOOR",
    "ChannelStatistics",
    "average_moments",
    "channel_statistics",
    "image_moments",
    "load_statistics",
    "save_statistics",
    "usable_pairs",
]

SIGMA_FLOOR = 1e-6
"""Share of the absolute mean; a channel whose standard deviation is not above it is constant
(`usable_pairs`).

Resizing a constant channel in float32 leaves a standard deviation of up to 7e-8 of its mean.
"""

_KIND = "statistics"
_VERSION = 1
# Between these, (x - mean) / std stays far inside float32 for any image that a file can hold.
_LARGEST = 1e15
_SMALLEST = 1e-15
_NUMBERS = {"mean": list_of(number), "std": list_of(number), "count": count}
_ENTRIES = entries(_NUMBERS, needed=tuple(_NUMBERS))


def _vector(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    return torch.from_numpy(np.array(value, dtype=np.float64))


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """Mean and standard deviation of each channel of a site's images (FedRDN Eq. 5).

    Args:
        mean: mean over images of the per-image mean, (C,), in units of the image; any array-like, copied to a
            float64 tensor.
        std: mean over images of the per-image population standard deviation, (C,), same units.
        count: number of images.

    `validate` checks them.

    Example:
        >>> ChannelStatistics([0.5], [0.25], 12)
        ChannelStatistics(mean=[0.5], std=[0.25], count=12)
    """

    mean: Tensor
    std: Tensor
    count: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", _vector(self.mean))
        object.__setattr__(self, "std", _vector(self.std))

    @property
    def num_channels(self) -> int:
        """Number of channels C."""
        return len(self.mean)

    @property
    def constant(self) -> tuple[int, ...]:
        """Channels that are constant in every image: σ is at most `SIGMA_FLOOR` times ``|μ|``."""
        return tuple(torch.nonzero(self.std <= SIGMA_FLOOR * self.mean.abs()).flatten().tolist())

    def validate(self, site: str = "") -> ChannelStatistics:
        """Check that images can be normalised with these statistics, and return them.

        A channel may be constant if another one is not: `usable_pairs` chooses its pair. ``site`` is for the
        error message.

        Raises:
            ValueError: when `mean` and `std` are not vectors of one length, a mean or standard deviation is
                not finite or above 1e15, a standard deviation is negative, all are 0, or the count is not
                positive; names the site and the channel.
        """
        if problem := next(self._problems(), ""):
            raise ValueError(f"site '{site}': {problem}" if site else problem)
        return self

    def _problems(self) -> Iterator[str]:
        if self.mean.shape != self.std.shape or self.mean.ndim != 1 or not len(self.mean):
            shapes = f"{list(self.mean.shape)} and {list(self.std.shape)}"
            yield f"expected mean and std of one shape (C,), got {shapes}"
        for channel, (mean, std) in enumerate(zip(self.mean.tolist(), self.std.tolist(), strict=True)):
            if not abs(mean) <= _LARGEST:  # also false for NaN
                yield f"mean of channel {channel} is {mean}, expected a finite number"
            if not (_SMALLEST <= std <= _LARGEST or (std == 0 and bool(self.std.any()))):
                yield (
                    f"standard deviation of channel {channel} is {std}, expected a positive finite number "
                    "(images that are constant in every channel cannot be normalised)"
                )
        if self.count < 1:
            yield f"count is {self.count!r}, expected a positive integer"

    def to_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON types; floats survive the round trip exactly."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist(), "count": int(self.count)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], site: str = "") -> ChannelStatistics:
        """Build validated statistics from JSON types; ``site`` is for the error message.

        Raises:
            ValueError: when an entry is missing or invalid; names the site.
        """
        if missing := [name for name in _NUMBERS if name not in values]:
            raise ValueError(f"site '{site}': lacks {missing[0]}" if site else f"lacks {missing[0]}")
        return cls(values["mean"], values["std"], values["count"]).validate(site)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ChannelStatistics):
            return NotImplemented
        return (
            torch.equal(self.mean, other.mean)
            and torch.equal(self.std, other.std)
            and self.count == other.count
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ChannelStatistics(mean={self.mean.tolist()}, std={self.std.tolist()}, count={self.count})"


def channel_statistics(images: Iterable[Any]) -> ChannelStatistics:
    """Channel statistics of a site, in one pass over its images (FedRDN Eq. 5 and 6).

    ::

        μ = (1/n) Σᵢ μᵢ,   σ = (1/n) Σᵢ σᵢ,   σᵢ = √((1/(HW)) Σ_(h,w) (xᵢ^(h,w) − μᵢ)²)

    Every image counts once, whatever its size. One image is in memory at a time, so a generator that reads
    files is the usual argument.

    Args:
        images: the site's training images before augmentation, (C, *spatial) each: arrays, tensors or
            MetaTensors of any real dtype; spatial shapes may differ.

    Returns:
        The statistics, computed in float64 and not validated. A constant channel has standard deviation 0;
        `usable_pairs` chooses its pair.

    Raises:
        ValueError: when there is no image, an image is not (C, *spatial) or empty, the number of channels
            changes, or a voxel is not finite; names the position of the image.

    Deviations:
        Eq. 5 prints sums over the images and the text speaks of the average; this computes the average. The
        standard deviation is the average of the images' standard deviations, as printed, not the standard
        deviation of all voxels together.

    Example:
        >>> channel_statistics(np.array(x, dtype=np.uint8) for x in ([[0, 2]], [[10, 14]]))
        ChannelStatistics(mean=[6.5], std=[1.5], count=2)
    """
    moments = (_image_statistics(image, index) for index, image in enumerate(images))
    return average_moments(moments)


def image_moments(image: Any) -> dict[str, Tensor]:
    """Return ``mean`` and ``std`` of one image, (C,) float64 each: the terms of `channel_statistics`."""
    return _image_statistics(image, 0)


def average_moments(moments: Iterable[Mapping[str, Tensor]]) -> ChannelStatistics:
    """Return channel statistics from the images' `image_moments`, to the bit as `channel_statistics`."""
    mean = std = torch.zeros(0, dtype=torch.float64)
    count = 0
    for image in moments:
        if count and len(image["mean"]) != len(mean):
            raise ValueError(
                f"image {count} has {len(image['mean'])} channels, the images before it {len(mean)}"
            )
        mean, std = (mean + image["mean"], std + image["std"]) if count else (image["mean"], image["std"])
        count += 1
    if count == 0:
        raise ValueError("no image to compute channel statistics from")
    return ChannelStatistics(mean / count, std / count, count)


def _image_statistics(image: Any, index: int) -> dict[str, Tensor]:
    # `as_subclass` drops a MetaTensor's metadata. NumPy's conversion also reads big-endian files and unsigned
    # types that torch lacks.
    if isinstance(image, Tensor):
        voxels = image.detach().as_subclass(Tensor).cpu()
    else:
        voxels = torch.from_numpy(np.asarray(image).astype(np.float64, order="C"))
    if voxels.ndim < 2 or voxels.numel() == 0:
        raise ValueError(f"image {index}: expected shape (C, *spatial), got {list(voxels.shape)}")
    pairs = torch.stack([_channel_moments(channel) for channel in voxels])
    mean, std = pairs[:, 0], pairs[:, 1].sqrt()
    if not (torch.isfinite(mean).all() and torch.isfinite(std).all()):
        raise ValueError(f"image {index} has voxels that are not finite")
    # The mean of a constant need not be that constant to the last bit.
    std[std <= 1e-12 * mean.abs()] = 0.0
    return {"mean": mean, "std": std}


def _channel_moments(voxels: Tensor) -> Tensor:
    """Mean and population variance of a channel, (2,) float64."""
    flat = voxels.to(torch.float64, copy=True).flatten()
    mean = flat.mean()
    flat -= mean
    return torch.stack([mean, torch.dot(flat, flat) / len(flat)])


def usable_pairs(
    statistics: Mapping[str, ChannelStatistics], own: ChannelStatistics | None = None
) -> dict[str, ChannelStatistics]:
    """Return pairs that can normalise an image of any site, even if a channel is constant at some.

    A channel that is constant at a site, because its device or protocol does not record it, has no standard
    deviation to divide by. A small number in its place would multiply the other sites' images, which do vary,
    by its inverse. So the channel's pair at such a site is the average of the other sites' pairs::

        μ_cᵏ = (1/|V_c|) Σ_(j∈V_c) μ_cʲ,   σ_cᵏ = (1/|V_c|) Σ_(j∈V_c) σ_cʲ,
        V_c = {j : σ_cʲ > SIGMA_FLOOR · |μ_cʲ|}

    If the channel varies at no site, and for a single site, it keeps its mean and gets the largest standard
    deviation of the site's channels: a number of the right scale, which divides nothing but rounding errors.

    Args:
        statistics: measured statistics of all sites, by name.
        own: statistics of the site whose images are normalised. In its constant channels each pair gets its
            mean, so that they become 0 with any pair.

    Example:
        >>> laser = ChannelStatistics([0.3, 0.0], [0.1, 0.0], 15)
        >>> usable_pairs({"laser": laser, "lamp": ChannelStatistics([0.5, 0.2], [0.2, 0.1], 20)})["laser"]
        ChannelStatistics(mean=[0.3, 0.2], std=[0.1, 0.1], count=15)
        >>> usable_pairs({"laser": laser})["laser"]
        ChannelStatistics(mean=[0.3, 0.0], std=[0.1, 0.1], count=15)
    """
    usable = {}
    for site, pair in statistics.items():
        mean, std = pair.mean.clone(), pair.std.clone()
        for channel in pair.constant:
            varying = [other for other in statistics.values() if channel not in other.constant]
            if varying:
                mean[channel] = torch.stack([other.mean[channel] for other in varying]).mean()
                std[channel] = torch.stack([other.std[channel] for other in varying]).mean()
            else:
                std[channel] = pair.std.max()
        if own is not None:
            mean[[*own.constant]] = own.mean[[*own.constant]]
        usable[site] = replace(pair, mean=mean, std=std)
    return usable


def save_statistics(
    path: str | os.PathLike[str], statistics: Mapping[str, ChannelStatistics], intensity: str | None = None
) -> None:
    """Write the statistics of a federation as JSON.

    The file is complete or absent (`medfedaug.utils.files.write_atomic`).

    Args:
        path: the file; an existing one is replaced.
        statistics: the statistics of each site, by its name.
        intensity: scale of the images, ``"raw"`` or ``"scale"``.

    Raises:
        ValueError: when there is no site, or channel counts differ; names the site.
        StorageError: when the file cannot be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "statistics.json"
        >>> save_statistics(path, {"DU": ChannelStatistics([0.5], [0.25], 12)})
        >>> load_statistics(path)["DU"]
        ChannelStatistics(mean=[0.5], std=[0.25], count=12)
    """
    check_alike(statistics)
    sites = {site: values.to_dict() for site, values in statistics.items()}
    metadata = {"intensity": intensity} if intensity else {}
    write_versioned(path, _KIND, _VERSION, {**metadata, "sites": sites})


def load_statistics(
    path: str | os.PathLike[str], intensity: str | None = None
) -> dict[str, ChannelStatistics]:
    """Read the statistics of a federation.

    Args:
        path: a file that `save_statistics` wrote.
        intensity: scale of the images that the statistics must be of; ``None`` for any.

    Returns:
        The statistics of each site, by its name, in the order of the file.

    Raises:
        ValueError: when the file is not such a file, its version is not known, or the statistics of a site
            are invalid or of another scale; names the file and the site.
        FileNotFoundError: when the file does not exist.
    """
    path = Path(path)
    # Errors of JSON and Unicode are ValueErrors.
    with translated(ValueError, to=lambda error: ValueError(f"{path}: {error}")):
        content = parse_versioned(path.read_text(encoding="utf-8"), _KIND, _VERSION)
        entries({"sites": map_of(_ENTRIES)}, needed=("sites",))(content, "")
        if (found := content.get("intensity")) not in (None, intensity) and intensity:
            raise ValueError(f"its statistics are of {found} images, not of {intensity} ones")
        sites = {site: ChannelStatistics.from_dict(values, site) for site, values in content["sites"].items()}
        check_alike(sites)
    return sites


def check_alike(statistics: Mapping[str, ChannelStatistics]) -> None:
    """Check that there are statistics, and that all sites have one number of channels."""
    if not statistics:
        raise ValueError("no site with statistics")
    first = next(iter(statistics))
    for site, values in statistics.items():
        if values.num_channels != statistics[first].num_channels:
            raise ValueError(
                f"site '{site}' has {values.num_channels} channels, "
                f"site '{first}' has {statistics[first].num_channels}"
            )
