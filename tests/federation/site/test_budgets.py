"""One budget for a patient: whatever is written again, counted in part, copied or set back."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import nibabel
import numpy as np
import pytest
from hospitals import Hospital
from rehearsed_hospitals import HOSPITALS

from medfedaug.config.plan import Plan
from medfedaug.data.quality.content_hash import case_identities
from medfedaug.data.sites import open_site
from medfedaug.federation.messages.messages import FINGERPRINT, PREPARE, Request
from medfedaug.privacy import PrivacyLedger, Release, account_mark, ledger
from medfedaug.privacy.account_mark import ACCOUNT_MARK

FREE = {"min_cases": 1, "allow_limit": True}
DAY = 24 * 3600.0


def named(folder: Path, patients: dict[str, str] | None = None) -> Path:
    """Name a patient for each case, the case's number by default."""
    content = json.loads((folder / "dataset.json").read_text())
    for split in ("training", "validation", "test"):
        for row in content[split]:
            number = Path(row["image"]).name.split(".")[0]
            row["patient"] = (patients or {}).get(number, f"patient {number}")
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def written_again(folder: Path, change: float = 0.0) -> Path:
    """Write every image of a site again, as float64, each voxel changed by a factor."""
    for path in (folder / "images").iterdir():
        image = nibabel.load(path)
        voxels = np.asarray(image.dataobj).astype(np.float64) * (1 + change)
        nibabel.save(nibabel.Nifti1Image(voxels, image.affine), path)
    return folder


def without_first(folder: Path) -> Path:
    content = json.loads((folder / "dataset.json").read_text())
    content["training"] = content["training"][1:]
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


def hospital(tmp_path: Path, data: Path, name: str = "A", *, first: bool = True, **privacy) -> Hospital:
    settings = {"min_images": 3, "scores": "cases", **privacy}
    return Hospital(tmp_path / "kits" / name, data, first=first, privacy=settings, jobs=FREE)


def prepared(site: Hospital, config, job: str) -> str:
    site.start(config, job)
    error = site.answer(Request(PREPARE)).error
    site.end()
    return error


# ------------------------------------------------------------- the same patients


@pytest.mark.parametrize(("change", "patients"), [(0.0, False), (0.0, True), (1e-6, True)])
def test_files_that_were_written_again_isolate_nobody(make_site, tiny_config, tmp_path, change, patients):
    data = make_site("A", cases=(8, 1, 1))
    if patients:
        named(data)
    site = hospital(tmp_path, data)
    assert prepared(site, tiny_config("fedrdn", rounds=1), "job-1") == ""
    again = written_again(shutil.copytree(data, tmp_path / "again/A"), change)
    site = hospital(tmp_path, again, first=False)
    assert prepared(site, tiny_config("fedrdn", rounds=1), "job-2") == ""
    without_first(again)
    assert "training cases differ by 1" in prepared(site, tiny_config("fedrdn", rounds=1), "job-3")


def test_files_that_were_written_again_have_no_fresh_budget_of_scores_and_epsilon(make_site, tmp_path):
    data = named(make_site("A", cases=(8, 4, 1)))
    again = written_again(shutil.copytree(data, tmp_path / "again/A"), 1e-6)
    before, now = (
        {split: case_identities(open_site(folder), split) for split in ("training", "validation")}
        for folder in (data, again)
    )
    assert not before["validation"].keys() & now["validation"].keys()
    account = PrivacyLedger(tmp_path / "ledger.sqlite")
    account.enter(
        [Release("job", "task", "scores", "dice", "validation", 4, queries=90)], before["validation"]
    )
    assert account.queries("validation", now["validation"]) == 90
    first = account.spend(2.0, 1e-5, 100.0, before["training"])
    assert account.spend(2.0, 1e-5, 100.0, now["training"]) > first


def test_other_images_of_the_same_patients_may_be_used(make_site, tmp_path):
    account = PrivacyLedger(tmp_path / "ledger.sqlite")
    site = open_site(named(make_site("A", cases=(8, 1, 1))))
    other = open_site(named(written_again(make_site("A", cases=(8, 1, 1), root=tmp_path / "later"), 0.1)))
    account.enter([Release("job", "model", "weights", "1", "training", 8)], case_identities(site, "training"))
    assert account.nearest("training", case_identities(other, "training")).apart == 8


