"""`TrainingRange`: sizes and numbers of pieces in the label maps of a site's training cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError
from medfedaug.federation.site.data_folder import open_own_data
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.runs.prediction.case_quality import count_components

_KINDS = frozenset({"volume_ml", "share", "components"})


@dataclass(frozen=True)
class TrainingRange:
    """Lowest and highest values of a class over a site's training cases; nothing of it leaves the site.

    A class has the lowest 0 where some training case has nothing of it. A case that has not annotated it, or
    has unknown voxels, says nothing of it. A class that no case shows in full has no range: that of other
    sites is of their scanners, and they keep it.

    Args:
        cases: number of the training cases.
        classes: of the run, without the background.
        shown: by class, the number of cases that show it in full, where there are any.
        volume_ml: by class, ml; empty where some file does not say how large its voxels are.
        share: by class, of the voxels of an image.
        components: by class, the number of connected pieces.
    """

    cases: int
    classes: tuple[str, ...]
    shown: Mapping[str, int]
    volume_ml: Mapping[str, tuple[float, float]]
    share: Mapping[str, tuple[float, float]]
    components: Mapping[str, tuple[float, float]]

    @classmethod
    def of_site(
        cls,
        data: str | Path,
        site: str,
        run: FinishedRun,
        on_event: Callable[[dict[str, Any]], object] = lambda event: None,
    ) -> TrainingRange:
        """Read the label maps of a site's training cases."""
        folder = open_own_data(site or Path(data).resolve().name, run.config, data)
        run.composition.task().check_site(folder)
        assert isinstance(folder, VolumeFolder)
        if not folder.cases["training"]:
            raise ConfigError(f"--data {data}: lists no training case; leave it out")
        return cls.of_folder(folder, run.config.classes, on_event)

    @classmethod
    def of_folder(
        cls,
        folder: VolumeFolder,
        classes: Sequence[str],
        on_event: Callable[[dict[str, Any]], object] = lambda event: None,
    ) -> TrainingRange:
        """Read the label maps of an open site, see `of_site`."""
        cases, names = folder.cases["training"], tuple(classes[1:])
        rows: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in _KINDS}
        measured = True
        for number, case in enumerate(cases):
            on_event({"event": "reading", "case": case.name, "number": number, "of": len(cases)})
            label, shown = folder.load_shown(case)
            counts = torch.bincount(label.flatten().int(), minlength=len(classes))[1:].tolist()
            found = dict(zip(names, counts, strict=True))
            volumes = volumes_in_millilitres(found, folder.affine(case))
            measured &= volumes is not None
            sizes = {
                "volume_ml": volumes or dict.fromkeys(names, 0.0),
                "share": {name: count / label.numel() for name, count in found.items()},
                "components": count_components(label, classes),
            }
            for kind, values in sizes.items():
                for name in shown:
                    rows[kind][name].append(values[name])
        ranges = {
            kind: {name: (min(values), max(values)) for name, values in by_class.items() if values}
            for kind, by_class in rows.items()
        }
        known = {name: len(values) for name, values in rows["share"].items() if values}
        return cls(len(cases), names, known, **{**ranges, **({} if measured else {"volume_ml": {}})})

    @property
    def unknown(self) -> list[str]:
        """The classes that no training case shows in full."""
        return [name for name in self.classes if name not in self.shown]

    def warnings(self, entry: Mapping[str, Any]) -> list[str]:
        """Describe sizes of a predicted label map that no training case has.

        Numbers of pieces are recorded, and no reason for a warning: nearly all predictions have more than any
        label map (`benchmarks/look_first.py`).
        """
        total = sum(entry["voxels"].values())
        shares = {name: count / total for name, count in entry["voxels"].items()}
        in_ml = bool(self.volume_ml) and "volume_ml" in entry
        sizes, size_range = (entry["volume_ml"], self.volume_ml) if in_ml else (shares, self.share)
        form, unit = (".3g", "ml") if in_ml else (".2%", "of the image")
        told = []
        for name, (low, high) in size_range.items():
            size = sizes[name]
            if not size and low > 0:
                told.append(
                    f"nothing of {name} is found, and each of {self.shown[name]} training cases has some"
                )
            elif size and not low <= size <= high:
                usual = f"{low:{form}} to {high:{form}} in {self.shown[name]} training cases"
                told.append(f"{name} has {size:{form}} {unit}, and {usual}")
        return told

    @classmethod
    def of_record(cls, content: Mapping[str, Any]) -> TrainingRange:
        """Return the ranges of `record`."""
        kinds: dict[str, dict[str, tuple[float, float]]] = {kind: {} for kind in _KINDS}
        for name, entry in content["classes"].items():
            for kind in _KINDS & entry.keys():
                kinds[kind][name] = tuple(entry[kind])
        shown = {
            name: entry.get("cases", content["cases"])
            for name, entry in content["classes"].items()
            if "share" in entry
        }
        return cls(content["cases"], tuple(content["classes"]), shown, **kinds)

    def record(self) -> dict[str, Any]:
        """Return the ranges by class, for ``predictions.json``; empty of a class that is `unknown`."""
        kinds = {kind: getattr(self, kind) for kind in _KINDS}
        by_class = {
            name: {"cases": self.shown[name]}
            | {kind: list(ranges[name]) for kind, ranges in kinds.items() if ranges}
            if name in self.shown
            else {}
            for name in self.classes
        }
        return {"cases": self.cases, "classes": by_class}


def volumes_in_millilitres(voxels: Mapping[str, int], affine: Tensor | None) -> dict[str, float] | None:
    """Return volumes of numbers of voxels."""
    if affine is None:
        return None
    voxel = abs(float(torch.linalg.det(affine[:3, :3].double()))) / 1000
    return {name: count * voxel for name, count in voxels.items()}
