"""Volumes with label maps: MONAI's decathlon layout, checked before anything is computed from it.

``DIR/<site>/dataset.json`` lists ``training``, ``validation`` and ``test`` cases, split by patient; each case
is ``{"image": path, "label": path}`` relative to that file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor, load_decathlon_datalist
from monai.transforms import EnsureChannelFirst, LoadImage, ScaleIntensity

from medfedaug.data.base import SPLITS, Case, SiteFolder, unreadable
from medfedaug.errors import DataError

__all__ = ["VolumeFolder"]


class VolumeFolder(SiteFolder):
    """A site's volumes as listed in its ``dataset.json``; `Case.label` is a path."""

    task = "segmentation"
    listing = "dataset.json"

    @classmethod
    def open(cls, path: str | Path, name: str | None = None, limit: int | None = None) -> VolumeFolder:
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
        site = cls(name=name, path=path, classes=_read_labels(listing, name, content), cases=cases)
        site.check_splits()
        return site

    def check_files(self) -> int:
        """Check that every listed file can be opened and fits its label map, by the headers alone.

        Returns:
            The number of channels of the images.

        Raises:
            DataError: naming site and file.
        """
        channels: dict[int, Path] = {}
        for split in SPLITS:
            for case in self.cases[split]:
                image, label = _header_shape(self.name, case.image), _header_shape(self.name, _label(case))
                if image[:3] != label[:3]:
                    raise DataError(
                        f"the label map is {_by(label[:3])}, its image {_by(image[:3])}",
                        site=self.name,
                        path=_label(case),
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
        image, label = self.load_image(case, intensity), _load(self.name, _label(case))
        if image.shape[1:] != label.shape[1:]:
            raise DataError(
                f"the label map is {_by(label.shape[1:])}, its image {_by(image.shape[1:])}",
                site=self.name,
                path=_label(case),
            )
        known = range(len(self.classes))
        unknown = [value for value in torch.unique(label).tolist() if value not in known]
        if unknown:
            values = ", ".join(f"{value:g}" for value in unknown[:5])
            raise DataError(
                f"holds the label values {values}, dataset.json names {list(known)}",
                site=self.name,
                path=_label(case),
            )
        return image, label.to(torch.uint8)


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
        for kind, file in (("image", case.image), ("label", _label(case))):
            if not file.is_file():
                raise DataError(
                    f"the {kind} of a {split} case is missing",
                    site=site,
                    path=file,
                    hint="Put the file there or take the case out of dataset.json.",
                )
    return tuple(cases)


def _read_labels(listing: Path, site: str, content: dict[str, Any]) -> tuple[str, ...]:
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
    return tuple(named[index] for index in range(len(named)))


def _header_shape(site: str, path: Path) -> tuple[int, ...]:
    try:
        # MONAI's readers decode the whole volume; the header is enough here, and seconds faster.
        return tuple(nibabel.load(path).shape)  # type: ignore[attr-defined]
    except Exception as error:  # nibabel raises its own, zlib's, OSError and ValueError
        raise unreadable(site, path, error) from error


def _load(site: str, path: Path) -> torch.Tensor:
    try:
        volume = cast(MetaTensor, EnsureChannelFirst()(LoadImage(image_only=True, dtype=np.float32)(path)))
    except Exception as error:  # a damaged file fails anywhere between the reader and zlib
        raise unreadable(site, path, error) from error
    if volume.ndim != 4:
        raise DataError(f"is {volume.ndim - 1}-dimensional, a volume was expected", site=site, path=path)
    return volume.as_tensor()


def _stem(path: str) -> str:
    name = Path(path).name
    for suffix in (".nii.gz", ".nii", ".mha", ".nrrd"):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def _by(shape: Iterable[int]) -> str:
    return " x ".join(str(int(n)) for n in shape)


def _label(case: Case) -> Path:
    return Path(case.label)
