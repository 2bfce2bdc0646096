"""`CaseWriter`: the files of a predicted case, and its entry in the record."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.io.formats import format_of
from medfedaug.data.io.label_maps import write_label_map, write_probabilities
from medfedaug.data.volumes import VolumeFolder
from medfedaug.runs.prediction.case_quality import certainty, foreground_voxels, volumes_in_millilitres
from medfedaug.runs.prediction.options import PredictionOptions
from medfedaug.runs.prediction.prediction_image import draw_classified, draw_label_map, write_picture
from medfedaug.runs.prediction.series_objects import SeriesObjects
from medfedaug.tasks import Prediction

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
