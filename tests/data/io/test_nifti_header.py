"""NIfTI files whose checksum or header contradicts their voxels: one line, refused or warned."""

import gzip
import json
import shutil
import struct
import warnings
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


def rewritten(change):
    """A change of the file's bytes before compression."""

    def spoil(path):
        content = bytearray(gzip.decompress(path.read_bytes()))
        change(content)
        path.write_bytes(gzip.compress(bytes(content)))

    return spoil


def field(offset, form, *values):
    return rewritten(lambda content: struct.pack_into(form, content, offset, *values))


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
    "a checksum of other voxels": (other_voxels, "damaged: CRC check failed"),
    "bitpix of another datatype": (field(72, "<h", 64), "64 bits a voxel (bitpix)"),
    "bitpix 0": (field(72, "<h", 0), "0 bits a voxel (bitpix)"),
    "slope 1e30": (field(112, "<f", 1e30), "scales intensities by scl_slope 1e+30"),
    "slope 1e-30": (field(112, "<f", 1e-30), "scales intensities by scl_slope 1e-30"),
    "slope infinite": (field(112, "<f", float("inf")), "scales intensities by scl_slope inf"),
    "intercept 1e30": (field(116, "<f", 1e30), "scales intensities by scl_inter 1e+30"),
    "voxels of 10 km": (affine(np.diag([1e7, 1, 1, 1])), "voxels of 1e+07 x 1 x 1 mm"),
    "a singular place": (affine([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]), "singular"),
}

WARNED = {
    "pixdim 0": (field(80, "<f", 0.0), "contradicts itself: voxels of 0 x"),
    "pixdim NaN": (field(80, "<f", float("nan")), "contradicts itself: voxels of nan x"),
    "pixdim 1e9": (field(80, "<f", 1e9), "contradicts itself: voxels of 1e+09 x"),
    "a sheared grid": (
        affine([[1, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]),
        "its axes are not at right angles (63 degrees)",
    ),
}


def read(data):
    """Check the site and read its first case, as training does; return the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        site = open_site(data / "site_A")
        site.check_files()
        site.load_case(site.cases["training"][0])
    return [str(one.message) for one in said]


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


@pytest.mark.parametrize("fault", WARNED)
def test_a_header_that_contradicts_itself_is_warned_of_once(data, fault):
    spoil, words = WARNED[fault]
    path = image(data)
    spoil(path)
    if fault == "a sheared grid":
        spoil(path.parent.parent / "labels" / path.name)
        words = f"images/{path.name}: {words}"
    assert sum(words in one for one in read(data)) == 1


def plain(content):
    return content


def two_streams(content):
    """What `cat a.nii.gz b.gz` writes: each stream has an end of its own."""
    return gzip.compress(content[:-4096]) + gzip.compress(content[-4096:])


@pytest.mark.parametrize(
    ("suffix", "stored"),
    [(".nii", plain), (".nii.gz", gzip.compress), (".nii.gz", two_streams)],
    ids=["plain", "compressed", "two streams"],
)
def test_more_bytes_than_voxels_are_told(data, suffix, stored):
    path = image(data)
    content = gzip.decompress(path.read_bytes()) + bytes(4096)
    path.unlink()
    changed = path.with_name(path.name.replace(".nii.gz", suffix))
    changed.write_bytes(stored(content))
    listing = data / "site_A/dataset.json"
    listing.write_text(listing.read_text().replace(f"images/{path.name}", f"images/{changed.name}"))
    words = f"{changed.name}: has 4096 bytes more than the 32 x 32 x 6 voxels of its header"
    assert sum(words in one for one in read(data)) == 1


def test_what_is_not_compressed_behind_compressed_voxels_is_refused(run, data, tmp_path):
    path = image(data)
    path.write_bytes(path.read_bytes() + b"more")
    err = run.refused("simulate", "--data", data, *OPTIONS, *NETWORK, "--out", tmp_path / "out")
    output = " ".join(err.split())
    assert f"{path.name}: cannot be read as an image (damaged: " in output
    assert not (tmp_path / "out").exists()
