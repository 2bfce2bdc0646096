"""`CaseWriter`: the files of a predicted case, and its entry in the record."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.io.formats import format_of
from medfedaug.data.io.label_maps import write_label_map, write_map, write_probabilities
from medfedaug.data.volumes import VolumeFolder
from medfedaug.runs.prediction.case_quality import case_quality
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.pass_agreement import PassAgreement
from medfedaug.runs.prediction.prediction_image import draw_classified, draw_label_map, write_picture
from medfedaug.runs.prediction.series_objects import SeriesObjects
from medfedaug.runs.prediction.training_range import volumes_in_millilitres
from medfedaug.tasks import Prediction

_PROBABILITIES, _PREVIEWS, _UNCERTAINTY = "probabilities", "previews", "uncertainty"


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
        files = [*form.parts(label), *self.objects.files(case, label)]
        files += [f"{_PROBABILITIES}/{part}" for part in shares]
        return files + ([_map_file(name)] if self.options.uncertainty_map else []) + pictures

    def write(self, case: Case, prediction: Prediction, passes: PassAgreement | None) -> dict[str, Any]:
        """Write the files of a case, and return its entry in the record."""
        classes, files = self.classes, self.files(case)
        if not isinstance(self.folder, VolumeFolder):
            assert prediction.probabilities is not None
            shares = dict(zip(classes, prediction.probabilities.tolist(), strict=True))
            if self.options.previews:
                _picture(self.out / files[-1], draw_classified(self.folder.load_image(case, "scale"), shares))
            return {"class": classes[int(prediction.label)], "probabilities": shares}
        affine = self.folder.affine(case)
        assert prediction.confidence is not None
        quality = case_quality(prediction.label, prediction.confidence, classes, passes)
        segments = self.objects.segments(case, classes, self.borrowed)
        write_label_map(self.out / files[0], case.image, prediction.label, segments)
        self.objects.write(self.out, case, prediction.label, files[0], segments, quality)
        if self.options.probabilities:
            assert prediction.probabilities is not None
            target = self.out / _PROBABILITIES / files[0]
            write_probabilities(target, case.image, prediction.probabilities, segments)
        if self.options.previews:
            image = self.folder.load_image(case, "scale")
            _picture(self.out / files[-1], draw_label_map(image, prediction.label, classes, affine))
        counts = torch.bincount(prediction.label.flatten(), minlength=len(classes)).tolist()
        voxels = dict(zip(classes, counts, strict=True))
        entry: dict[str, Any] = {"label_map": files[0], "voxels": voxels, **quality}
        foreground = {name: voxels[name] for name in classes[1:]}
        if (volumes := volumes_in_millilitres(foreground, affine)) is not None:
            entry["volume_ml"] = volumes
        if passes is not None:
            entry |= self._write_passes(case, passes, affine)
        return entry

    def _write_passes(self, case: Case, passes: PassAgreement, affine: Tensor | None) -> dict[str, Any]:
        """Write the uncertainty map, and return the range of the sizes over the passes."""
        classes = self.classes[1:]
        ends = [dict(zip(classes, counts, strict=True)) for counts in passes.voxels().tolist()]
        lowest, highest = [volumes_in_millilitres(counts, affine) or counts for counts in ends]
        kind = "voxels_of_passes" if affine is None else "volume_ml_of_passes"
        sizes = {name: [lowest[name], highest[name]] for name in classes}
        entry: dict[str, Any] = {"passes": passes.count, kind: sizes}
        if self.options.uncertainty_map:
            entry["uncertainty_map"] = _map_file(_below(case))
            write_map(self.out / entry["uncertainty_map"], case.image, passes.deviation())
        return entry


def _below(case: Case) -> str:
    """Return the name of a case as a path below the folder."""
    return os.path.join(*(part for part in PurePath(case.name).parts if part not in (os.sep, "..")))


def _map_file(name: str) -> str:
    return f"{_UNCERTAINTY}/{name.removesuffix('.nii.gz')}.nii.gz"


def _picture(path: Path, figure: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_picture(path, figure)
