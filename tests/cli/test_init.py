"""`medfedaug init` and `medfedaug enrol project`: a federation's first files; and completion."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml
from benchmark_files import write_volume
from PIL import Image

from medfedaug.data.sites import open_site


def fill(folder, images="imagesTr", labels="labelsTr", names=range(10), channels=("",), ending="", value=1):
    for name in names:
        for channel in channels:
            write_volume(
                folder / images / f"{name}{channel}.nii.gz", np.random.rand(8, 8, 4).astype(np.float32)
            )
        label = np.zeros((8, 8, 4), np.uint8)
        label[2:4, 2:4] = np.reshape(value, (-1, 1))[..., None] if np.ndim(value) else value
        write_volume(folder / labels / f"{name}{ending}.nii.gz", label)


def listed(folder):
    content = json.loads((folder / "dataset.json").read_text())
    return content, {
        key: [row["label"] for row in content[key]] for key in ("training", "validation", "test")
    }


def test_nnu_nets_layout_is_read_as_it_is_and_its_own_list_is_kept(run, tmp_path):
    site = tmp_path / "Dataset001"
    fill(site, names=[f"case_{k:03d}" for k in range(10)], channels=("_0000", "_0001"))
    fill(site, "imagesTs", "labelsTs", ["case_100"], ("_0000", "_0001"))
    own = {
        "channel_names": {"0": "T2", "1": "FLAIR"},
        "labels": {"background": 0, "tumour": 1},
        "numTraining": 10,
    }
    (site / "dataset.json").write_text(json.dumps(own))
    code, out, err = run("init", site, "--yes")
    assert code == 2
    assert "exists already; nothing is written. --replace keeps it" in err
    assert json.loads((site / "dataset.json").read_text()) == own
    assert '{"image": ["imagesTr/case_' in out  # what it would write
    code, _, err = run("init", site, "--yes", "--replace")
    assert code == 0, err
    assert json.loads((site / "dataset.before.json").read_text()) == own
    content, split = listed(site)
    assert content["labels"] == {"0": "background", "1": "tumour"}
    assert split["test"] == ["labelsTs/case_100.nii.gz"]
    assert (len(split["training"]), len(split["validation"])) == (8, 2)
    opened = open_site(site)
    assert opened.channel_names == ("T2", "FLAIR")
    assert opened.load_image(opened.cases["training"][0]).shape == (2, 8, 8, 4)


def test_a_named_class_that_no_label_map_shows_is_noted(run, tmp_path):
    fill(tmp_path / "A", names=range(3))
    _, out, _ = run("init", tmp_path / "A", "--labels", "background,liver,spleen")
    assert "note: A: no label map shows spleen: all voxels are learned as other classes" in " ".join(
        out.split()
    )


def test_an_empty_label_map_is_noted(run, tmp_path):
    fill(tmp_path / "A")
    fill(tmp_path / "A", names=["7"], value=0)
    code, out, _ = run("init", tmp_path / "A", "--yes")
    assert code == 0
    assert "note: A: empty or full, of one value everywhere: label maps 7.nii.gz" in " ".join(out.split())


def test_the_decathlons_layout_and_flat_folders_are_split_by_patient_and_seed(run, tmp_path):
    fill(tmp_path / "A", names=[f"p{patient}_{visit}" for patient in range(5) for visit in (1, 2)])
    fill(tmp_path / "B", "images", "masks", ending="_mask", value=2)
    code, out, err = run("init", tmp_path / "A")
    assert code == 2
    assert "give --yes to write this" in err
    assert "A: several names begin alike (p0, ...)" in out
    assert not list(tmp_path.rglob("dataset.json"))
    code, out, err = run(
        "init", tmp_path / "A", "--yes", "--patient", "(.+)_", "--labels", "background,lesion"
    )
    assert code == 0, err
    content, split = listed(tmp_path / "A")
    patients = [{row["patient"] for row in content[key]} for key in split]
    assert [len(one) for one in patients] == [3, 1, 1]
    assert len(set.union(*patients)) == 5
    assert content["labels"] == {"0": "background", "1": "lesion"}
    splits = []
    for seed in (0, 0, 1):
        code, _, err = run("init", tmp_path / "B", "--yes", "--seed", seed)
        assert code == 0, err
        content, split = listed(tmp_path / "B")
        splits.append(split)
        (tmp_path / "B/dataset.json").unlink()
    assert [len(part) for part in splits[0].values()] == [6, 2, 2]
    assert splits[0] == splits[1] != splits[2]
    assert content["labels"] == {"0": "background", "1": "class_1", "2": "class_2"}


def masks(folder, *values, number=6, kind=np.uint8, turn=lambda image: image, suffix="png"):
    """Photographs with label images in which a stripe has each value."""
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    for k in range(number):
        pixels = np.random.default_rng(k).integers(0, np.iinfo(kind).max, (40, 40), kind, endpoint=True)
        label = np.zeros((40, 40), kind)
        for index, value in enumerate(values):
            label[10 * index : 10 * index + 8, 5:30] = value[k % len(value)] if np.ndim(value) else value
        Image.fromarray(pixels).save(folder / f"images/{k}.png")
        turn(Image.fromarray(label)).save(folder / f"masks/{k}.{suffix}")


def read_as(run, site, *arguments):
    """The classes that `init` writes, and the classes of the voxels that a run then reads."""
    code, _, err = run("init", site, "--yes", *arguments)
    assert code == 0, err
    opened = open_site(site)
    opened.check_files()
    cases = [case for split in opened.cases.values() for case in split]
    voxels = {value for case in cases for value in opened.load_label(case).unique().tolist()}
    return json.loads((site / "dataset.json").read_text())["labels"], voxels


@pytest.mark.parametrize(
    "drawn",
    [
        {},
        {"suffix": "tif", "turn": lambda image: image.convert("1")},
        {"turn": lambda image: image.convert("RGBA")},
    ],
)
def test_masks_of_0_and_255_are_read_as_the_page_says(run, tmp_path, drawn):
    masks(tmp_path / "site", 255, **drawn)
    assert read_as(run, tmp_path / "site") == ({"0": "background", "1": "class_1"}, {0, 1})


def test_any_two_values_are_two_classes(run, tmp_path):
    masks(tmp_path / "grey", 128)
    masks(tmp_path / "deep", 65535, kind=np.uint16)
    fill(tmp_path / "volumes", value=255)
    fill(tmp_path / "named", value=2)
    assert read_as(run, tmp_path / "grey") == ({"0": "background", "128": "class_1"}, {0, 1})
    assert read_as(run, tmp_path / "deep") == ({"0": "background", "65535": "class_1"}, {0, 1})
    assert read_as(run, tmp_path / "volumes") == ({"0": "background", "255": "class_1"}, {0, 1})
    names = ({"0": "background", "2": "lesion"}, {0, 1})
    assert read_as(run, tmp_path / "named", "--labels", "background,lesion") == names
    deep = open_site(tmp_path / "deep")
    image = deep.load_image(deep.cases["training"][0], "scale")
    assert float(image.max()) <= 1 < 65535 * float(image.max())  # divided by 65535, not by 255


def test_sites_of_other_classes_are_named_at_once(run, tmp_path):
    masks(tmp_path / "A", 255)
    masks(tmp_path / "B", 1, 2)
    code, _, err = run("init", tmp_path, "--yes")
    assert code == 2
    assert "site B" in err
    assert "3 classes, site A has 2" in err
    assert not list(tmp_path.rglob("dataset.json"))
    code, _, err = run("init", tmp_path, "--yes", "--labels", "background,organ,lesion")
    assert code == 2  # the white of A is neither of the three
    assert "A/masks/0.png: has the value 255" in err


def test_what_cannot_be_a_site_is_one_line_and_nothing_is_written(run, tmp_path):
    fill(tmp_path / "site", names=range(4), value=[[64], [255]])
    (tmp_path / "empty/images").mkdir(parents=True)
    (tmp_path / "apart/images").mkdir(parents=True)
    fill(tmp_path / "apart", "images", "labels", ["x"])
    (tmp_path / "apart/images/x.nii.gz").rename(tmp_path / "apart/images/y.nii.gz")
    fill(tmp_path / "good", names=range(4))
    for arguments, words in (
        (["site"], "has the value 0, and no class is named. The label maps have the values 0, 64, 255."),
        (
            ["site", "--labels", "0=background,64=a"],
            "has the value 255, and the classes are 0 is background, 64",
        ),
        (["site", "--labels", "0=a,64=b,255=a"], "has the classes 0 a, 64 b, 255 a. Two or more are needed"),
        (["site", "--labels", "0=a,b"], "--labels takes VALUE=NAME, such as 0=background,255=lesion"),
        (["site", "--labels", "1=a,1=b"], "--labels names 1 twice"),
        (["empty"], "holds no images beside label maps. Looked for are imagesTr and labelsTr"),
        (["apart"], "no image of images has a label map of its name in labels"),
        (["good", "--patient", "x(.+)"], "finds no patient in the name '0'"),
        (["good", "--patient", "("], "finds no patient in the name '0'"),
        (["good", "--labels", "background"], "has the value 1, and the classes are 0 is background."),
    ):
        code, _, err = run("init", tmp_path / arguments[0], "--yes", *arguments[1:])
        assert code == 2
        assert words in err.splitlines()[-1]
        assert "Traceback" not in err
    assert not list(tmp_path.rglob("dataset.json"))


def test_files_are_checked_as_a_run_checks_them(run, tmp_path):
    fill(tmp_path / "A", names=range(4))
    write_volume(tmp_path / "A/imagesTr/2.nii.gz", np.full((8, 8, 4), np.nan, np.float32))
    assert_refused(run("init", tmp_path / "A", "--yes"), "imagesTr/2.nii.gz: has NaN or infinite voxels")
    for site, mode in (("B", "RGB"), ("C", "RGBA")):
        for name in range(4):
            for folder in ("images", "masks"):
                path = tmp_path / "photos" / site / folder / f"{name}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                grey = folder == "masks"
                pixels = np.random.randint(
                    0, 2 if grey else 200, (8, 8) if grey else (8, 8, len(mode)), np.uint8
                )
                Image.fromarray(pixels).save(path)
    broken = tmp_path / "photos/B/images/1.png"
    broken.write_bytes(broken.read_bytes()[:60])
    Image.new("L", (4, 4)).save(tmp_path / "photos/B/masks/2.png")
    _, _, err = refused = run("init", tmp_path / "photos", "--yes")
    assert_refused(refused, "6 cases cannot be used, and nothing is written")
    for words in (
        "B/images/1.png: cannot be read",
        "B/masks/2.png: the label map is 4 x 4 x 1",
        "transparent",
    ):
        assert words in err
    assert not list(tmp_path.rglob("dataset.json"))


def assert_refused(result, words):
    code, _, err = result
    assert code == 2
    assert words in " ".join(err.split())


def test_folders_of_classes_need_no_list(run, tmp_path):
    for site in "AB":
        for name in range(8):
            path = tmp_path / site / ("benign", "malignant")[name % 2] / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.random.randint(0, 200, (8, 8, 3), np.uint8)).save(path)
    code, out, err = run("init", tmp_path)
    assert code == 0, err
    assert "A: classification of benign, malignant, 8 images" in out
    assert "a folder per class needs no dataset.json: nothing is written" in out
    assert not list(tmp_path.rglob("dataset.json"))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("labels/2_seg.nii.gz", "labels/2_seg.nii.gz: is of the same case as 2.nii.gz"),
        ("images/2_0000.nii.gz", "images/2_0000.nii.gz: is of the same case as 2.nii.gz"),
    ],
)
def test_two_files_of_one_case_are_refused_by_both_names(run, tmp_path, more, words):
    fill(tmp_path / "site", "images", "labels", range(4))
    write_volume(tmp_path / "site" / more, np.zeros((8, 8, 4), np.uint8))
    code, _, err = run("init", tmp_path / "site", "--yes")
    assert code == 2
    assert words in err.splitlines()[-1]
    assert not (tmp_path / "site/dataset.json").exists()


def test_the_project_file_provisions_the_sites_that_were_named(run, tmp_path):
    out = tmp_path / "project.yml"
    options = (
        "--server",
        "fl.example.com",
        "--port",
        9002,
        "--admin",
        "a@example.com",
        "--lead",
        "l@example.com",
    )
    sites = ("--sites", "basel, site-8002, ulm")
    code, printed, err = run("enrol", "project", *sites, "--out", out, *options, "--name", "brain")
    assert code == 0, err
    assert f"nvflare provision -p {out} -w kits" in printed
    people = {p["name"]: p for p in yaml.safe_load(out.read_text())["participants"]}
    assert list(people) == [
        *("fl.example.com", "basel", "site-8002", "ulm", "a@example.com", "l@example.com")
    ]
    assert people["fl.example.com"]["fed_learn_port"] == 9002
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", str(out), "-w", "kits"]
    environment = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, capture_output=True)
    assert {path.name for path in (tmp_path / "kits/brain/prod_00").iterdir()} >= set(people)
    kits = tmp_path / "kits/brain/prod_00"
    code, _, err = run("site", "configure", kits / "basel")
    assert code == 0, err
    assert "exists already" in run("enrol", "project", "--sites", "a,b", "--out", out)[2]


def test_labels_of_nnu_net_that_are_no_classes_are_not_taken_for_some(run, tmp_path):
    site = tmp_path / "Dataset002"
    fill(site)
    own = {"labels": {"background": 0, "tumour": 1, "ignore": 2}}
    (site / "dataset.json").write_text(json.dumps(own))
    code, out, err = run("init", site, "--yes", "--replace")
    assert code == 0, err
    assert "voxels with the value 2 are unknown" in " ".join((out + err).split())
    written = json.loads((site / "dataset.json").read_text())
    assert (written["labels"], written["ignore"]) == ({"0": "background", "1": "tumour"}, 2)
