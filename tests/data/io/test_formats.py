"""Image formats as objects: one of another package is trained on and predicted; one file for one format."""

import json
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from installed_package import install
from running import TINY_OPTIONS
from written_volumes import load_volume

from medfedaug.data.io import formats
from medfedaug.data.io.base import ImageFormat
from medfedaug.data.io.formats import read_header
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation import run_in_process
from medfedaug.utils import plugins

NETWORK = (*TINY_OPTIONS, "--batch-size", 4, "--device", "cpu")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    return install("data.md", "### A format of your own", "numpy_volumes", source, target)


@pytest.fixture
def package(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    yield installed
    sys.modules.pop("numpy_volumes", None)


def as_archives(folder: Path, target: Path) -> None:
    """Write a folder of sites again, each NIfTI file as an archive."""
    for file in sorted(folder.rglob("*.nii.gz")):
        image = nibabel.load(file)
        archive = target / file.relative_to(folder).with_name(file.name.replace(".nii.gz", ".npz"))
        archive.parent.mkdir(parents=True, exist_ok=True)
        np.savez(archive, voxels=np.asanyarray(image.dataobj), affine=image.affine)
    for file in folder.glob("*/dataset.json"):
        text = file.read_text().replace(".nii.gz", ".npz")
        (target / file.relative_to(folder)).write_text(text)


@pytest.fixture
def archives(phantom_dir, tmp_path):
    as_archives(phantom_dir, tmp_path / "archives")
    return tmp_path / "archives"


@pytest.mark.slow
def test_a_site_of_an_added_format_is_trained_on_and_predicted(run, package, phantom_dir, archives, tmp_path):
    """The model is the one of the same volumes as NIfTI, to the last bit, and so are the label maps."""
    training = ("--rounds", 1, "--lr", 0.02, "--augmentation", "none")  # the phantom's own default
    arguments = ("--methods", "fedrdn", *training, "--engine", "inprocess", "--no-report")
    states = {}
    for name, data in (("nifti", phantom_dir), ("npz", archives)):
        run.ok("simulate", "--data", data, *arguments, *NETWORK, "--out", tmp_path / name)
        states[name] = torch.load(tmp_path / name / "global_model.pt", weights_only=True)
    assert all(torch.equal(states["npz"][key], value) for key, value in states["nifti"].items())
    maps_by_format = {}
    for name, data in (("nifti", phantom_dir), ("npz", archives)):
        images, out = data / "site_A" / "images", tmp_path / f"{name}_maps"
        model = ("--model", tmp_path / name, "--site", "site_A", "--device", "cpu")
        run.ok("predict", *model, "--images", images, "--probabilities", "--out", out)
        maps = sorted(path for path in out.glob("*.nii.gz"))
        maps_by_format[name] = {path.name: nibabel.load(path) for path in maps}
        assert sorted(path.name for path in (out / "probabilities").iterdir()) == [p.name for p in maps]
    assert maps_by_format["npz"].keys() == maps_by_format["nifti"].keys()
    assert maps_by_format["npz"]
    for name, label in maps_by_format["nifti"].items():
        archive = maps_by_format["npz"][name]
        assert np.array_equal(np.asanyarray(archive.dataobj), np.asanyarray(label.dataobj))
        assert np.allclose(archive.affine, label.affine)


def test_init_finds_images_of_an_added_format(run, package, archives):
    site = archives / "site_A"
    for old, new in (("images", "imagesTr"), ("labels", "labelsTr")):
        (site / old).rename(site / new)
    (site / "dataset.json").unlink()
    run.ok("init", site, "--labels", "background,lesion", "--yes")
    content = json.loads((site / "dataset.json").read_text())
    assert all(case["image"].endswith(".npz") for case in content["training"])
    assert len(find_sites(archives)) == 3


def test_a_site_that_does_not_allow_the_package_says_so_in_a_line(package, archives, tiny_config):
    plugins.restrict([])
    message = "image format 'npz' of the package numpy-volumes is not allowed here"
    with pytest.raises(MedFedAugError, match=message):
        run_in_process(tiny_config(rounds=1), archives, ["site_A", "site_B"], "cpu")


def test_a_file_of_an_unknown_suffix_is_no_image(run, model, archives, tmp_path):
    """Without the package, an archive is what it was before: no image, by its name or its content."""
    image = sorted((archives / "site_A/images").iterdir())[0]
    code, _, err = run("predict", "--model", model, "--images", image, "--out", tmp_path / "maps")
    assert code != 0
    assert "is no image, by its name or its content" in err
    assert "NIfTI (.nii, .nii.gz)" in err


class Entry:
    """An entry point whose object is at hand."""

    def __init__(self, content):
        self.content = content

    def load(self):
        return self.content


class Renamed(ImageFormat):
    """PNG under another name, read by the methods that a format has by default."""

    title = "Renamed (.pic)"
    suffixes = (".pic",)
    photograph = True

    def read_header(self, path):
        return formats.format_of(Path("x.png")).read_header(path)

    def read_volume(self, path):
        return formats.format_of(Path("x.png")).read_volume(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(print, "is no medfedaug.data.io.base.ImageFormat"), (Renamed(), "its suffixes are .*, without .npz")],
)
def test_what_is_no_format_of_its_suffix_is_refused(content, message, monkeypatch, tmp_path):
    plugin = plugins.Plugin(plugins.FORMATS, "npz", "odd-formats", Entry(content))
    monkeypatch.setattr(plugins, "installed", lambda group: [plugin])
    with pytest.raises(ConfigError, match=f"image format 'npz' of the package odd-formats: .*{message}"):
        load_volume(tmp_path / "a.npz")


def test_a_package_cannot_take_a_built_in_suffix(monkeypatch, tmp_path):
    plugin = plugins.Plugin(plugins.FORMATS, "png", "odd-formats", Entry(Renamed()))
    monkeypatch.setattr(plugins, "installed", lambda group: [plugin])
    assert not isinstance(formats.format_of(tmp_path / "a.png"), Renamed)
    with pytest.raises(ConfigError, match=r"image format 'png' .* has the name of one that is built in"):
        plugins.find(plugins.FORMATS, "png", formats.BUILT_IN_SUFFIXES)


def test_a_header_of_an_added_format_that_gives_no_place_is_refused(package, tmp_path):
    np.savez(tmp_path / "a.npz", voxels=np.zeros((4, 4, 4)), affine=np.zeros((4, 4)))
    with pytest.raises(ValueError, match="gives it no place"):
        read_header(tmp_path / "a.npz")
