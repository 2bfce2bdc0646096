"""Data that would silently give wrong results: refused, or told in a warning, by the commands themselves."""

import json
import os
import shutil

import nibabel
import numpy as np
import pytest
import torch
from finished_runs import rehashed
from running import TINY_NETWORK, TINY_OPTIONS

from medfedaug.data.sites import find_sites
from medfedaug.simulate import configure
from medfedaug.simulate import simulate as run_simulation


def simulate(run, data, out, *extra):
    code, _, err = run(
        *("simulate", "--data", data, "--out", out, "--methods", "fedavg", "--rounds", 1, "--threads", 1),
        *("--engine", "inprocess", "--device", "cpu", "--no-report", *extra),
    )
    return code, " ".join(err.split())


def refused(run, tmp_path, *words, data="data"):
    """`simulate` refuses in one line with these words, and leaves nothing."""
    code, output = simulate(run, tmp_path / data, tmp_path / "out")
    assert code == 2, output
    assert "Traceback" not in output
    for word in words:
        assert str(word) in output
    assert not (tmp_path / "out").exists()


def edit(folder, change):
    content = json.loads((folder / "dataset.json").read_text())
    change(content)
    (folder / "dataset.json").write_text(json.dumps(content))


@pytest.fixture
def two_sites(make_site):
    return make_site("A"), make_site("B")


def place(path, affine):
    """Write a volume's voxels anew, at another place."""
    voxels = np.asarray(nibabel.load(path).dataobj).copy()
    nibabel.save(nibabel.Nifti1Image(voxels, affine), path)


def turned(degrees):
    cosine, sine = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees))
    affine = np.eye(4)
    affine[:2, :2] = [[cosine, -sine], [sine, cosine]]
    return affine


def shifted(x):
    affine = np.eye(4)
    affine[0, 3] = x
    return affine


@pytest.mark.parametrize(
    ("affine", "apart"), [(shifted(0.5), "0.5 mm"), (np.diag([1, 1, 3, 1]), "6 mm"), (turned(10), "3.7 mm")]
)
def test_a_label_map_elsewhere_than_its_image_is_refused(run, two_sites, tmp_path, affine, apart):
    place(two_sites[1] / "labels/3.nii.gz", affine)
    words = ("site B", "labels/3.nii.gz", f"lies up to {apart} from its image", "1 x 1 x 1 mm", "Resample")
    refused(run, tmp_path, *words)


@pytest.mark.parametrize("copy", [os.link, shutil.copy])
def test_a_copy_of_a_training_volume_in_the_test_is_refused(run, two_sites, tmp_path, copy):
    copy(two_sites[0] / "images/0.nii.gz", two_sites[0] / "images/9.nii.gz")
    edit(two_sites[0], lambda c: c["test"][0].update(image="images/9.nii.gz"))
    words = (
        "site A",
        "images/9.nii",
        "the image of a test case is that of a training case",
        "one split only",
    )
    refused(run, tmp_path, *words)


@pytest.mark.parametrize("how", [shutil.copy, os.symlink])
def test_a_volume_that_trains_at_one_site_and_tests_at_another_is_refused(run, two_sites, tmp_path, how):
    (two_sites[1] / "images/3.nii.gz").unlink()
    how(two_sites[0] / "images/0.nii.gz", two_sites[1] / "images/3.nii.gz")
    refused(run, tmp_path, "site B", "images/3.nii.gz", "training case", "images/0.nii.gz of site A")


def test_classes_of_another_name_or_order_are_refused(run, two_sites, tmp_path):
    edit(two_sites[1], lambda c: c["labels"].update({"1": "vessel"}))
    refused(run, tmp_path, "site B", "dataset.json", "label 1 is 'vessel', and 'lesion' for site A")
    edit(two_sites[1], lambda c: c["labels"].update({"0": "lesion", "1": "background"}))
    refused(run, tmp_path, "site B", "label 0 is 'lesion', and 'background' for site A")
    for name in ("Lesion", "foreground"):
        edit(two_sites[1], lambda c, name=name: c["labels"].update({"0": "background", "1": name}))
        code, output = simulate(run, tmp_path / "data", tmp_path / name, *TINY_OPTIONS)
        assert code == 0, output


def test_a_list_may_name_files_elsewhere_and_links(run, two_sites, tmp_path):
    outside = shutil.copytree(two_sites[0] / "images", tmp_path / "elsewhere")
    edit(two_sites[0], lambda c: c["test"][0].update(image=str(outside / "3.nii.gz")))
    (two_sites[1] / "images/3.nii.gz").rename(tmp_path / "far.nii.gz")
    (two_sites[1] / "images/3.nii.gz").symlink_to(tmp_path / "far.nii.gz")
    edit(two_sites[1], lambda c: c["test"][0].update(image="labels/../images/3.nii.gz"))
    code, output = simulate(run, tmp_path / "data", tmp_path / "out", *TINY_OPTIONS)
    assert code == 0, output


CORONAL = np.array([[1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]], float)


@pytest.mark.parametrize(
    ("affine", "cases", "words"),
    [
        (CORONAL, (1,), ["its slices are coronal, those of 0.nii.gz axial", "RSA, there to RAS"]),
        (CORONAL, (0, 1, 2, 3), ["its slices are coronal, those of 0.nii.gz of site A axial"]),
        (np.diag([-1, -1, 1, 1]), (0, 1, 2, 3), ["turned against those of 0.nii.gz of site A", "LPS"]),
        (turned(45), (0, 1, 2, 3), []),
    ],
)
def test_volumes_that_lie_differently_are_named(run, two_sites, tmp_path, affine, cases, words):
    for index in cases:
        for kind in ("images", "labels"):
            place(two_sites[1] / f"{kind}/{index}.nii.gz", affine)
    code, output = simulate(run, tmp_path / "data", tmp_path / "out", *TINY_OPTIONS)
    assert code == 0, output
    assert output.count("warning") == bool(words) * (2 if cases == (1,) else 1)
    for word in words:
        assert word in output


SPOILT = {
    "one entry missing": (lambda model: model.pop("model.2.conv.bias"), "model.2.conv.bias"),
    "one infinity": (
        lambda model: model["model.2.conv.bias"].fill_(float("inf")),
        "model.2.conv.bias: expected finite",
    ),
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, phantom_dir):
    """A finished run, whose model the tests spoil."""
    out = tmp_path_factory.mktemp("finished") / "out"
    sites = find_sites(phantom_dir)
    config = configure(sites, rounds=1, **TINY_NETWORK)
    run_simulation(phantom_dir, out, config, engine="inprocess", device="cpu")
    return out


@pytest.mark.parametrize("fault", SPOILT)
def test_a_model_that_is_none_is_not_scored(run, finished, phantom_dir, tmp_path, fault):
    spoil, words = SPOILT[fault]
    out = shutil.copytree(finished, tmp_path / "run")
    model = torch.load(out / "global_model.pt", weights_only=True)
    spoil(model)
    torch.save(model, out / "global_model.pt")
    rehashed(out)
    code, shown, err = run("evaluate", "--model", out / "global_model.pt", "--data", phantom_dir)
    assert code == 2
    assert not shown
    assert "global_model.pt: " in err
    assert words in " ".join(err.split())


def test_an_exchange_with_nan_is_not_used(run, finished, phantom_dir, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    torch.save({"fedavg/nothing": torch.tensor([float("nan")])}, out / "global_exchange.pt")
    rehashed(out)
    code, _, err = run("evaluate", "--model", out / "global_model.pt", "--data", phantom_dir)
    assert code == 2
    assert "fedavg/nothing: expected finite" in " ".join(err.split())
