"""No name of a file, a case or a patient leaves a site: the server gets pseudonyms in their place."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from benchmark_files import write_volume
from hospitals import Deployment, Hospital

from medfedaug.errors import ConfigError, DataError, RunFailed, StorageError, own, withheld
from medfedaug.federation import run_in_process
from medfedaug.hospital.privacy import Pseudonyms, public_text

PATIENT = "Grotewohl_Alma"
PLANTED = re.compile("grotewohl|alma_", re.IGNORECASE)
LAX = {"privacy": {"min_images": 1}}


@pytest.fixture
def named_dir(phantom_dir, tmp_path) -> Path:
    """The phantom sites, with a patient's name in the name of every file and in the lists."""
    root = tmp_path / "data of Alma_"
    shutil.copytree(phantom_dir, root)
    for site in (path for path in root.iterdir() if path.is_dir()):
        content = json.loads((site / "dataset.json").read_text())
        for split in ("training", "validation", "test"):
            for number, item in enumerate(content.get(split, [])):
                item["patient"] = f"{PATIENT} {split} {number}"
                for kind in ("image", "label"):
                    path = Path(item[kind])
                    named = path.with_name(f"{PATIENT}_{path.name}")
                    (site / path).rename(site / named)
                    item[kind] = str(named)
        (site / "dataset.json").write_text(json.dumps(content))
    return root


@pytest.fixture
def deploy(named_dir, tmp_path):
    def make() -> Deployment:
        names = ("site_A", "site_B", "site_C")
        return Deployment([Hospital(tmp_path / "kits" / name, named_dir / name, **LAX) for name in names])

    return make


def told(deployment, server=None) -> str:
    """All that came from the sites, and what the server made of it."""
    received = [(name, reply.metrics, reply.error) for name, reply in deployment.replies]
    return repr([received, deployment.events, server.results() if server is not None else {}])


def no_image(site: Path, image: Path, listing: dict) -> None:
    image.unlink()


def other_label(site: Path, image: Path, listing: dict) -> None:
    label = site / listing["training"][0]["label"]
    write_volume(label, np.full((32, 32, 6), 9, np.uint8))


def two_splits(site: Path, image: Path, listing: dict) -> None:
    listing["test"][0]["patient"] = listing["training"][0]["patient"]


def outside(site: Path, image: Path, listing: dict) -> None:
    listing["training"][0]["image"] = f"../../{PATIENT}.nii.gz"


def no_list(site: Path, image: Path, listing: dict) -> None:
    listing["training"] = {"Grotewohl": 1}


DAMAGE = [no_image, other_label, two_splits, outside, no_list]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_message_about_bad_data_names_nobody_at_the_server_and_the_case_at_the_site(
    deploy, tiny_config, named_dir, damage, caplog
):
    site = named_dir / "site_A"
    listing = json.loads((site / "dataset.json").read_text())
    damage(site, site / listing["training"][0]["image"], listing)
    (site / "dataset.json").write_text(json.dumps(listing))
    deployment = deploy()
    with pytest.raises(RunFailed, match="site site_A") as raised:
        deployment.run(tiny_config("fedrdn", rounds=1))
    reason = next(reply.error for name, reply in deployment.replies if name == "site_A")
    assert len(reason.split()) > 4
    found = told(deployment) + str(raised.value)
    assert not PLANTED.search(found)
    assert str(named_dir.parent) not in found
    assert not PLANTED.search("\n".join(deployment.hospitals["site_A"].logged))
    here = "\n".join(record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert PLANTED.search(here)
    assert reason in here


def test_an_error_of_another_kind_leaves_only_what_kind_it_is(
    deploy, tiny_config, named_dir, monkeypatch, caplog
):
    def fails(self, *args, **kwargs):
        raise KeyError(f"{PATIENT} in {named_dir}")

    monkeypatch.setattr("medfedaug.federation.site.trainer.SiteTrainer.prepare", fails)
    deployment = deploy()
    with pytest.raises(Exception, match="KeyError in prepare; the site's own log says more"):
        deployment.run(tiny_config(rounds=1))
    assert not PLANTED.search(told(deployment))
    assert PLANTED.search(caplog.text)


def test_settings_that_cannot_be_read_do_not_tell_where_they_are(deploy, tiny_config):
    deployment = deploy()
    hospital = deployment.hospitals["site_A"]
    (hospital.kit / "local/medfedaug.json").write_text("{")
    with pytest.raises(RunFailed, match="not readable as JSON") as raised:
        deployment.run(tiny_config(rounds=1))
    assert str(hospital.kit) not in str(raised.value) + told(deployment)
    assert str(hospital.kit) in hospital.logged[0]


@pytest.mark.parametrize(
    ("error", "public"),
    [
        (DataError("is constant", site="A", path="/srv/Meyer Hans.nii"), "site A, …: is constant."),
        (ConfigError(f"patient {own('Meyer')} (says {withheld('Meyer')})"), "patient … (says …)"),
        (ConfigError("/srv/a b/Meyer: not a checkpoint"), "…: not a checkpoint"),
        (ConfigError("fedrdn/mean and/or 3/4 remain"), "fedrdn/mean and/or 3/4 remain"),
    ],
)
def test_what_is_marked_and_every_path_is_taken_out_of_a_line(error, public):
    assert public_text(error) == public
    assert "\ue000" not in str(error)


def test_names_are_found_wherever_a_message_has_them(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("Meyer.nii.gz", "cat.png", "12.png", "123456.png"):
        (tmp_path / "images" / name).write_text("")
    pseudonyms = Pseudonyms(b"k")
    line = pseudonyms.text(ConfigError("12 images, of Meyer, Meyers, 123456 and Meyer.nii.gz"), "A", tmp_path)
    hidden = [pseudonyms.of("Meyer", "name"), pseudonyms.of("123456", "name"), pseudonyms.of("Meyer")]
    assert line == f"12 images, of {hidden[0]}, Meyers, {hidden[1]} and {hidden[2]}"


def test_a_key_that_is_damaged_is_named_and_not_replaced(tmp_path):
    Pseudonyms.of_site(tmp_path)
    key = tmp_path / "pseudonyms.key"
    assert key.stat().st_mode & 0o77 == 0
    key.write_text("abc")
    with pytest.raises(ConfigError, match=r"pseudonyms\.key"):
        Pseudonyms.of_site(tmp_path)
    assert key.read_text() == "abc"


def test_simulations_keep_names(phantom_dir, tiny_config):
    server = run_in_process(tiny_config(rounds=1), phantom_dir, ["site_A", "site_B"], "cpu")
    names = server.results()["test"]["sites"]["site_A"]["cases"]
    assert not [name for name in names if name.startswith("case-")]


def test_a_full_disk_leaves_no_half_a_key(tmp_path, full_disk, monkeypatch):
    with pytest.raises(StorageError, match=r"pseudonyms\.key: cannot be written"):
        Pseudonyms.of_site(tmp_path)
    monkeypatch.undo()
    assert Pseudonyms.of_site(tmp_path).of("a") == Pseudonyms.of_site(tmp_path).of("a")
