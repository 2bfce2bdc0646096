"""Photographs with label images as cases of a segmentation: their kinds, and whole runs over them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from running import TINY_OPTIONS

from medfedaug.data.io.photographs import FORMAT
from medfedaug.data.sites import find_sites
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.research.comparison.report_images import case_picture, extreme_cases
from medfedaug.simulate import configure

GREY = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)  # 5 rows, 7 columns
COLOUR = np.random.default_rng(1).integers(0, 256, (5, 7, 3), dtype=np.uint8)
OPAQUE = np.full((5, 7, 1), 255, np.uint8)
CLASSES = np.random.default_rng(2).integers(0, 3, (5, 7), dtype=np.uint8)
TURNED = 274  # the EXIF tag Orientation


def palette(indices, colours):
    image = Image.fromarray(indices, "P")
    image.putpalette(np.asarray(colours, np.uint8).flatten().tolist())
    return image


def xy(pixels):
    """(Y, X) or (Y, X, C) as (C, X, Y, 1)."""
    planes = np.asarray(pixels, np.float32).reshape(*pixels.shape[:2], -1)
    return np.stack([planes[..., c].T for c in range(planes.shape[-1])])[..., None]


COLOURS = [[200, 10, 10], [0, 250, 3], [9, 9, 90]]
IMAGES = {
    "grey": (Image.fromarray(GREY), xy(GREY), 255),
    "colour": (Image.fromarray(COLOUR), xy(COLOUR), 255),
    "16 bits": (Image.fromarray(GREY.astype(np.uint16) * 200), xy(GREY.astype(np.uint16) * 200), 65535),
    "black and white": (Image.fromarray(CLASSES > 0), xy((CLASSES > 0) * 255), 255),
    "palette": (palette(CLASSES, COLOURS), xy(np.asarray(COLOURS)[CLASSES]), 255),
    "opaque alpha": (Image.fromarray(np.concatenate([COLOUR, OPAQUE], axis=-1)), xy(COLOUR), 255),
    "grey with opaque alpha": (
        Image.merge("LA", [Image.fromarray(GREY), Image.new("L", (7, 5), 255)]),
        xy(GREY),
        255,
    ),
}


NOT_IN_BMP = ("16 bits", "opaque alpha", "grey with opaque alpha")


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [(k, s) for k in IMAGES for s in ("png", "tif", "bmp") if s != "bmp" or k not in NOT_IN_BMP],
)
def test_kinds_of_images(tmp_path, kind, suffix):
    image, expected, white = IMAGES[kind]
    path = tmp_path / f"image.{suffix}"
    image.save(path)
    header = FORMAT.read_header(path)
    assert (header.shape, header.channels, header.white) == ((7, 5, 1), len(expected), white)
    np.testing.assert_array_equal(FORMAT.read_volume(path), expected)


LABELS = {
    "grey": (Image.fromarray(CLASSES), CLASSES),
    "16 bits": (Image.fromarray(CLASSES.astype(np.uint16)), CLASSES),
    "black and white": (Image.fromarray(CLASSES > 0), CLASSES > 0),
    "colours that agree": (Image.fromarray(np.stack([CLASSES] * 3, axis=-1)), CLASSES),
    "colours that agree, opaque": (
        Image.fromarray(np.concatenate([*[CLASSES[..., None]] * 3, OPAQUE], axis=-1)),
        CLASSES,
    ),
    "palette of colours": (palette(CLASSES, COLOURS), CLASSES),
    "palette of colours, of which greys are used": (
        palette(CLASSES, [[255] * 3, [7] * 3, [90] * 3, [200, 9, 9]]),
        CLASSES,
    ),
    "palette of greys in another order": (palette(CLASSES, [[2] * 3, [0] * 3, [1] * 3]), (CLASSES + 2) % 3),
}


@pytest.mark.parametrize("kind", LABELS)
def test_kinds_of_label_images(tmp_path, kind):
    image, expected = LABELS[kind]
    image.save(tmp_path / "label.png")
    np.testing.assert_array_equal(FORMAT.read_label(tmp_path / "label.png"), xy(expected))


def test_a_mask_without_a_lesion_has_the_classes_of_the_others(make_pictures):
    """In white and red: white alone does not become that of a mask of black and white."""
    site = VolumeFolder.open(make_pictures("A"))
    for case, lesion in zip(site.cases["training"], (0, 1), strict=False):
        pixels = np.asarray(Image.open(case.label)) * np.uint8(lesion)
        palette(pixels, [[255] * 3, [255, 0, 0]]).save(case.label)
        np.testing.assert_array_equal(site.load_case(case)[1].numpy(), xy(pixels))


def test_black_and_white_are_two_classes_and_no_other_numbers_are(make_pictures):
    folder = make_pictures("A")
    site = VolumeFolder.open(folder)
    case = site.cases["training"][0]
    expected = site.load_case(case)[1]
    assert set(expected.unique().tolist()) == {0, 1}
    pixels = np.asarray(Image.open(case.label))
    Image.fromarray(pixels * 255).save(case.label)
    assert torch.equal(site.load_case(case)[1], expected)
    changed = pixels * 255
    changed[0, 0] = 1
    Image.fromarray(changed).save(case.label)
    with pytest.raises(DataError, match=r"site A, .*labels/0\.png: holds the label values 255, "):
        site.load_case(case)


def test_photographs_have_one_scale_and_lie_as_columns_and_rows(make_pictures):
    site = VolumeFolder.open(make_pictures("A", size=(24, 20)))
    case = site.cases["training"][0]
    image, label = site.load_case(case)
    pixels = np.asarray(Image.open(case.image))
    assert image.shape == (3, 24, 20, 1)
    assert label.shape == (1, 24, 20, 1)
    assert image[:, 7, 3, 0].tolist() == pixels[3, 7].tolist()
    torch.testing.assert_close(site.load_image(case, "scale"), image / 255)
    assert site.affine(case) is None
    deep = VolumeFolder.open(make_pictures("B", channels=1, bits=16))
    case = deep.cases["training"][0]
    torch.testing.assert_close(deep.load_image(case, "scale"), deep.load_image(case) / 65535)
    assert site.scaling == deep.scaling == "fixed"


def run_options(data, out, *extra):
    return (
        *("simulate", "--data", data, "--out", out, "--rounds", 1, "--threads", 1, "--device", "cpu"),
        *TINY_OPTIONS,
        *("--batch-size", 2, "--no-report", *extra),
    )


def test_a_channel_that_one_camera_lacks_does_not_stop_a_federation(run, make_pictures, tmp_path):
    """Both sites train, the record names the channel, and the camera's own pixels of it become 0."""
    make_pictures("A")
    make_pictures("B", constant=2)
    data, out = tmp_path / "pictures", tmp_path / "out"
    code, _, err = run(*run_options(data, out, "--methods", "fedrdn", "--engine", "inprocess", "--no-report"))
    assert code == 0, err
    assert "B: channel 2 is constant in every image; normalised it is 0" in err
    results = json.loads((out / "results.json").read_text())
    assert results["input"] == {
        "scaling": "fixed",
        "normalised_by": "fedrdn",
        "constant_channels": {"B": "2"},
    }
    assert set(results["test"]["sites"]) == {"A", "B"}
    saved = json.loads((out / "statistics.json").read_text())["sites"]
    assert saved["B"]["mean"][2] == saved["B"]["std"][2] == 0
    # The file is that of the run, and can be read again.
    out_text = run.ok(
        "statistics", "--data", data, "--intensity", "scale", "--out", out / "statistics.json", "--overwrite"
    )
    assert "constant" in out_text


