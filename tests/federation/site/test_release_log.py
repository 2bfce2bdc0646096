"""The account of all that leaves a site: what is in it, what it keeps back, and that names do not matter."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import nibabel
import numpy as np
import pytest
import SimpleITK as sitk
from hospitals import Deployment, Hospital

from medfedaug.data.quality.content_hash import case_identities
from medfedaug.data.quality.file_hashes import fingerprint_files
from medfedaug.data.sites import open_site
from medfedaug.errors import ConfigError, PrivacyRefused, RunFailed, StorageError
from medfedaug.federation import FederationServer, SiteTrainer
from medfedaug.federation.messages.messages import PREPARE, Reply, Request
from medfedaug.federation.site.release_log import Account
from medfedaug.federation.site.site import Site
from medfedaug.privacy import PrivacyLedger, PrivacyPolicy, Release, ledger

FREE = {"min_cases": 1, "allow_limit": True}
NOISE = {
    **{"noise_multiplier": 1.0, "max_epsilon": 9.0, "min_images": 1},
    "clip": {"intensity_mean": [0, 1], "intensity_std": [0.01, 1]},
}


@pytest.fixture
def deploy(make_site, tmp_path):
    """Two sites with eight training cases each; what leaves them summarises three or more."""
    for name in ("A", "B"):
        make_site(name, cases=(8, 1, 1))

    def make(**privacy) -> Deployment:
        settings = {"privacy": {"min_images": 3, "scores": "cases", **privacy}, "jobs": FREE}
        return Deployment(
            [Hospital(tmp_path / "kits" / name, tmp_path / "data" / name, **settings) for name in "AB"]
        )

    return make


def account(deployment, name="A") -> PrivacyLedger:
    return PrivacyLedger(deployment.hospitals[name].kit / "medfedaug/ledger.sqlite")


def test_all_that_leaves_is_in_the_ledger_and_the_command_prints_it(deploy, tiny_config, run):
    deployment = deploy()
    deployment.run(tiny_config("fedrdn,fedfa", rounds=2))
    entries = [entry.release for entry in account(deployment).entries()]
    releases = [(r.method, r.kind, r.split, r.count) for r in entries]
    training = ("training", 8)
    assert releases.count(("model", "weights", *training)) == 2
    assert releases.count(("fedfa", "statistics", *training)) == 2
    assert releases.count(("fedrdn", "statistics", *training)) == 1
    assert releases.count(("task", "scores", "validation", 1)) == 2
    assert releases.count(("task", "scores", "test", 1)) == 1
    assert releases.count(("task", "numbers", *training)) == 3
    assert len(releases) == 11
    assert {r.job for r in entries} == {"job-1"}
    weights = [r for r in entries if r.kind == "weights"]
    assert weights[0].digest != weights[1].digest
    code, out, err = run("ledger", deployment.hospitals["A"].kit)
    assert code == 0, err
    assert re.search(r"job-1.*fedfa.*statistics", re.sub(r"[│┃\s]+", " ", out))
    assert run("ledger", deployment.hospitals["A"].kit, "--every")[1].count("\n") > out.count("\n")


def test_two_jobs_that_differ_in_limit_do_not_isolate_a_patient(deploy, tiny_config):
    deployment = deploy()
    deployment.run(tiny_config("fedrdn", rounds=1, limit=7))
    with pytest.raises(RunFailed, match="training cases differ by 1 from those of job job-1") as raised:
        deployment.run(tiny_config("fedrdn", rounds=1))
    assert "differ by fewer than 3" in str(raised.value)
    # The same cases again, and others that are far apart, may leave.
    deployment.run(tiny_config("fedrdn", rounds=1, limit=7, seed=1))
    deployment.run(tiny_config("fedrdn", rounds=1, limit=4))


def test_of_two_jobs_at_the_same_time_one_is_checked_against_the_other(make_site, tmp_path, monkeypatch):
    """Both are opened before either has sent anything, and both are asked while the other one is."""
    ledgers = [PrivacyLedger(tmp_path / "kit" / "ledger.sqlite") for _ in range(2)]
    folder = make_site("A", cases=(8, 1, 1))
    accounts = [
        Account(
            "A", f"job-{limit}", its, PrivacyPolicy(min_images=3), open_site(folder, limit=limit), rounds=1
        )
        for its, limit in zip(ledgers, (7, None), strict=True)
    ]
    for account in accounts:
        account.check_cases("training")
    nearest = PrivacyLedger.nearest

    def slow(self, *args):
        near = nearest(self, *args)
        time.sleep(0.3)  # seconds in which the other job would ask too
        return near

    monkeypatch.setattr(PrivacyLedger, "nearest", slow)

    def enter(account) -> str:
        try:
            account.enter(Reply(PREPARE, num_samples=1))
        except PrivacyRefused as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        texts = sorted(pool.map(enter, accounts))
    assert not texts[0]
    assert "training cases differ by 1" in texts[1]


def test_a_job_takes_no_more_updates_than_its_rounds_have(deploy, tiny_config):
    """Asked again with other weights, under other identities of the run, or with other configurations."""
    site = deploy().hospitals["A"]
    config = tiny_config(rounds=1)
    site.start(config, "job-1")
    request = FederationServer(config).start_round(["A"])
    for times in range(3):  # a server that was started again may repeat a round
        weights = {key: value + 0.01 * times for key, value in request.weights.items()}
        assert site.answer(replace(request, weights=weights)).weights
    reason = "3 updates have left in this job of 1 round,"
    for run in (request.run, "0" * 32):
        reply = site.answer(replace(request, run=run))
        assert reason in reply.error
        assert not reply.weights
    other = tiny_config(rounds=1, seed=5)
    site.start(other, "job-1")
    assert reason in site.answer(FederationServer(other).start_round(["A"])).error
    site.start(other, "job-2")
    assert site.answer(FederationServer(other).start_round(["A"])).weights


@pytest.mark.parametrize("shared", [False, True], ids=["a folder each", "one folder"])
def test_the_limits_of_a_job_are_those_of_each_site_wherever_its_state_is(
    make_site, tiny_config, tmp_path, run, shared
):
    for name in "ABCD":
        make_site(name, cases=(1, 1, 1))
    settings = {"privacy": {"min_images": 1, "scores": "cases"}, "jobs": FREE}
    settings |= {"state": str(tmp_path / "state")} if shared else {}
    sites = [Hospital(tmp_path / "kits" / name, tmp_path / "data" / name, **settings) for name in "ABCD"]
    deployment, config = Deployment(sites), tiny_config(rounds=1)
    server = deployment.run(config)
    assert set(server.results()["test"]["sites"]) == set("ABCD")
    assert set(server.rounds[0]["sites"]) == set("ABCD")
    request = FederationServer(config).start_round(["A", "B", "C", "D"])
    for site in sites:
        errors = {}
        for times in range(3):
            other = {key: value + 0.01 * (times + 1) for key, value in request.weights.items()}
            for task in ("train", "test"):
                errors[times, task] = site.answer(replace(request, task=task, round=1, weights=other)).error
        assert [errors[times, "train"] for times in range(2)] == ["", ""]
        assert "3 updates have left in this job of 1 round," in errors[2, "train"]
        for times in range(3):
            assert "the scores of another model in the test have left in this job" in errors[times, "test"]
    printed = run("ledger", sites[0].kit)[1]
    assert printed.count("; site B;") == (printed.count("; site A;") if shared else 0)
    assert ("; site A;" in printed) is shared


def test_a_patient_who_comes_later_is_not_isolated_and_the_site_may_decide_otherwise(
    deploy, tiny_config, tmp_path
):
    deployment = deploy()
    deployment.run(tiny_config(rounds=1))
    listing = tmp_path / "data/A/dataset.json"
    content = json.loads(listing.read_text())
    content["training"] = content["training"][:-1]
    listing.write_text(json.dumps(content))
    with pytest.raises(RunFailed, match="training cases differ by 1"):
        deployment.run(tiny_config(rounds=1))
    kept = json.loads((deployment.hospitals["A"].kit / "local/medfedaug.json").read_text())
    kept["privacy"]["allow_differences"] = True
    deployment.hospitals["A"].set(**kept)
    deployment.run(tiny_config(rounds=1))


def test_an_account_goes_on_when_site_folder_and_files_are_renamed(deploy, tiny_config, tmp_path):
    deployment = deploy()
    deployment.run(tiny_config("fedrdn", rounds=1, limit=7))
    old, renamed = tmp_path / "data/A", tmp_path / "elsewhere/C"
    shutil.copytree(old, renamed)
    content = json.loads((renamed / "dataset.json").read_text())
    for number, case in enumerate(content["training"]):
        for kind in ("image", "label"):
            (renamed / case[kind]).rename(renamed / f"{kind}_new_{number}.nii.gz")
            case[kind] = f"{kind}_new_{number}.nii.gz"
    (renamed / "dataset.json").write_text(json.dumps(content))
    first = deployment.hospitals["A"]
    again = Hospital(tmp_path / "kits2/C", renamed, privacy={"min_images": 3}, jobs=FREE)
    shutil.move(first.kit / "medfedaug", again.kit / "medfedaug")
    with pytest.raises(RunFailed, match="site C: its training cases differ by 1"):
        Deployment([again, deployment.hospitals["B"]]).run(tiny_config("fedrdn", rounds=1))


def test_epsilon_does_not_begin_again_when_a_site_is_renamed(make_site, tiny_config, tmp_path):
    data = make_site("A", cases=(6, 1, 1))
    other = make_site("other", cases=(6, 1, 1))
    ledger, spent = tmp_path / "ledger.sqlite", []
    for name, folder in (("A", data), ("B", data), ("C", other)):
        policy = PrivacyPolicy.from_dict(NOISE)
        trainer = SiteTrainer(tiny_config("fedrdn"), folder, "cpu", policy=policy, ledger=ledger)
        assert not Site(name, trainer).answer(Request("prepare")).error
        spent.append(trainer.guard.metrics()["privacy/epsilon"])
    assert spent[1] > spent[0]
    assert spent[2] == pytest.approx(spent[0])  # other patients have a budget of their own


def test_scores_are_counted_and_limited(deploy, tiny_config, tmp_path):
    deployment = deploy(max_test_scores=2, max_validation_scores=3)
    for job in range(2):
        deployment.run(tiny_config(rounds=1, seed=job))
    server = deployment.run(tiny_config(rounds=2, seed=2))
    reason = server.results()["test"]["missing"]["A"]
    assert "scores of 2 models on its test cases have left, and max_test_scores" in reason
    assert server.rounds[0]["sites"]["A"]["val_dice"] is not None
    assert server.rounds[1]["sites"]["A"].get("val_dice") is None
    cases = case_identities(open_site(tmp_path / "data/A"), "test")
    assert account(deployment).queries("test", cases) == 2


def test_a_message_is_entered_too_and_a_damaged_ledger_lets_nothing_pass(deploy, tiny_config):
    deployment = deploy()
    site = deployment.hospitals["A"]
    site.start(tiny_config(rounds=1), "job-0")
    assert not site.answer(Request("prepare")).error
    error = site.answer(Request("shell")).error
    assert account(deployment).entries()[-1].release.shape == error
    (site.kit / "medfedaug/ledger.sqlite").write_text("no ledger")
    with pytest.raises(RunFailed, match="is not a privacy ledger"):
        deployment.run(tiny_config(rounds=1))


def test_fedmix_counts_cases_and_not_slices(make_site, tiny_config):
    data = make_site("A", cases=(3, 1, 1), shape=(16, 16, 30))

    def ask(least: int):
        policy = PrivacyPolicy(min_images=least)
        trainer = SiteTrainer(tiny_config("fedmix"), data, "cpu", policy=policy)
        return Site("A", trainer).answer(Request("prepare")).error

    # Six slices with foreground, two a case: five of them are of three cases.
    assert ask(3) == ""
    assert "fedmix's statistics would summarise 3 images" in ask(4)


def test_the_ledger_finds_the_nearest_set_of_the_same_split_without_noise(tmp_path):
    ledger = PrivacyLedger(tmp_path / "ledger.sqlite")
    cases = [bytes([n]) * 16 for n in range(20)]
    release = Release("job", "model", "weights", "1", "training", 10)
    ledger.enter([release], cases[:10])
    ledger.enter([Release("other", "model", "weights", "1", "test", 4)], cases[:4])
    ledger.enter([Release("noisy", "fedrdn", "statistics", "1", "training", 9, 1.5)], cases[:9])
    assert ledger.nearest("training", cases[:10]) is None
    assert ledger.nearest("training", cases[15:]) is None
    assert ledger.nearest("training", cases[1:12]).apart == 3
    assert ledger.nearest("training", cases[:8]).apart == 2
    assert ledger.nearest("test", cases[:9]).apart == 5
    assert PrivacyLedger(tmp_path / "ledger.sqlite").nearest("training", cases[:8]).job == "job"


def test_a_case_is_known_by_its_content(make_site, tmp_path):
    data = make_site("A")
    first = case_identities(open_site(data), "training")
    assert len(first) == 2
    shutil.copytree(data, tmp_path / "copy")
    assert case_identities(open_site(tmp_path / "copy"), "training") == first
    content = json.loads((data / "dataset.json").read_text())
    image = data / content["training"][0]["image"]
    volume = nibabel.load(image)
    voxels = np.asarray(volume.dataobj).astype(np.float64)
    image.unlink()
    nibabel.save(nibabel.Nifti2Image(voxels, volume.affine), image)  # of another type and in another form
    assert case_identities(open_site(data), "training") == first
    voxels[0, 0, 0] += 1
    nibabel.save(nibabel.Nifti1Image(voxels, volume.affine), image)
    assert len(case_identities(open_site(data), "training").keys() & first) == 1


def test_a_detached_volume_is_known_by_its_voxels_whatever_its_header_names(make_site):
    data = make_site("A")
    content = json.loads((data / "dataset.json").read_text())
    for case in content["training"]:
        image = sitk.ReadImage(str(data / case["image"]))
        case["image"] = case["image"].replace(".nii.gz", ".mhd")
        sitk.WriteImage(image, str(data / case["image"]))
    (data / "dataset.json").write_text(json.dumps(content))
    site = open_site(data)
    identities, fingerprint = case_identities(site, "training"), fingerprint_files([site])
    raw = (data / content["training"][0]["image"]).with_suffix(".raw")
    voxels = bytearray(raw.read_bytes())
    voxels[-1] ^= 1
    raw.write_bytes(voxels)
    os.utime(raw, (0, 0))  # not all file systems tell two times as near as these apart
    assert len(case_identities(site, "training").keys() & identities) == 1
    assert fingerprint_files([site]) != fingerprint


def test_a_policy_with_limits_that_are_none_is_refused():
    for wrong in ({"max_test_scores": 0}, {"allow_differences": 1}):
        with pytest.raises(ConfigError, match="privacy: "):
            PrivacyPolicy.from_dict(wrong)


def test_a_disk_that_is_full_when_a_ledger_begins_leaves_nothing_unreadable(tmp_path, monkeypatch):
    def full(connection):
        connection.execute("CREATE TABLE members (cases TEXT)")
        raise sqlite3.OperationalError("database or disk is full")

    account = PrivacyLedger(tmp_path / "ledger.sqlite")
    with monkeypatch.context() as patch:
        patch.setattr(ledger, "_make", full)
        with pytest.raises(StorageError, match="the disk is full"):
            account.releases()
    assert account.releases() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.sqlite", "ledger.sqlite.lock"]
