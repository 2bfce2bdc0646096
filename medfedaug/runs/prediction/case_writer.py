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
from medfedaug.runs.prediction.promise import Promise
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
        assert self.promise or not controlled
        comment = "; ".join(
            f"controlled map of {name}, {entry.get('volume_ml', entry['voxels']):.4g} "
            f"{'ml' if 'volume_ml' in entry else 'voxels'}: {self.promise.sentences[name]}"
            for name, entry in controlled.items()
        )
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
