"""A Bundle across provisioned hospitals: mutual TLS, code forbidden, each with a copy of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import bundles
import pytest
from rehearsed_hospitals import HOSPITALS, SERVER, Rehearsal

from medfedaug.config.bundle_reference import AllowedBundle


def patches_of_four_slices(config):
    """The rehearsal's volumes have six."""
    config["train"]["random_transforms"][0]["spatial_size"] = [16, 16, 4]
    config["validate"]["inferer"]["roi_size"] = [16, 16, 4]
    return config


def allow(system: Rehearsal, name: str, folder: Path) -> None:
    printed = system.medfedaug("site-config", "--kit", system.kit(name), "--allow-bundle", folder)
    assert "spleen" in printed


def collected(system: Rehearsal, job: Path) -> dict:
    identifier = system.submit(job)
    system.wait(identifier)
    return dict(json.loads((system.collect(identifier) / "results.json").read_text()))


@pytest.mark.slow
def test_provisioned_hospitals_run_a_bundle_they_allowed_and_one_with_another_version_refuses(tmp_path):
    three = HOSPITALS[:3]
    with Rehearsal(tmp_path / "work", hospitals=three) as system:
        lead = bundles.write(system.work / "lead/spleen", patches_of_four_slices(bundles.volumes()))
        copies = {name: shutil.copytree(lead, system.work / f"at {name}/spleen") for name in (SERVER, *three)}
        train = copies[three[2]] / "configs/train.json"
        theirs = train.read_text()
        train.write_text(theirs.replace('"overlap": 0.25', '"overlap": 0.5'))
        system.provision()
        system.make_data()
        system.configure(forbid_code=True, only_ours=True)
        for name, copy in copies.items():
            allow(system, name, copy)
        assert "bundle spleen" in system.medfedaug("doctor", "--kit", system.kit(three[0]), "--offline")
        system.start_kits()
        job = system.work / "jobs/spleen"
        system.medfedaug(
            *("export", "--bundle", lead, "--methods", "fedrdn,fedfa", "--rounds", "2"),
            *("--classes", "background,lesion", "--min-sites", "2", "--out", job),
        )

        refused = collected(system, job)
        assert set(refused["test"]["sites"]) == set(three[:2])
        (reason,) = refused["left_out"].values()
        mine, other = (AllowedBundle.of(path).hash[:8] for path in (lead, copies[three[2]]))
        assert f"{three[2]}: job refused: the Bundle spleen that is allowed here" in reason
        assert other in reason
        assert mine in reason

        train.write_text(theirs)
        allow(system, three[2], copies[three[2]])
        results = collected(system, job)
        assert set(results["test"]["sites"]) == set(three)
        assert not results["left_out"]
        assert list(results["test"]["mean"]) == ["mean_dice", "accuracy"]
        assert results["config"]["bundle"] == AllowedBundle.of(lead).reference
        for entry in results["rounds"]:
            assert {"model", "fedfa"} <= set(entry["bytes"])
        for path in job.rglob("*"):
            assert path.is_dir() or b"_target_" not in path.read_bytes()
        assert system.named(system.kit(SERVER)) == []
        system.shut_down()
