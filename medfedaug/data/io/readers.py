"""`SimpleITKReader`: MHA, NRRD and DICOM for MONAI."""

from pathlib import Path
from typing import Any

import numpy as np
import SimpleITK as sitk
from monai.data import ImageReader
from monai.utils import MetaKeys, SpaceKeys, ensure_tuple

from medfedaug.data.io.formats import SERIES, is_dicom
from medfedaug.data.io.itk import FORMAT as ITK
from medfedaug.data.io.itk import array_of, ras_affine, read_image


class SimpleITKReader(ImageReader):
    """Reads MHA, NRRD, and DICOM series by a folder or a file, for `monai.transforms.LoadImage`.

    MONAI's `ITKReader` needs the package itk; this one needs SimpleITK. As with MONAI's `NibabelReader` the
    array is indexed (x, y, z) or (x, y, z, channel), and the affine is in RAS.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "image.mha"
        >>> sitk.WriteImage(sitk.GetImageFromArray(np.zeros((3, 4, 5), np.float32)), path)
        >>> from monai.transforms import LoadImage
        >>> image = LoadImage(reader=SimpleITKReader())(path)
        >>> tuple(image.shape), image.affine.diagonal().tolist()
        ((5, 4, 3), [-1.0, -1.0, 1.0, 1.0])
    """

    def verify_suffix(self, filename: Any) -> bool:
        """Return whether files are DICOM, MHA or NRRD."""
        paths = [Path(name) for name in ensure_tuple(filename)]
        return all(path.name.lower().endswith(ITK.suffixes) or is_dicom(path) for path in paths)

    def read(self, data: Any, **kwargs: Any) -> sitk.Image:
        """Read one volume, a DICOM series in the units of its modality.

        Raises:
            ValueError: for a file that SimpleITK cannot read, or a path without one whole DICOM series.
        """
        (name,) = ensure_tuple(data)
        path = Path(name)
        return SERIES.itk_image(path) if is_dicom(path) else read_image(path)

    def get_data(self, img: sitk.Image) -> tuple[np.ndarray, dict[str, Any]]:
        """Return the array and its metadata: affine, spatial shape and channel dimension."""
        array, dimension = array_of(img), img.GetDimension()
        affine = ras_affine(img.GetDirection(), img.GetSpacing(), img.GetOrigin())
        return array, {
            MetaKeys.AFFINE: affine,
            MetaKeys.ORIGINAL_AFFINE: affine.copy(),
            MetaKeys.SPATIAL_SHAPE: np.asarray(array.shape[:3]),
            MetaKeys.SPACE: SpaceKeys.RAS,
            MetaKeys.ORIGINAL_CHANNEL_DIM: -1 if array.ndim > min(dimension, 3) else float("nan"),
        }