def test_a_plan_for_volumes_is_refused(run, make_pictures, tmp_path):
    make_pictures("A")
    make_pictures("B")
    out = tmp_path / "out"
    code, _, err = run(
        *("simulate", "--data", tmp_path / "pictures", "--out", out, "--methods", "fedavg", "--rounds", 1),
        *("--engine", "inprocess", "--device", "cpu", "--spacing", "1,1,1"),
    )
    output = " ".join(err.split())
    assert code == 2
    assert output.startswith(
        f"medfedaug: site A, {tmp_path / 'pictures/A'}: its photographs have neither depth"
    )
    assert output.count("Leave out spatial_dims 3, spacing and orientation.") == 1
    assert not out.exists()


def test_a_case_is_drawn_upright_and_in_colour(make_pictures, tiny_config):
    folder = make_pictures("A", size=(24, 20))
    config = tiny_config(in_channels=3, classes=("background", "lesion"))
    trainer = SiteTrainer(config, folder, "cpu")
    trainer.open("A")
    (view,) = extreme_cases(trainer, {"3": 0.5})
    pixels = np.asarray(Image.open(folder / "images/3.png")) / 255
    np.testing.assert_allclose(view.image, pixels.swapaxes(0, 1), atol=1e-6)
    (plain, _) = case_picture([view]).axes
    np.testing.assert_allclose(plain.images[0].get_array(), pixels, atol=1e-6)
    low, high = plain.get_ylim()
    assert low > high


def test_sites_of_photographs_and_of_volumes_do_not_mix(make_pictures, make_site, tmp_path):
    make_pictures("A", channels=1)
    make_site("B", root=tmp_path / "pictures")
    with pytest.raises(DataError, match=r"site B, .*: its images are volumes, A's are photographs"):
        configure(find_sites(tmp_path / "pictures"))


@pytest.mark.parametrize(("orientation", "upright"), [(1, True), (6, False)])
def test_a_photograph_that_its_camera_turned_is_refused(tmp_path, orientation, upright):
    exif = Image.Exif()
    exif[TURNED] = orientation
    Image.fromarray(COLOUR).save(tmp_path / "image.jpg", exif=exif)
    if upright:
        assert FORMAT.read_volume(tmp_path / "image.jpg").shape == (3, 7, 5, 1)
        return
    with pytest.raises(ValueError, match="EXIF orientation 6: write it upright"):
        FORMAT.read_volume(tmp_path / "image.jpg")
