"""`TrainingRange`: sizes in the label maps of a site's training cases."""

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


@dataclass(frozen=True)
class TrainingRange:
    """Smallest and largest size of a class over a site's training cases, which never leave the site.

    The smallest size is 0 if some training case has no voxel of the class. Cases where the class is not
    annotated, or with unknown voxels, do not count. A class that no case shows in full has no range.

    ``shown`` has the number of cases that show a class in full. ``kind`` is ``"volume_ml"``, or ``"share"``
    of the voxels of an image where the voxel size of some file is unknown.
    """

    cases: int
    classes: tuple[str, ...]
    shown: Mapping[str, int]
    kind: str
    sizes: Mapping[str, tuple[float, float]]

    @classmethod
    def of_site(
        cls, data: str | Path, site: str, run: FinishedRun, on_event: Callable[[dict[str, Any]], object]
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
        by_kind: dict[str, dict[str, list[float]]] = {
            kind: {name: [] for name in names} for kind in ("volume_ml", "share")
        }
        measured = True
        for number, case in enumerate(cases):
            on_event({"event": "reading", "case": case.name, "number": number, "of": len(cases)})
            label, shown = folder.load_shown(case)
            voxels = foreground_voxels(label, classes)
            volumes = volumes_in_millilitres(voxels, folder.affine(case))
            measured &= volumes is not None
            for name in shown:
                by_kind["volume_ml"][name].append((volumes or voxels)[name])
                by_kind["share"][name].append(voxels[name] / label.numel())
        kind = "volume_ml" if measured else "share"
        known = {name: values for name, values in by_kind[kind].items() if values}
        shown_in = {name: len(values) for name, values in known.items()}
        ranges = {name: (min(values), max(values)) for name, values in known.items()}
        return cls(len(cases), names, shown_in, kind, ranges)

    @property
    def unknown(self) -> list[str]:
        """The classes that no training case shows in full."""
        return [name for name in self.classes if name not in self.shown]

    def warnings(self, entry: Mapping[str, Any]) -> list[str]:
        """Describe sizes of a predicted label map that no training case has."""
        total = sum(entry["voxels"].values())
        shares = {name: count / total for name, count in entry["voxels"].items()}
        form, unit = (".3g", "ml") if self.kind == "volume_ml" else (".2%", "of the image")
        found = {"share": shares, **entry}.get(self.kind, {})  # a file may not say how large its voxels are
        warnings = []
        for name, (low, high) in self.sizes.items() if found else ():
            size, cases = found[name], f"{self.shown[name]} training cases"
            if not size and low > 0:
                warnings.append(f"nothing of {name} is found, and each of {cases} has some")
            elif size and not low <= size <= high:
                usual = f"{low:{form}} to {high:{form}} in {cases}"
                warnings.append(f"{name} has {size:{form}} {unit}, and {usual}")
        return warnings

    def record(self) -> dict[str, Any]:
        """Return the ranges by class, for ``predictions.json``; empty for an `unknown` class."""
        by_class = {
            name: {"cases": self.shown[name], self.kind: [*self.sizes[name]]} if name in self.shown else {}
            for name in self.classes
        }
        return {"cases": self.cases, "classes": by_class}


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
