"""DICOM: a folder with one series, or a file of the series; label maps are DICOM SEG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from medfedaug.data.io.base import (
    Header,
    Scan,
    Segments,
    Selection,
    Series,
    SeriesFormat,
    Skip,
    channels_first,
    volume_header,
)

if TYPE_CHECKING:
    from medfedaug.hospital.dicom.volumes import DicomSeries


class Dicom(SeriesFormat):
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
        from medfedaug.hospital.dicom import segmentation

        assert isinstance(segments, segmentation.Segments)
        segmentation.write_segmentation(path, image, voxels, segments)

    def recognises(self, file: Path) -> bool:
        """Return whether a file begins like a DICOM file."""
        from medfedaug.hospital.dicom.headers import is_dicom_file

        return is_dicom_file(file)

    def scan(
        self, root: Path, skip: Skip = lambda folder: None, take: Callable[[Path], bool] = lambda file: False
    ) -> Scan[DicomSeries]:
        """Group files into volumes by their headers."""
        from medfedaug.hospital.dicom.series import scan

        return scan(root, skip=skip, take=take)

    def select(self, series: Sequence[Series], pattern: str | None = None) -> Selection[DicomSeries]:
        """Choose series; see `medfedaug.hospital.dicom.series.select`."""
        from medfedaug.hospital.dicom.series import select

        return select(cast("Sequence[DicomSeries]", series), pattern)

    def place(self, series: Series, others: Sequence[Series]) -> Path | None:
        """Return the path by which a series is read."""
        from medfedaug.hospital.dicom.series import place_of_series

        return place_of_series(cast("DicomSeries", series), cast("Sequence[DicomSeries]", others))

    def remarks(self, path: Path) -> list[str]:
        """Return sentences about the geometry and the values of a series."""
        from medfedaug.hospital.dicom.series import open_series

        return list(open_series(path).remarks)


FORMAT = Dicom()
