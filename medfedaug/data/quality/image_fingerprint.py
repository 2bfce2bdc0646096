"""`ImageFingerprint`: means over a site's patients of numbers that predict a federation's gain."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from monai.utils import convert_to_tensor
from torch import Tensor

from medfedaug.config.scanners import Scanners, check_scanners
from medfedaug.data.base import Case, SiteFolder, drawn_over_patients, weights_by_patient
from medfedaug.data.quality.connected_pieces import connected_pieces
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError
from medfedaug.statistics import ChannelStatistics, image_moments

SAMPLE = 200
"""Approximate number of training cases of a fingerprint, drawn over the site's patients."""

_PLANES = 32
"""Number of planes of a volume whose texture is measured."""

_LAPLACIAN = torch.tensor([[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0], [1.0, -2.0, 1.0]], dtype=torch.float64)


@dataclass(frozen=True)
class Quantity:
    """A number of each case, and its public range.

    Attributes:
        per: ``"channel"`` of the image, ``"class"`` but the background, or ``"case"``.
        low: lower end of the range, at which values are clipped, as at the upper one.
        is_log: whether the logarithm is averaged.
        reason: purpose, for the people who release it.
        squared: whether the site also sends the mean of the square, for the deviation between its cases.
        present: whether the mean is over the cases with the class alone.
    """

    per: str
    low: float
    high: float
    text: str
    reason: str
    is_log: bool = False
    unit: str = ""
    squared: bool = False
    present: bool = False

    def scaled(self, values: Tensor) -> Tensor:
        """Bring values to [0, 1] of the range."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, values = math.log(low), math.log(high), values.clamp(low, high).log()
        return ((values - low) / (high - low)).clamp(0, 1)

    def restored(self, scaled: np.ndarray) -> np.ndarray:
        """Invert `scaled`."""
        if self.is_log:
            return np.exp(math.log(self.low) + scaled * math.log(self.high / self.low))
        return self.low + scaled * (self.high - self.low)


QUANTITIES: Mapping[str, Quantity] = {
    "mean": Quantity(
        per="channel",
        low=0,
        high=1,
        unit="of the range",
        text="mean intensity, scaled as a run scales it",
        reason="appearance: FedRDN exchanges it, and other sites' images are compared with it",
        squared=True,
    ),
    "std": Quantity(
        per="channel",
        low=0,
        high=0.5,
        unit="of the range",
        text="standard deviation of the intensities of an image",
        reason="appearance: contrast, and where the site's images land under others' statistics",
        squared=True,
    ),
    "noise": Quantity(
        per="channel",
        low=1e-4,
        high=0.5,
        is_log=True,
        unit="of the range",
        text="noise, from the second differences between neighbours",
        reason="appearance: augmentation and normalisation do not remove it",
    ),
    "roughness": Quantity(
        per="channel",
        low=0,
        high=1,
        text="mean squared difference of neighbours, divided by twice the variance",
        reason="appearance: sharpness of the images on their grid",
    ),
    "geometry": Quantity(
        per="case",
        low=0,
        high=1,
        text="share of the cases whose files give the size of a voxel",
        reason="resolution: without it sizes in mm are unknown",
    ),
    "edge": Quantity(
        per="case",
        low=0.01,
        high=50,
        is_log=True,
        unit="mm",
        text="edge of a voxel in the plane",
        reason="resolution: a network sees voxels, not millimetres",
    ),
    "thickness": Quantity(
        per="case",
        low=0.01,
        high=50,
        is_log=True,
        unit="mm",
        text="longest edge of a voxel",
        reason="resolution: thickness of slices",
    ),
    "extent": Quantity(
        per="case",
        low=1,
        high=5000,
        is_log=True,
        unit="mm",
        text="extent of the image in the plane",
        reason="field of view",
    ),
    "present": Quantity(
        per="class", low=0, high=1, text="share of the cases with the class", reason="prevalence"
    ),
    "size": Quantity(
        per="class",
        low=1e-6,
        high=1,
        is_log=True,
        unit="of the image",
        text="share of the voxels of a case that has the class",
        reason="structure and label style: size of what is outlined",
        present=True,
    ),
    "pieces": Quantity(
        per="class",
        low=1,
        high=100,
        is_log=True,
        text="number of pieces of a case that has the class, whose voxels touch by a corner at least",
        reason="structure: one lesion or many",
        present=True,
    ),
}
"""Numbers of a case that a fingerprint averages; numbers of a class need segmentation."""

_PLAIN = ("site", "task", "channels", "cases", "looked_at", "patients", "test_patients", "noise")


@dataclass(frozen=True)
class ImageFingerprint:
    """Means over a site's training images and labels, each in a public range.

    Attributes:
        classes: names of the classes, background first for segmentation.
        cases: number of training cases of the site.
        looked_at: number of training cases in the means.
        patients: number of patients in training.
        entries: means in [0, 1] by name (`entry_shapes`).
        noise: standard deviation of the noise in each mean; 0 without noise.
        annotated: the classes that every training case shows in full; ``None`` for all. Presence, size and
            pieces of another class have no meaning.
    """

    site: str
    task: str
    classes: tuple[str, ...]
    channels: int
    cases: int
    looked_at: int
    patients: int
    test_patients: int
    entries: Mapping[str, Tensor] = field(repr=False)
    noise: float = 0.0
    scanners: Scanners = field(default_factory=dict)
    annotated: tuple[str, ...] | None = None

    @property
    def annotated_mask(self) -> np.ndarray:
        """Return whether every training case shows a class in full, of each class but the background."""
        known = self.classes if self.annotated is None else self.annotated
        return np.array([name in known for name in self.classes[1:]])

    def scaled(self, name: str) -> np.ndarray:
        """Return the mean of a quantity in [0, 1], for a `Quantity.present` over the cases with the class."""
        values = self.entries[name].double().numpy()
        if QUANTITIES[name].present:
            present = self.entries["present"].double().numpy()
            values = np.where(present > 0, values / np.maximum(present, 1e-9), 0).clip(0, 1)
        return values

    def value(self, name: str) -> np.ndarray:
        """Return the mean of a quantity in its unit; the geometric mean for logarithms."""
        return QUANTITIES[name].restored(self.scaled(name))

    def spread(self, name: str) -> np.ndarray:
        """Return the standard deviation of a quantity between the site's cases, in its unit."""
        quantity = QUANTITIES[name]
        mean, square = (self.entries[key].double().numpy() for key in (name, f"{name}_square"))
        return np.sqrt(np.maximum(square - mean**2, 0)) * (quantity.high - quantity.low)

    @property
    def statistics(self) -> ChannelStatistics:
        """Return the channel statistics (FedRDN Eq. 5-6)."""
        mean, std = (torch.from_numpy(self.value(name)) for name in ("mean", "std"))
        return ChannelStatistics(mean, std, self.looked_at)

    @property
    def knows_geometry(self) -> bool:
        """Return whether more than 90 % of the files give the size of a voxel."""
        return float(self.entries["geometry"]) > 0.9

    def to_dict(self) -> dict[str, Any]:
        """Return JSON types."""
        values = {name: getattr(self, name) for name in _PLAIN}
        values["classes"] = list(self.classes)
        values["entries"] = {
            name: [round(v, 6) for v in value.flatten().tolist()] for name, value in self.entries.items()
        }
        if self.scanners:
            values["scanners"] = dict(self.scanners)
        if self.annotated is not None:
            values["annotated"] = list(self.annotated)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ImageFingerprint:
        """Invert `to_dict`.

        Raises:
            ValueError: for an invalid entry, count, scanner or class.
        """
        owner = f"the fingerprint of {values['site']}"
        classes, channels = tuple(values["classes"]), int(values["channels"])
        shapes = entry_shapes(values["task"], len(classes), channels)
        if set(values["entries"]) != set(shapes):
            raise ValueError(f"{owner} has other entries than {', '.join(shapes)}")
        entries = {
            name: torch.tensor(values["entries"][name], dtype=torch.float64).reshape(shape)
            for name, shape in shapes.items()
        }
        for name, value in entries.items():
            if not bool(((value >= 0) & (value <= 1)).all()):  # NaN too
                raise ValueError(f"{owner} has a {name} outside 0 to 1")
        for name in ("cases", "looked_at", "patients", "test_patients"):
            if type(values[name]) is not int or values[name] < 0:
                raise ValueError(f"{owner} has no number of {name}")
        annotated = values.get("annotated")
        if annotated is not None:
            if not isinstance(annotated, list) or not set(annotated) <= set(classes[1:]):
                raise ValueError(f"{owner} has annotated other classes")
            annotated = tuple(annotated)
        checked = {name: values[name] for name in _PLAIN} | {"channels": channels}
        checked |= {"classes": classes, "entries": entries, "annotated": annotated}
        return cls(**checked, scanners=check_scanners(values.get("scanners", {})))


