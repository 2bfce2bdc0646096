"""Label maps of a DICOM series by a MONAI Bundle, with MONAI and pydicom alone.

`medfedaug.runs.bundle.deploy` copies this file into a MONAI application, where medfedaug is not installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.bundle import ConfigParser
from pydicom import Dataset


@cache
def _workflow(bundle: Path) -> dict[str, Any]:
    parser = ConfigParser()
    parser.read_meta(str(bundle / "configs/metadata.json"))
    parser.read_config(str(bundle / "configs/inference.json"))
    parser["bundle_root"] = str(bundle)
    steps = parser["postprocessing"]["transforms"]
    parser["postprocessing"]["transforms"] = [step for step in steps if step["_target_"] != "SaveImaged"]
    names = ("network", "initialize", "preprocessing", "inferer", "postprocessing", "device")
    parts = {name: parser.get_parsed_content(name) for name in names}
    weights = torch.load(bundle / "models/model.pt", map_location=parts["device"], weights_only=True)
    parts["network"].load_state_dict(weights)
    parts["network"].eval()
    return parts


@torch.no_grad()
def label_slices(bundle: Path, series: Sequence[Dataset]) -> np.ndarray:
    """Predict a series with the Bundle's steps.

    Returns:
        The class of each pixel, (slices, rows, columns), in the order of ``series``.
    """
    steps = _workflow(bundle)
    with tempfile.TemporaryDirectory() as folder:
        for number, slice_ in enumerate(series):
            slice_.save_as(Path(folder) / f"{number:06d}.dcm", enforce_file_format=True)
        data = steps["preprocessing"]({"image": folder})
    image = data["image"]
    data["pred"] = steps["inferer"](image[None].to(steps["device"]), steps["network"])[0].cpu()
    label = steps["postprocessing"](data)["pred"]
    voxels = np.asarray(label[0]).astype(np.uint16 if int(label.max()) > 255 else np.uint8)
    affine = np.asarray(label.affine, dtype=float)
    return np.stack([_on_slice(voxels, affine, slice_) for slice_ in series])


def _on_slice(voxels: np.ndarray, affine: np.ndarray, slice_: Dataset) -> np.ndarray:
    """Return the labels at the pixels of a slice, wherever a reader put it in the volume."""
    along_row, along_column = np.reshape(np.array(slice_.ImageOrientationPatient, float), (2, 3))
    down, across = map(float, slice_.PixelSpacing)
    rows, columns = np.meshgrid(np.arange(slice_.Rows), np.arange(slice_.Columns), indexing="ij")
    lps = np.array(slice_.ImagePositionPatient, float)
    lps = lps + rows[..., None] * along_column * down + columns[..., None] * along_row * across
    ras = np.concatenate([lps * (-1, -1, 1), np.ones((*rows.shape, 1))], axis=-1)
    cells = np.rint(ras @ np.linalg.inv(affine).T)[..., :3].astype(int)
    if (cells < 0).any() or (cells >= voxels.shape).any():
        raise ValueError("a slice lies outside of the volume that was read of the series")
    labels: np.ndarray = voxels[tuple(np.moveaxis(cells, -1, 0))]
    return labels
