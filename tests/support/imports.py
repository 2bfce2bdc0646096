"""An import as a hospital calls it, with what it said and wrote, for tests of its choices."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from dicom_files import write_slices
from label_objects import write_segmentation

from medfedaug.data.base import SPLITS

SHAPE = (24, 20, 5)
VOXELS = np.random.default_rng(0).integers(-900, 900, SHAPE).astype(np.int16)


def box(*bounds: tuple[int, int], shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """A mask, (X, Y, Z), of a box from the first to before the last index of each axis."""
    mask = np.zeros(shape, np.uint8)
    mask[tuple(slice(*pair) for pair in bounds)] = 1
    return mask


def write_image(folder: Path, patient: str, study: str = "", **more: Any) -> list[Path]:
    """The slices of a study's image."""
    return write_slices(
        folder, VOXELS, study=study, change=lambda header, k: setattr(header, "PatientID", patient), **more
    )


def write_outline(
    path: Path, files: list[Path], mask: Any, date: str, reader: str = "reader 1", **more: Any
) -> Path:
    """A SEG of a reader, of a day and with a description of its series."""

    def change(dataset: Any) -> None:
        dataset.SeriesDescription, dataset.ContentDate, dataset.ContentTime = reader, date, "120000"

    return write_segmentation(path, files, mask, change=change, **more)


@dataclass
class Site:
    """A site's data folder, and the studies that it imports.

    Args:
        run: the command line.
        root: an empty folder.
        source: options that name the archive.
    """

    run: Callable[..., tuple[int, str, str]]
    root: Path
    source: tuple[Any, ...]
    name: str = "site_A"
    said: str = field(default="", init=False)

    @property
    def out(self) -> Path:
        return self.root / "out" / self.name

    @property
    def state(self) -> Path:
        return self.root / "out" / f"{self.name}.state"

    def load(self, patients: list[str], *options: Any, code: int = 0) -> str:
        """Import patients, and return what the command said, in one line."""
        self.root.mkdir(parents=True, exist_ok=True)
        listed = self.root / "studies.csv"
        listed.write_text("PatientID\n" + "\n".join(patients) + "\n")
        status, out, err = self.run("import", *self.source, "--studies", listed, "--out", self.out, *options)
        self.said = " ".join((out + err).split())
        assert status == code, (status, self.said)
        return self.said

    @property
    def entries(self) -> dict[str, Any]:
        """Entries of the site's own list, by patient."""
        content = json.loads((self.state / "studies.json").read_text())["studies"]
        return {entry["PatientID"]: {"case": case, **entry} for case, entry in content.items()}

    @property
    def rows(self) -> dict[str, Any]:
        """Rows of dataset.json, by case."""
        content = json.loads((self.out / "dataset.json").read_text())
        rows = [row for part in SPLITS for row in content[part]]
        return {Path(row["label"]).name.partition(".")[0]: row for row in rows}

    def label(self, patient: str) -> np.ndarray:
        """The label map of a patient's only study."""
        case = self.entries[patient]["case"]
        return np.asarray(nibabel.load(self.out / f"labels/{case}.nii.gz").dataobj)
