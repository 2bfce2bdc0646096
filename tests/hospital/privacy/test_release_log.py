"""The account of all that leaves a site: what is in it, what it keeps back, and that names do not matter."""

import json
import re
import shutil

import nibabel
import numpy as np
import pytest
from hospitals import Deployment, Hospital

from medfedaug.data.sites import open_site
from medfedaug.errors import RunFailed
from medfedaug.federation import SiteTrainer
from medfedaug.federation.messages.messages import Request
from medfedaug.federation.site.site import Site
from medfedaug.hospital.privacy import PrivacyLedger, PrivacyPolicy
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.hospital.privacy.release_log import case_identities

FREE = {"allow_limit": True}
NOISE = {
    **{"noise_multiplier": 1.0, "epsilon": 9.0, "min_images": 1},
    "clip": {"intensity_mean": [0, 1], "intensity_std": [0.01, 1]},
}


@pytest.fixture
def deploy(make_site, tmp_path):
    """Two sites with eight training cases each; what leaves them summarises three or more."""
    for name in ("A", "B"):
        make_site(name, cases=(8, 3, 3))

    def make(**privacy) -> Deployment:
        settings = {"privacy": {"min_images": 3, **privacy}, "jobs": FREE}
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
    assert releases.count(("task", "scores", "validation", 3)) == 2
    assert releases.count(("task", "scores", "test", 3)) == 1
    assert releases.count(("task", "numbers", *training)) == 3
    assert len(releases) == 11
    assert {r.job for r in entries} == {"job-1"}
    weights = [r for r in entries if r.kind == "weights"]
    assert weights[0].digest != weights[1].digest
    code, out, err = run("site", "ledger", deployment.hospitals["A"].kit)
    assert code == 0, err
    assert re.search(r"job-1.*fedfa.*statistics", re.sub(r"[│┃\s]+", " ", out))
    assert run("site", "ledger", deployment.hospitals["A"].kit, "--every")[1].count("\n") > out.count("\n")


def test_epsilon_does_not_begin_again_when_a_site_is_renamed(make_site, tiny_config, tmp_path):
    data = make_site("A", cases=(6, 1, 1))
    other = make_site("other", cases=(6, 1, 1))
    ledger, spent = tmp_path / "ledger.sqlite", []
    for name, folder in (("A", data), ("B", data), ("C", other)):
        policy = PrivacyPolicy.from_dict(NOISE)
        trainer = SiteTrainer(tiny_config("fedrdn"), folder, "cpu", privacy=SitePrivacy(policy, ledger))
        assert not Site(name, trainer).answer(Request("prepare")).error
        spent.append(trainer.guard.metrics()["privacy/epsilon"])
    assert spent[1] > spent[0]
    assert spent[2] == pytest.approx(spent[0])  # other patients have a budget of their own


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
