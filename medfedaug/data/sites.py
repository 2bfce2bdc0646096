"""A site's folder: MONAI's decathlon layout, checked before anything is computed from it.

``DIR/<site>/dataset.json`` lists ``training``, ``validation`` and ``test`` cases, split by patient; each case
is ``{"image": path, "label": path}`` relative to that file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor, load_decathlon_datalist
from monai.transforms import EnsureChannelFirst, LoadImage, ScaleIntensity

from medfedaug.errors import DataError
from medfedaug.statistics import ChannelStatistics, channel_statistics

__all__ = ["SPLITS", "Case", "SiteFolder", "find_sites", "site_statistics"]

SPLITS = ("training", "validation", "test")


@dataclass(frozen=True)
class Case:
    """One patient's volume and its label map.

    Args:
        name: the image file's name without its extensions.
        image: path of the image.
        label: path of the label map.
    """

    name: str
    image: Path
    label: Path


@dataclass(frozen=True)
class SiteFolder:
    """A site's data as listed in its ``dataset.json``.

    Args:
        name: the site's name.
        path: its folder.
        labels: class index to class name, background included.
        cases: the cases of each of `SPLITS`.
    """

    name: str
    path: Path
    labels: dict[int, str]
    cases: dict[str, tuple[Case, ...]]

    @classmethod
    def open(cls, path: str | Path, name: str | None = None, limit: int | None = None) -> SiteFolder:
        """Read ``path/dataset.json``.

        Args:
            path: the site's folder.
            name: the site's name; by default the folder's.
            limit: at most so many cases of each split.

        Raises:
            DataError: naming site and file, where the list cannot be used.
        """
        path = Path(path)
        name = name or path.resolve().name
        listing = path / "dataset.json"
        if not listing.is_file():
            raise DataError(
                "there is no dataset.json",
                site=name,
                path=path,
                hint="It lists the cases in MONAI's decathlon style.",
            )
        try:
            content = json.loads(listing.read_text())
        except (OSError, ValueError) as error:
            raise DataError(f"not readable as JSON ({error})", site=name, path=listing) from error
        if not isinstance(content, dict):
            raise DataError("not a JSON object", site=name, path=listing)
        cases = {split: _read_split(listing, name, content, split)[:limit] for split in SPLITS}
        site = cls(name=name, path=path, labels=_read_labels(listing, name, content), cases=cases)
        site._check_splits(listing)
        return site

    @property
    def trains(self) -> bool:
        """Whether the site has training cases; one with test cases alone is an unseen site."""
        return bool(self.cases["training"])

    def _check_splits(self, listing: Path) -> None:
        empty = [split for split in SPLITS if not self.cases[split]]
        if set(empty) == set(SPLITS):
            raise DataError("lists no case", site=self.name, path=listing)
        # Test cases alone make an unseen site, which is evaluated and never trains.
        if empty and empty != ["training", "validation"]:
            raise DataError(
                f"the split {empty[0]!r} is empty",
                site=self.name,
                path=listing,
                hint="A site trains with all three splits, or is tested only, with test cases alone.",
            )
        images = [case.image for split in SPLITS for case in self.cases[split]]
        for image in images:
            if images.count(image) > 1:
                raise DataError(
                    "listed more than once",
                    site=self.name,
                    path=image,
                    hint="A patient belongs to one split only, or the test is not one.",
                )

    def check_files(self) -> int:
        """Check that every listed file is there and fits, by the headers alone.

        Returns:
            The number of channels of the images.

        Raises:
            DataError: naming site and file.
        """
        channels: dict[int, Path] = {}
        for split in SPLITS:
            for case in self.cases[split]:
                image, label = _header_shape(self.name, case.image), _header_shape(self.name, case.label)
                if image[:3] != label[:3]:
                    raise DataError(
                        f"the label map is {_by(label[:3])}, its image {_by(image[:3])}",
                        site=self.name,
                        path=case.label,
                        hint="Resample the label map onto the image.",
                    )
                channels.setdefault(image[3] if len(image) > 3 else 1, case.image)
        if len(channels) > 1:
            (a, first), (b, other) = list(channels.items())[:2]
            raise DataError(
                f"{b} channels, while {first.name} has {a}",
                site=self.name,
                path=other,
                hint="All images need the same channels.",
            )
        return next(iter(channels))

    def load_image(self, case: Case, intensity: str = "raw") -> torch.Tensor:
        """The image as float32 of shape (C, H, W, D), in the file's units or scaled to [0, 1].

        Raises:
            DataError: naming site and file, when it cannot be read or holds NaN or infinite voxels.
        """
        image = _load(self.name, case.image)
        # One sum sees every NaN and infinity, without an array of booleans as large as the volume.
        if not torch.isfinite(image.sum(dtype=torch.float64)):
            raise DataError("has NaN or infinite voxels", site=self.name, path=case.image)
        return torch.as_tensor(ScaleIntensity()(image)) if intensity == "scale" else image

    def load_case(self, case: Case, intensity: str = "raw") -> tuple[torch.Tensor, torch.Tensor]:
        """Image (C, H, W, D), float32, and label map (1, H, W, D), uint8.

        Raises:
            DataError: naming site and file, as `load_image` does, and for labels outside the classes.
        """
        image, label = self.load_image(case, intensity), _load(self.name, case.label)
        if image.shape[1:] != label.shape[1:]:
            raise DataError(
                f"the label map is {_by(label.shape[1:])}, its image {_by(image.shape[1:])}",
                site=self.name,
                path=case.label,
            )
        values = torch.unique(label).tolist()
        unknown = [v for v in values if v not in self.labels]
        if unknown:
            raise DataError(
                f"holds the label values {', '.join(f'{v:g}' for v in unknown[:5])}, dataset.json names {sorted(self.labels)}",
                site=self.name,
                path=case.label,
            )
        return image, label.to(torch.uint8)

    def images(self, split: str, intensity: str = "raw") -> Iterator[torch.Tensor]:
        """The images of a split, one in memory at a time."""
        return (self.load_image(case, intensity) for case in self.cases[split])


def site_statistics(site: SiteFolder, intensity: str = "raw") -> ChannelStatistics:
    """The site's channel statistics (FedRDN Eq. 5-6) over its training volumes.

    An unseen site has no training volumes; its own statistics come from its test volumes, without their
    labels: that is all that such a site has to go by.

    Raises:
        DataError: when a volume cannot be read, or a channel is constant in all of them.
    """
    split = "training" if site.trains else "test"
    try:
        return channel_statistics(site.images(split, intensity)).validate(site.name)
    except ValueError as error:
        raise DataError(
            str(error).removeprefix(f"site '{site.name}': "), site=site.name, path=site.path
        ) from error


def find_sites(data_dir: str | Path, limit: int | None = None) -> list[SiteFolder]:
    """The sites below ``data_dir``, sorted by name: every folder that holds a ``dataset.json``.

    Raises:
        DataError: when there is none, or one cannot be used.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise DataError("no such folder", path=root)
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    sites = [SiteFolder.open(p, limit=limit) for p in folders if (p / "dataset.json").exists()]
    if not sites:
        raise DataError(
            "no site found",
            path=root,
            hint="Each site is a folder with a dataset.json; `medfedaug phantom --out DIR` makes an example.",
        )
    return sites


