"""What `medfedaug site doctor` says of a site, and that it says so of what is really wrong."""

import json
import shutil
from importlib import metadata
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
import torch
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
    assert {"python", "monai", "torch", "nvflare", "nibabel", "SimpleITK"} <= verdicts(checks).keys()
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
    change(kit, privacy={"epsilon": 8})
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
    assert "not ready: allow-list, job files, components, launcher, logs, data" in out
    assert "site configure" in out
    checks = examine(kits / "hospital-b")
    assert the(checks, "policy").ok is None
    assert "project_admin, lead" in the(checks, "policy").found


def test_a_server_has_no_data_to_look_at(kits):
    kit = open_kit(kits / "fl-server.example.org")
    assert verdicts(examine(kit.path))["allow-list"] is False
    kit.write(kit.plan(forbid=True))
    found = verdicts(examine(kit.path))
    assert set(found.values()) == {True}
    assert not {"data", "device", "launcher"} & found.keys()


def change(kit, **values):
    file = kit / "local/medfedaug.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_noise_that_a_site_cannot_add_is_found_before_a_job(kit, own_data, make_site, monkeypatch):
    assert "noise" not in verdicts(examine(kit))
    policy = {"epsilon": 8}
    change(kit, privacy=policy)
    assert the(examine(kit), "noise").found == "weights 1, statistics 8, scores 8; up to ε = 8 at δ = 1e-05"
    assert False not in verdicts(examine(kit)).values()
    listing = make_site("hospital-a", cases=(12, 10, 10)) / "dataset.json"
    content = json.loads(listing.read_text())
    for index, case in enumerate(content["training"]):
        case["patient"] = f"p{max(index, 1)}"  # the first two are of one
    listing.write_text(json.dumps(content))
    assert verdicts(examine(kit))["cases of a patient"] is False
    assert the(examine(kit), "cases of a patient").found.startswith("2 for training, noise would hide 1")
    change(kit, privacy={**policy, "cases_per_patient": 2})
    assert "cases of a patient" not in verdicts(examine(kit))

    def missing():
        raise ConfigError("privacy: noise needs Opacus for its account")

    monkeypatch.setattr(doctor, "require_opacus", missing)
    check = the(examine(kit), "noise")
    assert (check.ok, check.advice) == (False, "pip install 'medfedaug[privacy]'")


def allow(kit, *entries, **values):
    file = kit / "local/resources.json"
    found = json.loads(file.read_text())
    found["class_allow_list"] += entries
    file.write_text(json.dumps({**found, **values}))


def state_in_a_file(kit):
    (kit / "file").write_text("")
    change(kit, state=str(kit / "file" / "state"))


def two_launchers(kit):
    file = kit / "local/resources.json"
    values = json.loads(file.read_text())
    (launcher,) = (entry for entry in values["components"] if entry["id"] == "process_launcher")
    values["components"].append({**launcher, "id": "another"})
    file.write_text(json.dumps(values))


NAN = np.full((16, 16, 4), np.nan, np.float32)


@pytest.mark.parametrize(
    ("spoil", "name", "words"),
    [
        (lambda data: (data / "dataset.json").unlink(), "data", "medfedaug init"),
        (lambda data: (data / "images/3.nii.gz").write_bytes(b"garbage"), "data", "3.nii.gz: cannot be read"),
        (lambda data: write_volume(data / "images/0.nii.gz", NAN), "one image", "has NaN or infinite voxels"),
        (lambda kit: allow(kit, "medfedaug."), "allow-list", "medfedaug.: more than jobs need"),
        (
            *(lambda kit: allow(kit, "medfedaug.nvflare_jobs."), "allow-list"),
            "a job without code can run any command here",
        ),
        (lambda kit: allow(kit, "*"), "allow-list", "a job can run any command here"),
        (
            *(lambda kit: allow(kit, class_list_enforcement_mode="warn"), "allow-list"),
            "class_list_enforcement_mode is warn",
        ),
        (
            *(lambda kit: change(kit, privacy={"min_images": 11}), "number of images"),
            "10 for training; a site with fewer than 11 does not train",
        ),
        (lambda kit: change(kit, device="nonsense"), "device", "nonsense"),
        (lambda kit: change(kit, min_images=3), "settings", "unknown keys min_images"),
        (state_in_a_file, "state folder", "cannot be written"),
        (two_launchers, "launcher", "2 in resources.json"),
    ],
)
def test_what_is_wrong_is_found(kit, request, spoil, name, words):
    spoil(request.getfixturevalue("own_data") if name in ("data", "one image") else kit)
    checks = examine(kit)
    assert [check.name for check in checks if check.ok is False] == [name]
    assert words in the(checks, name).found
    assert the(checks, name).advice


def test_a_full_disk_is_found(kit, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert [check.name for check in examine(kit) if not check.ok] == ["state folder", "prepared images"]


def test_versions_that_do_not_fit_are_found(kit, monkeypatch):
    real = metadata.version

    def version(name):
        if name == "SimpleITK":
            raise metadata.PackageNotFoundError(name)
        return {"nvflare": "2.10.1", "torch": "2.4.1+cu121"}.get(name) or real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    checks = examine(kit)
    assert [check.name for check in checks if not check.ok] == ["SimpleITK", "nvflare"]
    assert the(checks, "SimpleITK").found == "missing"
    assert "nvflare<2.10,>=2.9" in the(checks, "nvflare").advice


def test_without_a_kit_the_data_alone_are_looked_at(make_site, monkeypatch):
    data = make_site("A", channels=2, cases=(0, 0, 2))
    checks = examine(data=data)
    assert the(checks, "kit").ok is None
    assert "channels: 2" in the(checks, "data").found
    assert the(checks, "number of images").ok is True
    assert "state folder" not in verdicts(checks)
    assert the(checks, "device").ok is (True if torch.cuda.is_available() else None)
    write_volume(data / "images/0.nii.gz", torch.zeros(16, 16, 9).numpy())
    monkeypatch.setenv("MEDFEDAUG_DATA", str(data))
    assert "its image 16 x 16 x 9" in the(examine(), "data").found


def test_a_folder_that_is_no_kit_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not an NVFlare kit"):
        examine(tmp_path)
