"""DICOM: a folder with one series, or a file of the series; label maps are DICOM SEG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from medfedaug.data.io.base import Header, ImageFormat, channels_first, volume_header

if TYPE_CHECKING:
    from medfedaug.hospital.dicom.segmentation import Segments


class Dicom(ImageFormat):
    """DICOM series, whose folders and files have any name: every path of no other format."""

    title = "DICOM"

    def read_header(self, path: Path) -> Header:
        from medfedaug.hospital.dicom.series import open_series

        series = open_series(path)
        channels = () if series.channels == 1 else (series.channels,)
        return volume_header((*series.shape, *channels), series.affine)

    def read_volume(self, path: Path) -> np.ndarray:
        """Read the voxels of a series in the units of its modality."""
        from medfedaug.hospital.dicom.pixels import read_slices
        from medfedaug.hospital.dicom.series import open_series

        return channels_first(read_slices(open_series(path).slices).swapaxes(0, 2))

    def voxel_files(self, path: Path) -> list[Path]:
        """Return the files of the series; of a folder that holds no whole series, all files."""
        from medfedaug.hospital.dicom.series import files_of_series

        return files_of_series(path)

    def label_suffix(self, image: Path) -> str:
        """Return the suffix of a DICOM SEG."""
        return ".dcm"

    def write_label_map(self, path: Path, image: Path, voxels: np.ndarray, segments: Segments) -> None:
        """Write a DICOM SEG that refers to the slices of the series."""
        from medfedaug.hospital.dicom.segmentation import write_segmentation

        write_segmentation(path, image, voxels, segments)


FORMAT = Dicom()