def _read_split(listing: Path, site: str, content: dict[str, Any], split: str) -> tuple[Case, ...]:
    if not content.get(split):
        return ()
    try:
        items = load_decathlon_datalist(listing, is_segmentation=True, data_list_key=split)
        cases = [Case(_stem(item["image"]), Path(item["image"]), Path(item["label"])) for item in items]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the split {split!r} is not a list of {{'image': ..., 'label': ...}} ({error})",
            site=site,
            path=listing,
        ) from error
    for case in cases:
        for kind, file in (("image", case.image), ("label", case.label)):
            if not file.is_file():
                raise DataError(
                    f"the {kind} of a {split} case is missing",
                    site=site,
                    path=file,
                    hint="Put the file there or take the case out of dataset.json.",
                )
    return tuple(cases)


def _read_labels(listing: Path, site: str, content: dict[str, Any]) -> dict[int, str]:
    labels = content.get("labels", {"0": "background", "1": "foreground"})
    try:
        named = {int(index): str(text) for index, text in labels.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(
            f"'labels' does not map class indices to names ({error})", site=site, path=listing
        ) from error
    if sorted(named) != list(range(len(named))) or len(named) < 2:
        raise DataError(
            f"'labels' has the class indices {sorted(named)}",
            site=site,
            path=listing,
            hint="They count 0, 1, 2, ...",
        )
    return named


def _header_shape(site: str, path: Path) -> tuple[int, ...]:
    try:
        # MONAI's readers decode the whole volume; the header is enough here, and seconds faster.
        return tuple(nibabel.load(path).shape)  # type: ignore[attr-defined]
    except Exception as error:  # nibabel raises its own, zlib's, OSError and ValueError
        raise _unreadable(site, path, error) from error


def _load(site: str, path: Path) -> MetaTensor:
    try:
        volume = EnsureChannelFirst()(LoadImage(image_only=True, dtype=np.float32)(path))
    except Exception as error:  # a damaged file fails anywhere between the reader and zlib
        raise _unreadable(site, path, error) from error
    if volume.ndim != 4:
        raise DataError(f"is {volume.ndim - 1}-dimensional, a volume was expected", site=site, path=path)
    return volume.as_tensor()


def _unreadable(site: str, path: Path, error: Exception) -> DataError:
    reason = str(error).strip().splitlines()
    return DataError(
        f"cannot be read as an image ({reason[0][:160] if reason else type(error).__name__})",
        site=site,
        path=path,
        hint="Replace the file or take the case out of dataset.json.",
    )


def _stem(path: str) -> str:
    name = Path(path).name
    for suffix in (".nii.gz", ".nii", ".mha", ".nrrd"):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def _by(shape: Iterable[int]) -> str:
    return " x ".join(str(int(n)) for n in shape)
