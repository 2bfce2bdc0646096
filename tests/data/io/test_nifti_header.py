"""NIfTI files whose checksum or header contradicts their voxels are refused in one line."""

import gzip
import json
import shutil
import struct
import zlib

import nibabel
import numpy as np
import pytest
from running import TINY_OPTIONS

from medfedaug.data.sites import open_site
from medfedaug.errors import DataError

OPTIONS = ("--methods", "fedavg", "--rounds", 1, "--limit", 1, "--engine", "inprocess", "--no-report")
NETWORK = TINY_OPTIONS


@pytest.fixture
def data(phantom_dir, tmp_path):
    return shutil.copytree(phantom_dir, tmp_path / "data")


def image(data):
    """An image that is used in training."""
    listed = json.loads((data / "site_A/dataset.json").read_text())["training"][0]["image"]
    return data / "site_A" / listed


def other_voxels(path):
    """Voxels and checksum of two different files, of one length."""
    content = bytearray(gzip.decompress(path.read_bytes()))
    right = struct.pack("<I", zlib.crc32(bytes(content)))
    content[-100:-50] = bytes(50)
    made = bytearray(gzip.compress(bytes(content)))
    made[-8:-4] = right
    path.write_bytes(bytes(made))


def affine(matrix):
    def spoil(path):
        voxels = np.asarray(nibabel.load(path).dataobj)
        nibabel.save(nibabel.Nifti1Image(voxels, np.array(matrix, float)), path)

    return spoil


REFUSED = {
    "a checksum of other voxels": (other_voxels, "CRC check failed"),
    "voxels of 10 km": (affine(np.diag([1e7, 1, 1, 1])), "voxels of 1e+07 x 1 x 1 mm"),
    "a singular place": (affine([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]), "singular"),
}


def read(data):
    """Check the site and read its first case, as training does."""
    site = open_site(data / "site_A")
    site.check_files()
    site.load_case(site.cases["training"][0])


@pytest.mark.parametrize("fault", REFUSED)
def test_a_file_that_contradicts_its_voxels_is_refused_in_one_line(data, fault):
    spoil, words = REFUSED[fault]
    path = image(data)
    spoil(path)
    with pytest.raises(DataError) as caught:
        read(data)
    assert path.name in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_compressed_behind_compressed_voxels_is_refused(run, data, tmp_path):
    path = image(data)
    path.write_bytes(path.read_bytes() + b"more")
    err = run.refused("simulate", "--data", data, *OPTIONS, *NETWORK, "--out", tmp_path / "out")
    output = " ".join(err.split())
    assert f"{path.name}: cannot be read as an image (Not a gzipped file" in output
    assert not (tmp_path / "out").exists()
