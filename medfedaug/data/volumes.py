"""Volumes and photographs with label maps, listed in ``dataset.json``, checked before use.

Listing and checking headers needs no PyTorch, which is imported where voxels are decoded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from medfedaug.data.base import SPLITS, Case, Listing, SiteFolder
from medfedaug.data.checks import check_copies, compare_axes
from medfedaug.data.dataset_json import read_listing
from medfedaug.data.io.base import Header
from medfedaug.data.io.formats import format_of, is_lossy, is_photograph, label_bits, read_header
from medfedaug.data.preparation.cache import decoded
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    import torch

    from medfedaug.data.preparation.preparation import Placement, Preparation

_WHITE = 255
_KINDS = {None: "a volume", 255: "a photograph of 8 bits", 65535: "a photograph of 16 bits"}

# Of the shortest edge of a voxel: headers round by far less, and half a voxel matters.
_TOLERANCE = 0.1


class VolumeFolder(SiteFolder):
    """Images of a site, listed in its ``dataset.json``; `Case.label` is a path, empty without a label map.

    An image is a volume (a NIfTI, MHA or NRRD file, or a folder with one DICOM series) or a photograph (PNG,
    JPEG, TIFF, BMP), which is a volume of one slice.
    """

    task = "segmentation"
    listing = "dataset.json"
    compares_axes: ClassVar[bool] = True
    """Flag: headers state where the axes point; some published label maps have an empty header."""

    @property
    def has_photographs(self) -> bool:
        """Return whether some image is a photograph, which has neither depth nor millimetres."""
        return any(is_photograph(case.image) for case in self.listed_cases)

    @property
    def scaling(self) -> str:
        """Return ``"fixed"`` for photographs, otherwise ``"each volume"``."""
        return "fixed" if self.has_photographs else "each volume"

    @classmethod
    def list_cases(cls, path: Path, name: str) -> Listing:
        return read_listing(path, name)

    def check_splits(self) -> None:
        """Check that all listed files exist, and check the splits."""
        hint = "Put the file there or take the case out of dataset.json."
        for split in SPLITS:
            for case in self.cases[split]:
                files = [("image", path) for path in case.files]
                files += [("label", case.label)] if isinstance(case.label, Path) else []
                for kind, path in files:
                    if not os.path.exists(path):  # unlike `Path.exists`, also of a name that is too long
                        raise self.error(f"the {kind} of a {split} case is missing", path, hint=hint)
        super().check_splits()

    def check_files(self) -> int:
        """Check by headers that every listed file can be opened and fits its label map."""
        # Several cases may be slices of one volume.
        volumes = {case.files: case for case in self.listed_cases}
        first: Header | None = None
        for (path, *_), case in volumes.items():
            image = self.check_case(case)
            first = first or image
            kinds = [(_KINDS[header.white], header.channels) for header in (image, first)]
            if kinds[0] != kinds[1]:
                problem, other = (f"{kind} of {counted(number, 'channel')}" for kind, number in kinds)
                hint = "Bring all images of the site to one kind, with the same channels."
                raise self.error(f"{problem}, while the first image is {other}", path, hint=hint)
        assert first is not None
        number = first.channels
        if self.channel_names and len(self.channel_names) != number:
            problem = f"names {len(self.channel_names)} channels; the images have {number}"
            raise self.error(problem, hint="Correct channel_names, or modality, in dataset.json.")
        compare_axes(self.name, self.upright_axes())
        check_copies([self])
        return len(self.federation_channels) or number

    def check_case(self, case: Case) -> Header:
        """Check that a case's files can be opened and lie on one grid; return the header of all channels."""
        image = self.check_image(case)
        if not isinstance(case.label, Path):
            return image
        label = self._header(_label(case))
        self._check_grid(_label(case), label, image, "the label map", "its image")
        # The channels of a label image in colour may agree, which only its pixels show.
        if label.channels != 1 and label.white is None:
            raise self.error(f"the label map has {label.channels} channels, expected one", _label(case))
        return image

    def check_image(self, case: Case) -> Header:
        """Check a case's image as `check_case` does, without its label map."""
        headers = [self._header(path) for path in case.files]
        image = headers[0]
        for path, header in zip(case.others, headers[1:], strict=True):
            self._check_grid(path, header, image, "the file", "the first file of its image")
        return replace(image, channels=sum(header.channels for header in headers))

    def _check_grid(self, path: Path, header: Header, image: Header, file: str, other: str) -> None:
        problem = ""
        apart = image.distance(header) if self.compares_axes and image.shape == header.shape else 0.0
        if header.white != image.white and file != "the label map":
            problem = f"{_KINDS[header.white]}, while {other} is {_KINDS[image.white]}"
        elif image.shape != header.shape:
            problem = f"{file} is {_size(header.shape)}, {other} {_size(image.shape)}"
        elif self.compares_axes and image.axes and header.axes and image.axes != header.axes:
            problem = f"{file}'s axes point to {header.axes}, {other}'s to {image.axes}"
        elif apart > _TOLERANCE * min(image.edges, default=0):
            edges = " x ".join(f"{edge:.3g}" for edge in image.edges)
            problem = f"{file} lies up to {apart:.3g} mm from {other}, whose voxels are {edges} mm"
        if problem:
            raise self.error(problem, path, hint=f"Resample {file} onto {other.replace('its', 'the')}.")

    def upright_axes(self) -> dict[str, Path]:
        """Return the clear directions of the volumes' axes, each with one volume."""
        volumes: dict[str, Path] = {}
        for case in self.listed_cases if self.compares_axes else ():
            volumes.setdefault(self._header(case.image).upright_axes, case.image)
        return {axes: path for axes, path in volumes.items() if axes}

    def read_files(self, case: Case) -> list[torch.Tensor]:
        """Return the stored voxels of each file of the image, float32 of shape (C, H, W, D)."""
        return [self._voxels(path) for path in case.files]

    def read_label(self, case: Case) -> torch.Tensor:
        """Return the stored voxels of the label map, float32 of shape (1, H, W, D)."""
        return self._voxels(_label(case), label=True)

    def _voxels(self, path: Path, *, label: bool = False) -> torch.Tensor:
        import torch

        with self.reading(path):
            form = format_of(path)
            return torch.as_tensor(form.read_label(path) if label else form.read_volume(path))

    def _header(self, path: Path) -> Header:
        with self.reading(path):
            return read_header(path)

    def load_image(self, case: Case, intensity: str = "raw") -> torch.Tensor:
        """Return the image as float32 of shape (C, H, W, D), in the file's units or scaled to [0, 1].

        C are the federation's channels after `with_channels`; channels that the site lacks are 0. Scaling
        divides each file of a volume by its own range, and a photograph by the white of its format.

        Raises:
            DataError: naming site and file, when it cannot be read, holds NaN or infinite voxels, or
                is constant.
        """
        channels = f"{self.channel_places} {len(self.federation_channels)}"
        kind = f"{type(self).__name__} {case.index} {intensity} {channels}"
        return decoded(kind, case.files, lambda: self._image(case, intensity))

    def prepared_image(self, case: Case, intensity: str, preparation: Preparation) -> torch.Tensor:
        """Return a prepared volume, (C, X, Y, Z)."""
        image = self.load_image(case, intensity)
        return preparation.image(image, self.placement(case, image, preparation))

    def _image(self, case: Case, intensity: str) -> torch.Tensor:
        import torch

        parts = self.read_files(case)
        self._check_ranges(case, parts)
        if intensity == "scale":
            parts = [self._scaled(part, path) for part, path in zip(parts, case.files, strict=True)]
        image = torch.cat(parts) if len(parts) > 1 else parts[0]
        if not self.channel_places:
            return image
        placed = image.new_zeros(len(self.federation_channels), *image.shape[1:])
        placed[[*self.channel_places]] = image
        return placed

    def check_pixels(self, case: Case) -> None:
        """Check a case's headers and the voxels of its image as a run does, without PyTorch."""
        self.check_case(case)
        voxels = []
        for path in case.files:
            with self.reading(path):
                voxels.append(np.asarray(format_of(path).read_volume(path)))
        self._check_ranges(case, voxels)

    def _check_ranges(self, case: Case, parts: Sequence[np.ndarray | torch.Tensor]) -> None:
        # The range sees every NaN and infinity, without an array of booleans as large as the volume.
        ranges = [(float(part.min()), float(part.max())) for part in parts]
        for path, bounds in zip(case.files, ranges, strict=True):
            if not all(map(math.isfinite, bounds)):
                raise self.error("has NaN or infinite voxels", path)
        if all(low == high for low, high in ranges):
            hint = "Export it again or leave the case out."
            raise self.error(f"is constant: every voxel is {ranges[0][0]:g}", case.image, hint=hint)

    def _scaled(self, voxels: torch.Tensor, path: Path) -> torch.Tensor:
        import torch
        from monai.transforms import ScaleIntensity

        white = self._header(path).white if is_photograph(path) else None
        return torch.as_tensor(ScaleIntensity()(voxels)) if white is None else voxels / white

    def load_case(self, case: Case, intensity: str = "raw") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the image, float32 of shape (C, H, W, D), and the label map as `load_label` does."""
        return self.load_image(case, intensity), self.load_label(case)

    def load_target(self, case: Case, intensity: str = "raw") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the image, and the label map in the code of `annotation`, where the site has one."""
        image, label = self.load_image(case, intensity), self._label_or_unknown(case)
        if self.annotation is not None:
            label = self.annotation.encode(label, self.annotated_set(case, self.classes))
        return image, label

    def load_label(self, case: Case) -> torch.Tensor:
        """Return the label map, (1, H, W, D), uint8, above 256 classes int32; 0 for an unknown class."""
        label = self._label_or_unknown(case)
        return label if self.annotation is None else label * (label != self.annotation.unknown)

    def _label_or_unknown(self, case: Case) -> torch.Tensor:
        """Return the class of each voxel; `Annotation.unknown` for an unknown class and without label map."""
        if not isinstance(case.label, Path):
            import torch

            unknown = len(self.classes)
            dtype = torch.uint8 if unknown < 256 else torch.int32
            return torch.full((1, *self.load_image(case).shape[1:]), unknown, dtype=dtype)
        # Slices of one file share its label map; black and white mean 0 and 1 with two classes alone.
        kind = f"{type(self).__name__} label {case.index} {len(self.classes)} {self.label_values}"
        if self.annotation is not None:
            kind += f" {self.ignore} {case.annotated}"
        return decoded(kind, [_label(case)], lambda: self._label_map(case))

    def affine(self, case: Case) -> torch.Tensor | None:
        """Return the affine from voxels to millimetres in RAS, (4, 4), or ``None`` without geometry."""
        import torch

        affine = self._header(case.image).affine if self.compares_axes else None
        return None if affine is None else torch.as_tensor(affine)

    def placement(self, case: Case, image: torch.Tensor, preparation: Preparation) -> Placement | None:
        """Compute the placement of an image, (C, X, Y, Z)."""
        with self.reading(case.image):
            return preparation.placement(image, self.affine(case))

    def _label_map(self, case: Case) -> torch.Tensor:
        import torch

        label = self.read_label(case)
        values = torch.unique(label).tolist()
        if self.annotation is not None:
            return self._annotated_map(case, label, values)
        classes = self.label_values or (*range(len(self.classes)),)
        if classes == (0, 1) and is_black_and_white(_label(case), values):
            return (label > 0).to(torch.uint8)
        unknown = [value for value in values if value not in classes]
        if unknown:
            text = ", ".join(f"{value:g}" for value in unknown[:5])
            problem = f"holds the label values {text}, dataset.json names {[*classes]}"
            hint = "Write label images without loss, as PNG." if is_lossy(_label(case)) else ""
            raise self.error(problem, _label(case), hint=hint)
        if self.label_values:
            ordered, places = torch.tensor(classes, dtype=label.dtype).sort()
            label = places[torch.bucketize(label, ordered)]
        return label.to(torch.uint8 if label_bits(len(classes)) == 8 else torch.int32)

    def _annotated_map(self, case: Case, label: torch.Tensor, values: list[float]) -> torch.Tensor:
        """Return the label map of a case with only some of the classes, or unknown voxels."""
        import torch

        assert self.annotation is not None
        annotated = self.annotated_set(case, self.classes)
        white = {0, _WHITE} >= {*values} and is_photograph(_label(case)) and _WHITE not in self.label_values
        if white and self.ignore != _WHITE and sum(annotated) == 2:
            label, values = label / _WHITE, [0, 1]
        places = {value: place for place, value in enumerate(self.label_values) if annotated[place]}
        placed = label.new_full(label.shape, self.annotation.unknown)
        for value in values:
            if value == self.ignore:
                continue
            if value not in places:
                names = dict(zip(self.label_values, self.classes, strict=True))
                name = f", the class {names[int(value)]!r}" if value in names else ""
                listed = ", ".join(self.classes[1:] if case.annotated is None else case.annotated)
                raise self.error(
                    f"holds the value {value:g}{name}; outlined classes: {listed or 'none'}",
                    _label(case),
                    hint="Add the class to 'labelled' in dataset.json, of the site or of the case's row, if "
                    "all of it is outlined; otherwise give these voxels the background's value.",
                )
            placed[label == value] = places[int(value)]
        return placed.to(torch.uint8 if self.annotation.unknown < 256 else torch.int32)


def is_black_and_white(path: Path, values: Collection[float]) -> bool:
    """Return whether a label image is a mask of drawing programs, in which 255 is the class 1."""
    return is_photograph(path) and _WHITE in values and {*values} <= {0, _WHITE}


def _size(shape: Iterable[int]) -> str:
    return " x ".join(str(int(n)) for n in shape)


def _label(case: Case) -> Path:
    return Path(case.label)