def test_a_file_is_decoded_once_and_one_that_cannot_be_decoded_is_known_by_its_bytes(
    make_site, tmp_path, monkeypatch
):
    data, account = make_site("A", cases=(4, 1, 1)), PrivacyLedger(tmp_path / "ledger.sqlite")
    site, read = open_site(data), []
    original = type(site).read_files
    monkeypatch.setattr(
        type(site), "read_files", lambda self, case: read.append(case) or original(self, case)
    )
    identities = case_identities(site, "training", account)
    assert case_identities(site, "training", account) == identities
    assert case_identities(site, "training", PrivacyLedger(account.path)) == identities
    assert len(read) == 4
    (data / "images/0.nii.gz").write_bytes(b"no image")
    assert len(case_identities(site, "training", account).keys() & identities.keys()) == 3


# ------------------------------------------------------------- a part of the cases


def planned(config, **changes):
    return config(
        "fedavg", rounds=1, plan=Plan(), planning={"memory": 0.1}, classes=("background", "lesion"), **changes
    )


def many(make_site, patients: int, of_one: int) -> Path:
    """Two hundred small volumes; nearly all are of one patient, and no list begins with the others."""
    cases = patients - 1 + of_one
    owners = {
        str(n): "one" if n % (cases // (patients - 1)) or n == 0 else f"other {n}" for n in range(cases)
    }
    return named(make_site("A", cases=(cases, 1, 1), shape=(16, 16, 3)), owners)


def test_a_fingerprint_is_of_as_many_patients_as_its_number_says(make_site, tiny_config, tmp_path):
    site = hospital(tmp_path, many(make_site, 11, 90), min_images=10)
    for row in ("1", "2"):  # of the one patient alone
        image = site.data / f"images/{row}.nii.gz"
        volume = nibabel.load(image)
        nibabel.save(nibabel.Nifti1Image(np.asarray(volume.dataobj) + 500, volume.affine), image)
    site.start(planned(tiny_config), "job-1")
    reply = site.answer(Request(FINGERPRINT))
    assert reply.error == ""
    assert {key.split("/")[0] for key in reply.payload} == {"plan"}
    # Two of the 90 images add 500 each to the mean of one of 11 patients.
    owners = {row["patient"] for row in json.loads((site.data / "dataset.json").read_text())["training"]}
    share = 1000 / 90 / len(owners)
    assert reply.payload["plan/intensity"][0, 0] == pytest.approx(100 + share, abs=1)
    entries = [entry.release for entry in PrivacyLedger(site.kit / "medfedaug/ledger.sqlite").entries()]
    assert [(r.method, r.count) for r in entries if r.kind == "statistics"] == [
        ("plan", len(open_site(site.data).cases["training"]))
    ]


def test_a_fingerprint_of_a_sample_is_checked_and_entered_as_one(make_site, tiny_config, tmp_path):
    data = named(make_site("A", cases=(90, 1, 1), shape=(16, 16, 3)))
    site = hospital(tmp_path, data, min_images=91)
    site.start(planned(tiny_config), "job-1")
    reason = "plan's statistics would summarise 90 images, and this site sends them from 91 on"
    assert reason in site.answer(Request(FINGERPRINT)).error
    site = hospital(tmp_path, data, min_images=40)
    site.start(planned(tiny_config), "job-2")
    assert site.answer(Request(FINGERPRINT)).error == ""
    account = PrivacyLedger(site.kit / "medfedaug/ledger.sqlite")
    (plan,) = (entry for entry in account.entries() if entry.release.method == "plan")
    (numbers,) = (entry for entry in account.entries() if entry.release.kind == "numbers")
    assert (plan.release.count, numbers.release.count) == (50, 90)
    assert plan.cases != numbers.cases


# ------------------------------------------------------------- one account


def test_two_kits_with_one_folder_of_images_have_one_budget(make_site, tiny_config, tmp_path, run):
    data, config = make_site("A", cases=(8, 1, 1)), tiny_config("fedrdn", rounds=1)
    assert prepared(hospital(tmp_path, data, "A"), config, "job-1") == ""
    second = hospital(tmp_path, data, "B", first=False)
    error = prepared(second, config, "job-1")
    assert "site B: releases about these images are counted in another ledger" in error
    assert str(tmp_path) not in error
    code, out, _ = run("doctor", "--kit", second.kit, "--offline")
    assert code == 1
    assert re.search("not ready: .*account", out)
    # With one state folder they share the budget.
    shared = json.loads((second.kit / "local/medfedaug.json").read_text())
    second.set(**shared, state=str(tmp_path / "kits/A/medfedaug"))
    assert prepared(second, config, "job-2") == ""


def test_a_refused_site_config_writes_nothing(make_site, tiny_config, tmp_path, kits, run):
    data = make_site("A", cases=(8, 1, 1))
    assert prepared(hospital(tmp_path, data, "A"), tiny_config("fedrdn", rounds=1), "job-1") == ""
    kit = kits / HOSPITALS[0]
    before = {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    code, _, err = run("site-config", "--kit", kit, "--data", data)
    assert code == 2
    assert "counted in another ledger" in " ".join(err.split())
    assert {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()} == before


def test_a_mark_that_a_killed_process_left_empty_is_written_by_the_next_job(make_site, tiny_config, tmp_path):
    data, config = make_site("A", cases=(8, 1, 1)), tiny_config("fedrdn", rounds=1)
    site = hospital(tmp_path, data, "A")
    (data / ACCOUNT_MARK).touch()
    assert prepared(site, config, "job-1") == ""
    assert "counted in another ledger" in prepared(
        hospital(tmp_path, data, "B", first=False), config, "job-1"
    )


def test_an_older_copy_of_a_ledger_is_noticed(make_site, tiny_config, tmp_path):
    site, config = hospital(tmp_path, make_site("A", cases=(8, 1, 1))), tiny_config("fedrdn", rounds=1)
    assert prepared(site, config, "job-1") == ""
    path = site.kit / "medfedaug/ledger.sqlite"
    shutil.copy(path, tmp_path / "older")
    assert prepared(site, config, "job-2") == ""
    shutil.copy(tmp_path / "older", path)
    assert "it is an older copy" in prepared(site, config, "job-3")
    path.unlink()
    assert "counted in another ledger" in prepared(site, config, "job-3")
    (site.data / ACCOUNT_MARK).write_text("{")
    assert "does not name an account" in prepared(site, config, "job-3")


def test_images_that_cannot_be_marked_are_used_with_a_word(
    make_site, tiny_config, tmp_path, monkeypatch, caplog
):
    site = hospital(tmp_path, make_site("A", cases=(8, 1, 1)))
    original = Path.open

    def read_only(self, mode="r", *args, **more):
        if self.name == ACCOUNT_MARK and "x" in mode:
            raise OSError(30, "Read-only file system")
        return original(self, mode, *args, **more)

    monkeypatch.setattr(account_mark.Path, "open", read_only)
    assert prepared(site, tiny_config("fedrdn", rounds=1), "job-1") == ""
    assert "the images do not name their account of releases" in caplog.text


def test_a_clock_that_is_set_back_hides_no_entry(tmp_path, monkeypatch):
    account, now = PrivacyLedger(tmp_path / "ledger.sqlite"), 1e9
    cases = [b"case of sixteen."]
    for clock, queries in ((now, 1), (now - 40 * DAY, 90)):
        monkeypatch.setattr(ledger.time, "time", lambda clock=clock: clock)
        account.enter([Release("job", "task", "scores", "dice", "validation", 1, queries=queries)], cases)
    assert account.queries("validation", cases, now - 30 * DAY) == 91


@pytest.mark.parametrize("noise", [0.0, -1.0, float("nan"), 1e-200, 1e-300])
def test_noise_that_is_none_spends_more_than_any_budget(tmp_path, noise):
    account = PrivacyLedger(tmp_path / "ledger.sqlite")
    assert account.spend(noise, 1e-5, 1e300) is None
    assert account.releases() == []
