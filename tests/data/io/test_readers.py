"""One volume, written in every format, is the same volume when it is read."""

import json

import nibabel
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk
from written_volumes import AFFINE, SHAPE, itk_image, load_volume, write, write_dicom
from written_volumes import voxels as voxels

from medfedaug.data.io.formats import read_header
from medfedaug.data.sites import check_federation, find_sites, site_statistics
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError

FORMATS = {
    "nifti": "image.nii.gz",
    "plain nifti": "image.nii",
    "mha": "image.mha",
    "compressed mha": "image_small.mha",
    "mhd": "image.mhd",
    "nrrd": "image.nrrd",
    "compressed nrrd": "image_small.nrrd",
    "dicom": "image",
}


@pytest.mark.all_layers
@pytest.mark.parametrize("kind", FORMATS)
def test_voxels_affine_and_header_are_the_same(tmp_path, voxels, kind):
    path = write(tmp_path / FORMATS[kind], voxels)
    image = load_volume(path)
    np.testing.assert_array_equal(image.numpy()[0], voxels)
    header = read_header(path)
    assert (header.shape, header.channels, header.axes) == (SHAPE, 1, "LPS")
    # NIfTI keeps its affine in single precision, DICOM its numbers in 16 characters.
    np.testing.assert_allclose(header.affine, AFFINE, atol=1e-5)


@pytest.mark.all_layers
@pytest.mark.parametrize("kind", ["nifti", "compressed mha", "nrrd", "dicom"])
def test_headers_are_read_without_decoding(tmp_path, voxels, monkeypatch, kind):
    path = write(tmp_path / FORMATS[kind], voxels)

    def decode(*_, **__):
        raise AssertionError("decoded")

    monkeypatch.setattr(sitk, "ReadImage", decode)
    monkeypatch.setattr(nibabel.arrayproxy.ArrayProxy, "__array__", decode)
    assert read_header(path).shape == SHAPE


@pytest.mark.parametrize("kind", ["nifti", "mha", "nrrd"])
def test_channels_come_first(tmp_path, kind):
    voxels = np.random.default_rng(1).normal(size=(*SHAPE, 2)).astype(np.float32)
    path = write(tmp_path / FORMATS[kind], voxels)
    header = read_header(path)
    assert (header.shape, header.channels, header.axes) == (SHAPE, 2, "LPS")
    np.testing.assert_array_equal(load_volume(path).numpy(), np.moveaxis(voxels, -1, 0))


@pytest.mark.all_layers
def test_sites_of_every_format_have_the_same_statistics(tmp_path, voxels):
    label = (voxels > 400).astype(np.uint8)
    for site, image in (("A", "image.nii.gz"), ("B", "image.mha"), ("C", "image.nrrd"), ("D", "image")):
        content = {"labels": {"0": "background", "1": "lesion"}}
        for index, split in enumerate(("training", "validation", "test")):
            write(tmp_path / site / str(index) / image, voxels + np.int16(index))
            target = "label.nrrd" if image == "image" else image.replace("image", "label")
            write(tmp_path / site / str(index) / target, label)
            content[split] = [{"image": f"{index}/{image}", "label": f"{index}/{target}"}]
        (tmp_path / site / "dataset.json").write_text(json.dumps(content))
    sites = find_sites(tmp_path)
    assert check_federation(sites)[:2] == ("segmentation", 1)
    assert len(sites) == 4
    for site in sites:
        assert site_statistics(site) == site_statistics(sites[0])
        image, truth = site.load_case(site.cases["test"][0])
        np.testing.assert_array_equal(image[0], voxels + 2)
        np.testing.assert_array_equal(truth[0], label)
        # Every case's file has the same name, so the folder tells the cases apart.
        assert [case.name for case in site.cases["validation"]] == ["1/image"]


@pytest.mark.parametrize(("suffix", "content"), [(".mha", None), (".nrrd", b"no image at all")])
def test_a_damaged_file_is_one_line(make_site, voxels, suffix, content):
    folder = make_site("Basel")
    path = write(folder / f"images/0{suffix}", voxels)
    path.write_bytes(path.read_bytes()[:-100] if content is None else content)
    listing = folder / "dataset.json"
    listing.write_text(listing.read_text().replace("images/0.nii.gz", f"images/0{suffix}"))
    site = VolumeFolder.open(folder)
    with pytest.raises(DataError) as caught:
        site.load_image(site.cases["training"][0])
    message = str(caught.value)
    assert f"site Basel, {path}: cannot be read as an image" in message
    assert "\n" not in message
    assert "0x" not in message
    assert ".cxx" not in message


@pytest.mark.all_layers
def test_a_series_is_opened_once_until_a_slice_is_replaced(tmp_path, voxels, monkeypatch):
    series = write_dicom(tmp_path / "series", itk_image(voxels))
    opened, read = [], pydicom.dcmread

    def opening(path, **how):
        if how.get("stop_before_pixels"):
            opened.append(path)
        return read(path, **how)

    monkeypatch.setattr(pydicom, "dcmread", opening)
    first = read_header(series)
    assert sorted(opened) == sorted(series.iterdir())
    assert read_header(series) is first
    load_volume(series)
    assert len(opened) == len(set(opened))
    other = write_dicom(tmp_path / "other", itk_image(voxels[:, :-1]))
    slice_ = min(series.iterdir())
    slice_.write_bytes((other / slice_.name).read_bytes())
    with pytest.raises(ValueError, match="its slices differ in size"):
        read_header(series)
    assert opened.count(slice_) == 2
    assert len(opened) == len(set(opened)) + 1


def test_a_label_map_that_lies_the_other_way_is_refused(make_site):
    folder = make_site("Basel")
    image = nibabel.load(folder / "labels/0.nii.gz")
    flipped = nibabel.Nifti1Image(np.asarray(image.dataobj), np.diag([-1, -1, 1, 1]))
    nibabel.save(flipped, folder / "labels/0.nii.gz")
    with pytest.raises(
        DataError, match=r"site Basel, .*labels/0.nii.gz: .* point to LPS, its image's to RAS"
    ):
        VolumeFolder.open(folder).check_files()
    # A header that says nothing of orientation is believed to fit.
    flipped.set_sform(None, 0)
    flipped.set_qform(None, 0)
    nibabel.save(flipped, folder / "labels/0.nii.gz")
    assert VolumeFolder.open(folder).check_files() == 1
