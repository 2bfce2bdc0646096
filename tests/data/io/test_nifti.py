"""Files of the same image have the same bytes, whenever and under whatever name they are written."""

import gzip

import nibabel
import numpy as np
import pytest

from medfedaug.data.io.base import save_nifti
from medfedaug.data.io.formats import format_of
from medfedaug.hospital.pacs.volume import write_nifti


def test_bytes_of_a_file_follow_from_the_image_alone(tmp_path, monkeypatch):
    voxels, affine = np.arange(60, dtype=np.float32).reshape(3, 4, 5), np.diag([1.0, 2.0, 3.0, 1.0])
    image = tmp_path / "image.nii.gz"
    save_nifti(nibabel.Nifti1Image(voxels, affine), image)
    contents = []
    for clock in (1e9, 1.1e9):
        monkeypatch.setattr(gzip.time, "time", lambda clock=clock: clock)
        maps, volume = tmp_path / f"map {clock:g}.nii.gz", tmp_path / f"volume {clock:g}.nii.gz"
        format_of(image).write_label_map(maps, image, (voxels > 9).astype(np.uint8), None)
        write_nifti(volume, voxels, affine)
        contents.append((maps.read_bytes(), volume.read_bytes()))
    assert contents[0] == contents[1]
    assert np.array_equal(nibabel.load(volume).get_fdata(), voxels)


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.NII.GZ"])
def test_an_image_is_saved_under_any_name(tmp_path, name):
    voxels = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    save_nifti(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / name)
    assert np.array_equal(nibabel.load(tmp_path / name).get_fdata(), voxels)
