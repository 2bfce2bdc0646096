"""What `medfedaug site doctor` says of a site, and that it says so of what is really wrong."""

import json
import shutil
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
from benchmark_files import write_volume

from medfedaug.errors import ConfigError
from medfedaug.hospital.privacy.policy import OPEN_PROMISE
from medfedaug.nvflare_jobs.kit import doctor
from medfedaug.nvflare_jobs.kit.doctor import examine
from medfedaug.nvflare_jobs.kit.kit import open_kit


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("DATA", "DEVICE", "STATE", "MEMORY", "CACHE"):
        monkeypatch.delenv(f"MEDFEDAUG_{name}", raising=False)


@pytest.fixture
def kit(ready_kit):
    return ready_kit


def verdicts(checks) -> dict[str, bool | None]:
    return {check.name: check.ok for check in checks}


def the(checks, name):
    return next(check for check in checks if check.name == name)


def test_a_site_that_is_ready(kit, run):
    checks = examine(kit)
    assert set(verdicts(checks).values()) == {True}, [check for check in checks if not check.ok]
    assert "nvflare 2.9" in the(checks, "versions").found
    assert "10 training" in the(checks, "data").found
    assert "1 x 16 x 16 x 4" in the(checks, "one image").found
    code, out, err = run("site", "doctor", kit, "--offline")
    assert code == 0, err
    assert "state folder" in out
    assert out.endswith("ready\n")


def test_a_split_with_too_few_cases_for_a_mean_is_noted(kit, own_data, make_site):
    assert the(examine(kit), "numbers").found == "each is of 10 patients or more; losses stay here"
    assert the(examine(kit), "images").found.startswith(OPEN_PROMISE)
    make_site("hospital-a", cases=(10, 9, 10))
    checks = verdicts(examine(kit))
    assert checks["validation scores"] is None
    assert "test scores" not in checks
    found = the(examine(kit), "validation scores").found
    assert found == "9 cases; means of fewer than 10 stay here: it does not count in the choice of the round"
    edit(kit, "medfedaug.json", privacy={"epsilon": 8})
    assert "images" not in verdicts(examine(kit))


def rewrite_labels(data, values):
    for file in sorted((data / "labels").iterdir()):
        image = nibabel.load(file)
        voxels = np.asarray(image.dataobj)
        nibabel.save(nibabel.Nifti1Image(values(voxels).astype(np.uint8), image.affine), file)


def test_empty_label_maps_in_all_training_cases_are_not_ready(kit, own_data, run):
    rewrite_labels(own_data, np.zeros_like)
    found = the(examine(kit), "outlines")
    assert (found.ok, found.found) == (False, "all 10 label maps of training cases that were read are empty")
    assert run("site", "doctor", kit, "--offline")[0] == 1


def test_a_declared_class_that_no_label_map_shows_is_noted(kit, own_data):
    listing = own_data / "dataset.json"
    content = json.loads(listing.read_text())
    content["labels"]["2"] = "cyst"
    listing.write_text(json.dumps(content))
    found = the(examine(kit), "outlines")
    assert found.ok is None
    assert "label maps shows cyst" in found.found
    assert "under 'labelled' in dataset.json" in found.advice


def test_a_kit_as_provisioned_is_not_ready_and_the_table_says_why(kits, run):
    code, out, _ = run("site", "doctor", kits / "hospital-b", "--offline")
    assert code == 1
    assert "not ready: kit, data" in out
    assert "site configure" in out
    checks = examine(kits / "hospital-b")
    assert the(checks, "policy").ok is None
    assert "project_admin, lead" in the(checks, "policy").found


def test_a_server_has_no_data_to_look_at(kits):
    kit = open_kit(kits / "fl-server.example.org")
    assert verdicts(examine(kit.path))["kit"] is False
    kit.write(kit.plan(forbid=True))
    found = verdicts(examine(kit.path))
    assert set(found.values()) == {True}
    assert not {"data", "device"} & found.keys()


