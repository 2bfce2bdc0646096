"""`CaseWriter`: the files of a predicted case and its entry; `SeriesObjects`: what a layer writes besides."""

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.io.base import Segments
from medfedaug.data.io.formats import format_of, write_label_map, write_probabilities
from medfedaug.data.volumes import VolumeFolder
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.input_statistics import Origin
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.prediction_image import draw_classified, draw_label_map, write_picture
from medfedaug.tasks import Prediction
from medfedaug.utils.plugins import added_module, added_modules


@dataclass(frozen=True)
class PlainSegments:
    """The classes of a label map."""

    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SeriesObjects:
    """Writes nothing else; `medfedaug.hospital.dicom.prediction_objects.DicomObjects` does for DICOM.

    ``further`` has the identities of the images' series after the first, by case and channel.
    """

    run: FinishedRun
    origin: Origin
    options: PredictionOptions
    folder: SiteFolder
    further: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the objects, for the record."""
        return {}

    def check(self, cases: Iterable[Case]) -> None:
        """Check that the objects of these cases can be written."""

    def files(self, case: Case, label: str) -> list[str]:
        """Return the files of a case, given that of its label map."""
        return []

    def segments(self, case: Case, classes: tuple[str, ...], notes: Mapping[str, str]) -> Segments:
        """Return the classes of a label map, with notes by class, for the format of the image."""
        return PlainSegments(classes)

    def write(self, out: Path, case: Case, label: Tensor, file: str, segments: Segments) -> None:
        """Write the objects of a case to a folder, given its label map, (1, X, Y, Z), and the map's file."""


def series_objects(
    run: FinishedRun,
    origin: Origin,
    options: PredictionOptions,
    folder: SiteFolder,
    further: Mapping[str, Mapping[str, str]],
) -> SeriesObjects:
    """Return what writes objects of series in this installation; see `SeriesObjects`."""
    asked = {"--rtstruct": options.rtstruct, "--report": options.report}
    for option in (option for option, value in asked.items() if value):
        added_module("dicom.prediction_objects", option)
    modules = added_modules("dicom.prediction_objects")
    make = modules[0].DicomObjects if modules else SeriesObjects
    objects: SeriesObjects = make(run, origin, options, folder, further)
    return objects


_PROBABILITIES, _PREVIEWS = "probabilities", "previews"


@dataclass(frozen=True)
class CaseWriter:
    """Writes the files of predicted cases."""

    out: Path
    folder: SiteFolder
    classes: tuple[str, ...]
    options: PredictionOptions
    objects: SeriesObjects
    borrowed: Mapping[str, str]

    def files(self, case: Case) -> list[str]:
        """Return the files of a case, relative to the folder; the label map first, the preview last."""
        name, form = _below(case), format_of(case.image)
        suffix = form.label_suffix(case.image)
        pictures = [f"{_PREVIEWS}/{name}.png"] if self.options.previews else []
        if not isinstance(self.folder, VolumeFolder):
            return pictures
        label = name if name.endswith(suffix) else name + suffix
        shares = form.probability_files(label, len(self.classes)) if self.options.probabilities else []
        files = [label, *self.objects.files(case, label)]
        return files + [f"{_PROBABILITIES}/{part}" for part in shares] + pictures

    def write(self, case: Case, prediction: Prediction) -> dict[str, Any]:
        """Write the files of a case, and return its entry in the record."""
        classes, files = self.classes, self.files(case)
        if not isinstance(self.folder, VolumeFolder):
            assert prediction.probabilities is not None
            shares = dict(zip(classes, prediction.probabilities.tolist(), strict=True))
            if self.options.previews:
                image = self.folder.load_image(case, "scale")
                write_picture(self.out / files[-1], draw_classified(image, shares))
            return {"class": classes[int(prediction.label)], "probabilities": shares}
        affine = self.folder.affine(case)
        assert prediction.confidence is not None
        segments = self.objects.segments(case, classes, self.borrowed)
        write_label_map(self.out / files[0], case.image, prediction.label, segments)
        self.objects.write(self.out, case, prediction.label, files[0], segments)
        if self.options.probabilities:
            assert prediction.probabilities is not None
            target = self.out / _PROBABILITIES / files[0]
            write_probabilities(target, case.image, prediction.probabilities, segments)
        if self.options.previews:
            image = self.folder.load_image(case, "scale")
            write_picture(self.out / files[-1], draw_label_map(image, prediction.label, classes, affine))
        foreground = foreground_voxels(prediction.label, classes)
        entry: dict[str, Any] = {
            "label_map": files[0],
            "voxels": {classes[0]: prediction.label.numel() - sum(foreground.values()), **foreground},
            "confidence": certainty(prediction.confidence, classes),
        }
        if (volumes := volumes_in_millilitres(foreground, affine)) is not None:
            entry["volume_ml"] = volumes
        return entry


def _below(case: Case) -> str:
    """Return the name of a case as a path below the folder."""
    return os.path.join(*(part for part in PurePath(case.name).parts if part not in (os.sep, "..")))


def certainty(confidence: Tensor, classes: Sequence[str]) -> dict[str, float]:
    """Return the confidence of the predicted classes of a label map.

    The confidence, (K - 1,), is of `medfedaug.functional.soft_dice_confidence.soft_dice_confidence`. The
    classes begin with the background.
    """
    named = zip(classes[1:], confidence.tolist(), strict=True)
    return {name: value for name, value in named if not math.isnan(value)}


def foreground_voxels(label: Tensor, classes: Sequence[str]) -> dict[str, int]:
    """Count the voxels of each class but the background."""
    counts = torch.bincount(label.flatten().int(), minlength=len(classes)).tolist()
    return dict(zip(classes[1:], counts[1:], strict=True))


def volumes_in_millilitres(voxels: Mapping[str, int], affine: Tensor | None) -> dict[str, float] | None:
    """Return the volumes of numbers of voxels; ``None`` without an affine."""
    if affine is None:
        return None
    voxel = abs(float(torch.linalg.det(affine[:3, :3].double()))) / 1000
    return {name: count * voxel for name, count in voxels.items()}