def entry_shapes(task: str, num_classes: int, channels: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the entries of a fingerprint.

    Example:
        >>> entry_shapes("classification", 3, 1)["shares"]
        (3,)
    """
    shapes: dict[str, tuple[int, ...]] = {} if task == "segmentation" else {"shares": (num_classes,)}
    lengths = {"channel": channels, "class": num_classes - 1, "case": 1}
    for name, quantity in QUANTITIES.items():
        if quantity.per == "class" and task != "segmentation":
            continue
        shapes[name] = (lengths[quantity.per],)
        if quantity.squared:
            shapes[f"{name}_square"] = shapes[name]
    return shapes


def fingerprint_of(
    site: SiteFolder, cases: Sequence[Case] | None = None, on_case: Callable[[int, int], None] | None = None
) -> ImageFingerprint:
    """Compute the fingerprint of a site from training cases, by default `sample_cases`.

    One image is in memory at a time, and all patients have equal weights.

    Raises:
        DataError: when the site has no training case, or an image cannot be read.
    """
    cases = sample_cases(site) if cases is None else cases
    means: dict[str, Tensor] = {}
    for done, (case, weight) in enumerate(zip(cases, weights_by_patient(cases), strict=True), start=1):
        for name, value in case_numbers(site, case).items():
            means[name] = means.get(name, 0) + weight * value
        if on_case is not None:
            on_case(done, len(cases))
    return from_means(site, means, len(cases))


def sample_cases(site: SiteFolder, limit: int | None = SAMPLE, least: int = 1) -> tuple[Case, ...]:
    """Choose training cases for a fingerprint, by `medfedaug.data.base.drawn_over_patients`."""
    cases = drawn_over_patients(site.cases["training"], limit, least)
    if not cases:
        raise DataError("has no training case, of which a fingerprint could be made", site=site.name)
    return cases


def from_means(site: SiteFolder, entries: Mapping[str, Tensor], looked_at: int) -> ImageFingerprint:
    """Build a fingerprint from its entries and the site's numbers of cases and patients."""
    return ImageFingerprint(
        site=site.name,
        task=site.task,
        classes=site.classes,
        channels=len(entries["mean"]),
        cases=len(site.cases["training"]),
        looked_at=looked_at,
        patients=len(site.cases_of_patients("training")),
        test_patients=len(site.cases_of_patients("test")),
        entries=entries,
        annotated=site.annotated("training", in_all=True) if site.partial else None,
    )


def case_numbers(site: SiteFolder, case: Case) -> dict[str, Tensor]:
    """Return the entries of a fingerprint (`entry_shapes`) of a single case, float64 in [0, 1]."""
    edges: Sequence[float] = ()
    if isinstance(site, VolumeFolder):
        image, label = site.load_case(case, "scale")
        edges = site.check_case(case).edges
        entries = _label_entries(label, len(site.classes))
    else:
        image = site.load_image(case, "scale")
        shares = torch.tensor([name == case.label for name in site.classes], dtype=torch.float64)
        entries = {"shares": shares}
    values = convert_to_tensor(image, track_meta=False)
    moments = {name: value.double() for name, value in image_moments(values).items()}
    numbers = {**moments, **_texture(_planes(values, edges)), **_geometry(image.shape[1:], edges)}
    for name, value in numbers.items():
        quantity = QUANTITIES[name]
        entries[name] = quantity.scaled(value)
        if quantity.squared:
            entries[f"{name}_square"] = entries[name].square()
    return entries


def _label_entries(label: Tensor, classes: int) -> dict[str, Tensor]:
    """Return presence, size and pieces of each class but the background; 0 for an absent class."""
    shares = torch.bincount(label.flatten().long(), minlength=classes)[:classes].double() / label.numel()
    present = (shares[1:] > 0).double()
    mask = label[0].numpy()
    pieces = [connected_pieces(mask == index) for index in range(1, classes)]
    counts = torch.tensor(pieces, dtype=torch.float64)
    sizes, numbers = QUANTITIES["size"].scaled(shares[1:]), QUANTITIES["pieces"].scaled(counts.clamp_min(1))
    return {"present": present, "size": sizes * present, "pieces": numbers * present}


def _planes(values: Tensor, edges: Sequence[float]) -> Tensor:
    """Return at most `_PLANES` planes of an image, evenly from all, float64 of shape (C, D, H, W).

    A plane has the two axes with the shortest edges, or the first two axes without edges.
    """
    order = np.argsort(np.asarray(edges), kind="stable") if len(edges) == values.dim() - 1 else range(2)
    first = [int(axis) + 1 for axis in order[:2]]
    planes = values.movedim(first, (-2, -1)).flatten(1, -3) if values.dim() > 3 else values[:, None]
    chosen = np.linspace(0, planes.shape[1] - 1, min(_PLANES, planes.shape[1])).round().astype(int)
    return planes[:, chosen].double()


def _texture(planes: Tensor) -> dict[str, Tensor]:
    """Return noise and roughness of each channel, (C,), of planes (C, D, H, W).

    Noise is the median absolute value of Immerkær's difference of two Laplacians (Computer Vision and Image
    Understanding 64, 1996), divided by 6 · 0.6745, over the voxels that are not the darkest of the image.

    Deviations:
        Immerkær takes the mean; edges change the median less.
    """
    variance = planes.flatten(1).var(dim=1, correction=0)
    noise, rough = [], []
    for channel, power in zip(planes, variance, strict=True):
        steps = [torch.diff(channel, dim=dim).square().mean() for dim in (1, 2) if channel.shape[dim] > 1]
        rough.append(torch.stack(steps).mean() / (2 * power) if steps and power > 0 else power.new_zeros(()))
        if min(channel.shape[1:]) < 3:
            noise.append(power.new_zeros(()))
            continue
        filtered = torch.nn.functional.conv2d(channel[:, None], _LAPLACIAN[None, None])[:, 0].abs()
        inside = filtered[channel[:, 1:-1, 1:-1] > channel.min()]
        noise.append(inside.median() / (6 * 0.6745) if len(inside) else power.new_zeros(()))
    return {"noise": torch.stack(noise), "roughness": torch.stack(rough)}


def _geometry(shape: Sequence[int], edges: Sequence[float]) -> dict[str, Tensor]:
    """Return edge, thickness and extent, (1,) each; the lower ends of their ranges without geometry."""
    numbers = {name: QUANTITIES[name].low for name in ("geometry", "edge", "thickness", "extent")}
    if len(edges) == len(shape) and min(edges, default=0) > 0:
        order = np.argsort(np.asarray(edges), kind="stable")
        plane = order[:2]
        numbers = {
            "geometry": 1.0,
            "edge": math.sqrt(math.prod(edges[axis] for axis in plane)),
            "thickness": edges[order[-1]],
            "extent": math.sqrt(math.prod(edges[axis] * shape[axis] for axis in plane)),
        }
    return {name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}


def as_rows(name: str, value: Tensor) -> Tensor:
    """Turn an entry into rows that add up to 1: a number t becomes (1 − t, t)."""
    return value if name == "shares" else torch.stack([1 - value, value], dim=-1)


def from_rows(name: str, rows: Tensor) -> Tensor:
    """Invert `as_rows`."""
    return rows if name == "shares" else rows[..., 1]