def test_noise_that_a_site_cannot_add_is_found_before_a_job(kit, own_data, make_site, monkeypatch):
    assert "noise" not in verdicts(examine(kit))
    policy = {"epsilon": 8}
    edit(kit, "medfedaug.json", privacy=policy)
    assert the(examine(kit), "noise").found == "weights 1, statistics 8, scores 8; up to ε = 8 at δ = 1e-05"
    assert False not in verdicts(examine(kit)).values()
    listing = make_site("hospital-a", cases=(12, 10, 10)) / "dataset.json"
    content = json.loads(listing.read_text())
    for index, case in enumerate(content["training"]):
        case["patient"] = f"p{max(index, 1)}"  # the first two are of one
    listing.write_text(json.dumps(content))
    assert verdicts(examine(kit))["cases of a patient"] is False
    assert the(examine(kit), "cases of a patient").found.startswith("2 for training, noise would hide 1")
    edit(kit, "medfedaug.json", privacy={**policy, "cases_per_patient": 2})
    assert "cases of a patient" not in verdicts(examine(kit))

    def missing():
        raise ConfigError("privacy: noise needs Opacus for its account")

    monkeypatch.setattr(doctor, "require_opacus", missing)
    check = the(examine(kit), "noise")
    assert (check.ok, check.advice) == (False, "pip install 'medfedaug[privacy]'")


def state_in_a_file(kit):
    (kit / "file").write_text("")
    edit(kit, "medfedaug.json", state=str(kit / "file" / "state"))


def edit(kit, name, **values):
    file = kit / "local" / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def without(kit, identifier):
    file = kit / "local/resources.json"
    left = [one for one in json.loads(file.read_text())["components"] if one["id"] != identifier]
    edit(kit, "resources.json", components=left)


def wrong_label(data):
    label = np.zeros((16, 16, 4), np.uint8)
    label[4:9, 4:9, 1:3] = 7
    write_volume(data / "labels/3.nii.gz", label)


NAN = np.full((16, 16, 4), np.nan, np.float32)


@pytest.mark.parametrize(
    ("spoil", "name", "words"),
    [
        (lambda data: (data / "dataset.json").unlink(), "data", "medfedaug init"),
        (lambda data: (data / "images/3.nii.gz").write_bytes(b"garbage"), "data", "3.nii.gz: cannot be read"),
        (lambda data: write_volume(data / "images/0.nii.gz", NAN), "one image", "has NaN or infinite voxels"),
        (lambda kit: edit(kit, "resources.json", class_allow_list=["*"]), "kit", "class_allow_list"),
        (lambda kit: edit(kit, "resources.json", allow_log_streaming=True), "kit", "allow_log_streaming"),
        (lambda kit: edit(kit, "resources.json", app_validator=None), "kit", "app_validator"),
        (
            *(lambda kit: edit(kit, "medfedaug.json", privacy={"min_images": 11}), "number of images"),
            "10 for training; a site with fewer than 11 does not train",
        ),
        (lambda kit: edit(kit, "medfedaug.json", device="nonsense"), "device", "nonsense"),
        (lambda kit: edit(kit, "medfedaug.json", min_images=3), "settings", "unknown keys min_images"),
        (state_in_a_file, "state folder", "cannot be written"),
        (lambda kit: without(kit, "medfedaug_status"), "kit", "KitStatus"),
        (lambda kit: (kit / "local/resources.json").write_text("{]"), "kit", "not readable as a JSON object"),
        (lambda kit: (kit / "local").chmod(0o777), "modes", "local can be written by everybody"),
        (lambda kit: (kit / "startup/stop_fl.sh").chmod(0o777), "modes", "stop_fl.sh can be written by"),
        (wrong_label, "labels", "label values 7"),
        (lambda data: (data / "labels/2.nii.gz").write_text("no image"), "data", "labels/2.nii.gz"),
    ],
)
def test_what_is_wrong_is_found(kit, request, spoil, name, words):
    spoil(request.getfixturevalue("own_data") if name in ("data", "one image", "labels") else kit)
    checks = examine(kit)
    assert [check.name for check in checks if check.ok is False] == [name]
    assert words in the(checks, name).found
    assert the(checks, name).advice


def test_a_full_disk_is_found(kit, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert [check.name for check in examine(kit) if not check.ok] == ["state folder", "prepared images"]
