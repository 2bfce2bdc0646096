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
    """Lowest and highest values of a class over a site's training cases, which never leave the site.

    The lowest value is 0 if some training case has no voxel of the class. Cases where the class is not
    annotated, or with unknown voxels, do not count. A class that no case shows in full has no range.

    ``shown`` has the number of cases that show a class in full. Volumes are in ml, and empty where the voxel
    size of some file is unknown; shares are of the voxels of an image, and components are connected pieces.
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
        """Read the label maps of an open site's training cases."""
        cases, names = folder.cases["training"], tuple(classes[1:])
        rows: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in _KINDS}
        measured = True
        for number, case in enumerate(cases):
            on_event({"event": "reading", "case": case.name, "number": number, "of": len(cases)})
            label, shown = folder.load_shown(case)
            counts = torch.bincount(label.flatten().int(), minlength=len(classes))[1:].tolist()
            voxels = dict(zip(names, counts, strict=True))
            volumes = volumes_in_millilitres(voxels, folder.affine(case))
            measured &= volumes is not None
            sizes = {
                "volume_ml": volumes or dict.fromkeys(names, 0.0),
                "share": {name: count / label.numel() for name, count in voxels.items()},
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

        Numbers of pieces are recorded, but cause no warning: nearly all predictions have more than any label
        map (`benchmarks/look_first.py`).
        """
        total = sum(entry["voxels"].values())
        shares = {name: count / total for name, count in entry["voxels"].items()}
        in_ml = bool(self.volume_ml) and "volume_ml" in entry
        sizes, ranges = (entry["volume_ml"], self.volume_ml) if in_ml else (shares, self.share)
        form, unit = (".3g", "ml") if in_ml else (".2%", "of the image")
        warnings = []
        for name, (low, high) in ranges.items():
            size, cases = sizes[name], f"{self.shown[name]} training cases"
            if not size and low > 0:
                warnings.append(f"nothing of {name} is found, and each of {cases} has some")
            elif size and not low <= size <= high:
                usual = f"{low:{form}} to {high:{form}} in {cases}"
                warnings.append(f"{name} has {size:{form}} {unit}, and {usual}")
        return warnings

    @classmethod
    def of_record(cls, content: Mapping[str, Any]) -> TrainingRange:
        """Return the ranges of `record`."""
        kinds: dict[str, dict[str, tuple[float, float]]] = {kind: {} for kind in _KINDS}
        for name, entry in content["classes"].items():
            for kind in _KINDS & entry.keys():
                kinds[kind][name] = tuple(entry[kind])
        known = {name: entry for name, entry in content["classes"].items() if "share" in entry}
        shown = {name: entry.get("cases", content["cases"]) for name, entry in known.items()}
        return cls(content["cases"], tuple(content["classes"]), shown, **kinds)

    def record(self) -> dict[str, Any]:
        """Return the ranges by class, for ``predictions.json``; empty for an `unknown` class."""
        by_class: dict[str, dict[str, Any]] = {name: {} for name in self.classes}
        for name, cases in self.shown.items():
            ranges = {kind: getattr(self, kind).get(name) for kind in _KINDS}
            by_class[name] = {"cases": cases, **{kind: list(r) for kind, r in ranges.items() if r}}
        return {"cases": self.cases, "classes": by_class}


def volumes_in_millilitres(voxels: Mapping[str, int], affine: Tensor | None) -> dict[str, float] | None:
    """Return the volumes of numbers of voxels; ``None`` without an affine."""
    if affine is None:
        return None
    voxel = abs(float(torch.linalg.det(affine[:3, :3].double()))) / 1000
    return {name: count * voxel for name, count in voxels.items()}
