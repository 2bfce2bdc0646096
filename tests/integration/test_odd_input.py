"""Whatever lies in a site's folder: one line that names the site and the file, or a run."""

import json
import os
from pathlib import Path

import nibabel
import numpy as np
import pytest
from benchmark_files import write_volume
from PIL import Image


def refused(run, data, tmp_path):
    """The one line in which `simulate` refuses the data."""
    code, _, err = run(
        *("simulate", "--data", data, "--out", tmp_path / "out", "--methods", "fedavg", "--rounds", 1),
        *("--engine", "inprocess", "--device", "cpu", "--threads", 1, "--no-report", "--image-size", 32),
    )
    notes = ("A: ", "left out: ")  # of a fault that is seen when voxels are read
    lines = [line for line in err.splitlines() if not line.startswith(notes)]
    assert code == 2, err
    assert len(lines) == 1, err
    assert lines[0].startswith("medfedaug: ")
    assert not (tmp_path / "out").exists()
    return lines[0]


def listed(**changes):
    """A change of the first training case in `dataset.json`."""

    def change(folder: Path) -> None:
        path = folder / "dataset.json"
        content = json.loads(path.read_text())
        content["training"][0].update(changes)
        path.write_text(json.dumps(content))

    return change


def in_place_of(name, make):
    def change(folder: Path) -> None:
        path = folder / name
        path.unlink()
        make(path)

    return change


def labels(value, dtype=np.float32):
    voxels = np.zeros((16, 16, 4), dtype)
    voxels[2, 2, 2] = value
    return lambda folder: write_volume(folder / "labels/0.nii.gz", voxels)


def nowhere(folder):
    """A header whose affine is not a number."""
    path = folder / "images/0.nii"
    image = nibabel.Nifti1Image(np.ones((16, 16, 4), np.float32), np.eye(4))
    content = bytearray(image.to_bytes())
    content[280:284] = np.float32(np.nan).tobytes()  # the first number of its sform
    path.write_bytes(content)
    listed(image="images/0.nii")(folder)


def in_micrometres(folder):
    image = nibabel.Nifti1Image(np.ones((16, 16, 4), np.float32), np.diag((400, 400, 900, 1)))
    image.header.set_xyzt_units("micron")
    nibabel.save(image, folder / "images/0.nii")
    listed(image="images/0.nii")(folder)


def second_file(shape=(16, 16, 4), affine=None):
    def change(folder: Path) -> None:
        image = nibabel.Nifti1Image(np.ones(shape, np.float32), np.eye(4) if affine is None else affine)
        nibabel.save(image, folder / "images/t2.nii.gz")
        listed(image=["images/0.nii.gz", "images/t2.nii.gz"])(folder)

    return change


VOLUMES = {
    "a second file that is missing": (
        listed(image=["images/0.nii.gz", "images/t2.nii.gz"]),
        "images/t2.nii.gz: the image of a training case is missing",
    ),
    "files of two shapes": (
        second_file((16, 16, 5)),
        "images/t2.nii.gz: the file is 16 x 16 x 5, the first file of its image 16 x 16 x 4. Resample",
    ),
    "files of two places": (
        second_file(affine=np.diag([1, 1, 3, 1])),
        "images/t2.nii.gz: the file lies up to 6 mm from the first file of its image",
    ),
    "pipe": (in_place_of("images/0.nii.gz", os.mkfifo), "images/0.nii.gz: cannot be read"),
    "deep dataset.json": (
        in_place_of("dataset.json", lambda path: path.write_text("[" * 100_000)),
        "dataset.json: not readable as JSON (nested too deeply)",
    ),
    "affine of no numbers": (
        nowhere,
        "images/0.nii: cannot be read as an image (its header gives it no place",
    ),
    "micrometres": (
        in_micrometres,
        "images/0.nii: cannot be read as an image (its header measures in micrometres, expected millimetres",
    ),
    "label that is no number": (labels(np.nan), "labels/0.nii.gz: holds the label values nan"),
}


@pytest.mark.parametrize("fault", VOLUMES)
def test_odd_volumes_are_one_line(run, make_site, tmp_path, fault):
    make_site("A")
    change, words = VOLUMES[fault]
    change(make_site("B"))
    message = refused(run, tmp_path / "data", tmp_path)
    assert "site B" in message
    assert words in message


def image_of(image, name="images/0.png", **options):
    return lambda folder: image.save(folder / name, **options)


def exif(orientation):
    tags = Image.Exif()
    tags[274] = orientation
    return tags


def renamed(kind, name, image, **options):
    def change(folder: Path) -> None:
        image.save(folder / f"{kind}s/{name}", **options)
        listed(**{kind: f"{kind}s/{name}"})(folder)

    return change


def grey(value=7, mode="L"):
    return Image.new(mode, (24, 20), value)


NOISE = Image.effect_noise((24, 20), 90)
PICTURES = {
    "pipe": (in_place_of("images/0.png", os.mkfifo), "images/0.png: cannot be read as an image (no file)"),
    "another size": (image_of(NOISE.resize((9, 9))), "its image 9 x 9 x 1"),
    "transparent": (
        image_of(Image.merge("RGBA", [NOISE] * 4)),
        "images/0.png: cannot be read as an image (has transparent pixels: write it without an alpha",
    ),
    "turned": (
        renamed("image", "t.jpg", Image.merge("RGB", [NOISE] * 3), exif=exif(6)),
        "images/t.jpg: cannot be read as an image (stored turned or mirrored, EXIF orientation 6: write it",
    ),
    "16 bits among 8": (
        image_of(Image.fromarray(np.arange(480, dtype=np.uint16).reshape(20, 24))),
        "images/1.png: a photograph of 8 bits of 3 channels, while the first image is a photograph of 16",
    ),
    "volume among photographs": (
        lambda folder: (
            write_volume(folder / "images/0.nii.gz", np.random.default_rng(0).normal(size=(24, 20, 1))),
            listed(image="images/0.nii.gz")(folder),
        ),
        "images/1.png: a photograph of 8 bits of 3 channels, while the first image is a volume",
    ),
    "label value": (
        image_of(grey(7), "labels/0.png"),
        "labels/0.png: holds the label values 7, dataset.json names",
    ),
    "label with loss": (renamed("label", "0.jpg", NOISE), "Write label images without loss, as PNG."),
}


@pytest.mark.parametrize("fault", PICTURES)
def test_odd_photographs_with_label_images_are_one_line(run, make_pictures, tmp_path, fault):
    make_pictures("A")
    change, words = PICTURES[fault]
    change(make_pictures("B"))
    message = refused(run, tmp_path / "pictures", tmp_path)
    assert "site B" in message
    assert words in message


PHOTOGRAPHS = {
    "pipe": (in_place_of("cat/0.png", os.mkfifo), "cat/0.png: cannot be read as an image (no file)"),
    "huge": (
        in_place_of("cat/0.png", lambda path: Image.new("1", (20_000, 10_000)).save(path)),
        "cat/0.png: cannot be read as an image (Image size (200000000 pixels) exceeds limit",
    ),
    "class in capitals": (
        lambda folder: (folder / "cat").rename(folder / "Cat"),
        "'Cat' and 'cat' of site A would be two classes",
    ),
}


@pytest.mark.parametrize("fault", PHOTOGRAPHS)
def test_odd_photographs_are_one_line(run, make_photos, tmp_path, fault):
    make_photos("A")
    change, words = PHOTOGRAPHS[fault]
    change(make_photos("B"))
    message = refused(run, tmp_path / "photos", tmp_path)
    assert "site B" in message
    assert words in message
