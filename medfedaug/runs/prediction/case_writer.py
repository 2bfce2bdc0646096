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
from medfedaug.runs.finished_run import FinishedRun, Origin
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.prediction_image import draw_classified, draw_label_map, write_picture
from medfedaug.runs.prediction.predictions_file import Promise
from medfedaug.tasks import Prediction
from medfedaug.utils.plugins import added_module, added_modules


@dataclass(frozen=True, eq=False)
class SeriesObjects:
    """Writes nothing else; `medfedaug.hospital.dicom.prediction_objects.DicomObjects` does for DICOM.

    ``further`` has the identities of the images' series after the first, by case and channel;
    ``calibration`` is the hash of the calibration that is applied, if any.
    """

    run: FinishedRun
    origin: Origin
    options: PredictionOptions
    folder: SiteFolder
    further: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    calibration: str = ""

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the objects, for the record."""
        return {}

    def check(self, cases: Iterable[Case]) -> None:
        """Check that the objects of these cases can be written."""

    def files(self, case: Case, label: str) -> list[str]:
        """Return the files of a case, given that of its label map."""
        return []

    def segments(
        self, case: Case, classes: tuple[str, ...], notes: Mapping[str, str], controlled: str = ""
    ) -> Segments:
        """Return the classes of a label map, with notes by class, for the format of the image.

        ``controlled`` names the structure of a controlled map.
        """
        return Segments(classes)

    def write(
        self, out: Path, case: Case, label: Tensor, file: str, segments: Segments, comment: str = ""
    ) -> None:
        """Write the objects of a case to a folder, given its label map, (1, X, Y, Z), and the map's file."""


def series_objects(
    run: FinishedRun,
    origin: Origin,
    options: PredictionOptions,
    folder: SiteFolder,
    further: Mapping[str, Mapping[str, str]],
    calibration: str = "",
) -> SeriesObjects:
    """Return what writes objects of series in this installation; see `SeriesObjects`."""
    asked = {"--rtstruct": options.rtstruct, "--report": options.report}
    for option in (option for option, value in asked.items() if value):
        added_module("dicom.prediction_objects", option)
    modules = added_modules("dicom.prediction_objects")
    make = modules[0].DicomObjects if modules else SeriesObjects
    objects: SeriesObjects = make(run, origin, options, folder, further, calibration)
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
    promise: Promise | None = None

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
        files += self.promise.files(label, self.classes).values() if self.promise else []
        return files + [f"{_PROBABILITIES}/{part}" for part in shares] + pictures

    def write(self, case: Case, prediction: Prediction, *, promised: bool = False) -> dict[str, Any]:
        """Write the files of a case, and return its entry in the record.

        A case that is not ``promised`` gets neither controlled maps nor a set of classes.
        """
        classes, files = self.classes, self.files(case)
        if not isinstance(self.folder, VolumeFolder):
            assert prediction.probabilities is not None
            shares = dict(zip(classes, prediction.probabilities.tolist(), strict=True))
            if self.options.previews:
                image = self.folder.load_image(case, "scale")
                write_picture(self.out / files[-1], draw_classified(image, shares))
            entry: dict[str, Any] = {"class": classes[int(prediction.label)], "probabilities": shares}
            for threshold in self.promise.thresholds.values() if self.promise and promised else ():
                entry["set"] = [name for name, share in shares.items() if share >= threshold]
            return entry
        affine = self.folder.affine(case)
        assert prediction.confidence is not None
        segments = self.objects.segments(case, classes, self.borrowed)
        write_label_map(self.out / files[0], case.image, prediction.label, segments)
        controlled = self._write_controlled(case, prediction, files[0], affine, promised=promised)
        comment = self.promise.comment(controlled) if self.promise else ""
        self.objects.write(self.out, case, prediction.label, files[0], segments, comment)
        if self.options.probabilities:
            assert prediction.probabilities is not None
            target = self.out / _PROBABILITIES / files[0]
            write_probabilities(target, case.image, prediction.probabilities, segments)
        if self.options.previews:
            image = self.folder.load_image(case, "scale")
            write_picture(self.out / files[-1], draw_label_map(image, prediction.label, classes, affine))
        foreground = foreground_voxels(prediction.label, classes)
        entry = {
            "label_map": files[0],
            "voxels": {classes[0]: prediction.label.numel() - sum(foreground.values()), **foreground},
            "confidence": certainty(prediction.confidence, classes),
        }
        if (volumes := volumes_in_millilitres(foreground, affine)) is not None:
            entry["volume_ml"] = volumes
        return entry | ({"controlled": controlled} if controlled else {})

    def _write_controlled(
        self, case: Case, prediction: Prediction, label: str, affine: Any, *, promised: bool
    ) -> dict[str, Any]:
        """Write the map of each structure with a promise, or remove those of an earlier image."""
        entries = {}
        for name, file in self.promise.files(label, self.classes).items() if self.promise else ():
            if not promised:
                (self.out / file).unlink(missing_ok=True)
                continue
            assert self.promise is not None
            assert prediction.probabilities is not None
            number = self.classes.index(name)
            inside = prediction.probabilities[number] >= self.promise.thresholds[name]
            segments = self.objects.segments(case, self.classes, self.promise.sentences, name)
            write_label_map(self.out / file, case.image, inside[None].long() * number, segments)
            voxels = {name: int(inside.sum())}
            volumes = volumes_in_millilitres(voxels, affine) or {}
            more = {"volume_ml": volumes[name]} if volumes else {}
            entries[name] = {"file": file, "voxels": voxels[name], **more}
        return entries


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
