"""Data that would silently give wrong results: refused, or told in a warning, by the commands themselves."""

import json
import os
import shutil
import struct
import warnings
import zlib

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
import torch
from finished_runs import rehashed
from running import TINY_NETWORK, TINY_OPTIONS

from medfedaug.data.sites import find_sites, open_site
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


def doctor(run, folder):
    """What `doctor` says of a folder, without the lines of its table."""
    out = run("site", "doctor", "--data", folder)[1]
    columns = [line.split("│")[3] for line in out.splitlines() if line.count("│") == 5]
    return "".join("".join(columns).split())


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
    assert "labels/3.nii.gz:thelabelmapliesupto" in doctor(run, two_sites[1])


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


def test_files_that_only_look_alike_are_no_copies(run, two_sites, tmp_path):
    """Headers in the same words, each with raw data of its own."""
    for folder in two_sites:
        content = json.loads((folder / "dataset.json").read_text())
        for row in (row for split in ("training", "validation", "test") for row in content[split]):
            name = row["image"].split("/")[1].split(".")[0]
            (folder / name).mkdir()
            for kind, target in (("image", f"{name}/flair.mhd"), ("label", f"{name}/label.mha")):
                voxels = np.asarray(nibabel.load(folder / row[kind]).dataobj)
                sitk.WriteImage(sitk.GetImageFromArray(voxels.T), folder / target)
                row[kind] = target
        (folder / "dataset.json").write_text(json.dumps(content))
    assert simulate(run, tmp_path / "data", tmp_path / "out", *TINY_OPTIONS)[0] == 0
    shutil.rmtree(tmp_path / "out")
    shutil.copytree(two_sites[0] / "0", two_sites[0] / "9")
    edit(two_sites[0], lambda c: c["test"][0].update(image="9/flair.mhd", label="9/label.mha"))
    refused(run, tmp_path, "site A", "9/flair.mhd", "training case", "0/flair.mhd")


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (lambda image: image, "training has no image of dog"),
        (lambda image: (image[1] == "cat", image), "training has no image of cat"),
        (lambda image: image[0].split("/")[-1], ""),
    ],
)
def test_a_training_list_that_is_sorted_by_class_is_told(make_photos, order, words):
    folder = make_photos("A", per_class=5)
    (folder.parent / "splits").mkdir()
    files = [[f"A/{label}/{i}.png", label] for label in ("cat", "dog") for i in range(5)]
    (folder.parent / "splits/A_train.json").write_text(json.dumps(sorted(files[:4] + files[5:9], key=order)))
    (folder.parent / "splits/A_test.json").write_text(json.dumps([files[4], files[9]]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        site = open_site(folder)
    assert [len(cases) for cases in site.cases.values()] == [4, 4, 2]
    assert len(caught) == bool(words)
    assert words in "".join(str(warning.message) for warning in caught)


def test_classes_of_another_name_or_order_are_refused(run, two_sites, tmp_path):
    edit(two_sites[1], lambda c: c["labels"].update({"1": "vessel"}))
    refused(run, tmp_path, "site B", "dataset.json", "label 1 is 'vessel', and 'lesion' for site A")
    edit(two_sites[1], lambda c: c["labels"].update({"0": "lesion", "1": "background"}))
    refused(run, tmp_path, "site B", "label 0 is 'lesion', and 'background' for site A")
    for name in ("Lesion", "foreground"):
        edit(two_sites[1], lambda c, name=name: c["labels"].update({"0": "background", "1": name}))
        code, output = simulate(run, tmp_path / "data", tmp_path / name, *TINY_OPTIONS)
        assert code == 0, output


def test_paths_that_climb_out_of_the_sites_folder_are_refused(run, two_sites, tmp_path):
    outside = shutil.copytree(two_sites[0] / "images", tmp_path / "elsewhere")
    edit(two_sites[0], lambda c: c["test"][0].update(image="images/../../../elsewhere/3.nii.gz"))
    refused(run, tmp_path, "site A", "dataset.json", "../elsewhere/3.nii.gz", "absolute path")
    # One that is absolute is meant, and so is a link.
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


def full_range(folder):
    rng = np.random.default_rng(0)
    return {
        file: rng.integers(0, 65536, (40, 40)).astype(np.uint16) for file in sorted(folder.rglob("*.png"))
    }


def test_colour_of_16_bits_keeps_its_range(run, make_photos, tmp_path):
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    folder = make_photos("A")
    for file, pixels in full_range(folder).items():
        rows = np.stack([pixels // (i + 1) for i in range(3)], axis=-1).astype(">u2")
        lines = b"".join(b"\0" + row.tobytes() for row in rows)
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", 40, 40, 16, 2, 0, 0, 0))
        body = chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + header + body)
    out = tmp_path / "statistics.json"
    assert run("statistics", "--data", folder, "--out", out)[0] == 0
    assert json.loads(out.read_text())["sites"]["A"]["mean"] == pytest.approx([127.5, 63.5, 42.2], abs=3)


SPOILT = {
    "one entry missing": (
        lambda model: model.pop("model.2.conv.bias"),
        "lacks 1 of the 26 entries that its run's network shares: model.2.conv.bias",
    ),
    "one infinity": (
        lambda model: model["model.2.conv.bias"].fill_(float("inf")),
        "NaN or infinite values in 1 entries: model.2.conv.bias",
    ),
    "another network": (
        lambda model: model.update(more=torch.zeros(2)),
        "its run's network has no entries more",
    ),
    "another shape": (
        lambda model: model.update({"model.2.conv.bias": torch.zeros(3)}),
        "model.2.conv.bias has the shape (3,), in its run's network (2,)",
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
    assert f"global_model.pt: {words}" in " ".join(err.split())


def test_an_exchange_with_nan_is_not_used(run, finished, phantom_dir, tmp_path):
    out = shutil.copytree(finished, tmp_path / "run")
    torch.save({"fedavg/nothing": torch.tensor([float("nan")])}, out / "global_exchange.pt")
    rehashed(out)
    code, _, err = run("evaluate", "--model", out / "global_model.pt", "--data", phantom_dir)
    assert code == 2
    assert "global_exchange.pt: NaN or infinite values in 1 entries: fedavg/nothing" in " ".join(err.split())
