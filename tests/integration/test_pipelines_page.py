"""`docs/pipelines.md`, `docs/plans.md`: the commands of a Bundle, a network of one's own and a plan run."""

import json
import sys
from pathlib import Path

import bundles
import pytest
import torch
from monai.bundle import ConfigParser
from page_blocks import blocks, run_shell, shell

from medfedaug.config import bundle_reference
from medfedaug.config.run import RunConfig
from medfedaug.data.phantom import make_phantom

PAGE, BUNDLE, NETWORK = "docs/pipelines.md", "From a Bundle", "A network of your own"


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    sys.modules.pop("our_networks", None)


def test_the_commands_of_a_bundle_run(run, kits, monkeypatch):
    monkeypatch.chdir(kits)
    make_phantom("data", sites=2, patients=3, shape=(20, 20, 8), seed=0)
    bundle = bundles.write(Path("bundles/spleen"), bundles.volumes())
    done = run_shell(shell(PAGE, BUNDLE), monkeypatch)
    assert len(done) == 5
    (ready,) = (out for words, out in done if words[:2] == ["site", "doctor"])
    assert "bundle spleen" in ready
    assert "jobs may use it" in " ".join(ready.split()) or "jobs may" in ready
    results = json.loads(Path("runs/spleen/results.json").read_text())
    assert list(results["test"]["mean"]) == ["mean_dice", "accuracy"]
    again = json.loads(Path("again.json").read_text())
    assert again["mean"]["mean_dice"] == pytest.approx(results["test"]["mean"]["mean_dice"])
    with monkeypatch.context() as patch:  # as in another process
        patch.setattr(bundle_reference, "_named", {})
        patch.delenv("MEDFEDAUG_BUNDLES")
        code, _, err = run("evaluate", "--model", "runs/spleen", "--data", "data", "--out", "no.json")
        assert code == 2
        assert "MEDFEDAUG_BUNDLES=DIR names the folder that holds it" in " ".join(err.split())
    images = ("--images", "data/site_A/images", "--out", "predicted")
    code, _, err = run("predict", "--model", "runs/spleen", *images)
    assert code == 2
    assert "models/model.pt" in " ".join(err.split())
    (sent,) = Path("jobs/spleen").rglob("config_fed_client.json")
    assert bundle_reference.AllowedBundle.of(bundle).hash in sent.read_text()
    (written,) = blocks(PAGE, "json", section=BUNDLE)
    (bundle / "configs/train.json").write_text((bundle / "configs/train.json").read_text() + "\n")
    code, _, err = run("evaluate", "--model", "runs/spleen", "--data", "data", "--out", "no.json")
    assert code == 2
    assert "the Bundle spleen" in " ".join(err.split())
    transform = ConfigParser({"last": json.loads(written.text)}).get_parsed_content("last")
    assert transform({"image": torch.zeros(1, 2, 2, 2)})["image"].shape == (1, 2, 2, 2)


@pytest.mark.slow  # pip, in processes
def test_the_commands_and_the_package_of_a_network_run(kits, monkeypatch):
    monkeypatch.chdir(kits)
    make_phantom("data", sites=2, patients=3, shape=(16, 16, 2), seed=0)
    Path("our-networks").mkdir()
    for language, file in (("toml", "pyproject.toml"), ("python", "our_networks.py")):
        (block,) = blocks(PAGE, language, section=NETWORK)
        Path("our-networks", file).write_text(block.text)
    done = run_shell(shell(PAGE, NETWORK), monkeypatch)
    assert [words[0] for words, _ in done] == ["networks", "simulate", "simulate", "site"]
    for name in ("highresnet", "shallow"):
        results = json.loads(Path(f"runs/{name}/results.json").read_text())
        assert RunConfig.from_dict(results["config"]).network.lower().endswith(name)
        assert results["test"]["mean"]["dice"] is not None


def test_the_commands_of_a_plan_run(kits, monkeypatch):
    """In the order of the page, with sites whose voxels differ, and a kit."""
    monkeypatch.chdir(kits)
    make_phantom("data", sites=2, patients=3, spacings=[(8, 8, 8), (10, 10, 10)], seed=0)
    done = run_shell(shell("docs/plans.md").replace("--spacing 2,2,2", "--spacing 8,8,8"), monkeypatch)
    assert {words[0] for words, _ in done} == {"plan", "simulate", "export", "site"}
    runs = {path.parent.name: json.loads(path.read_text()) for path in Path("runs").glob("*/results.json")}
    assert set(runs) == {"planned", "auto", "own"}
    plan = runs["planned"]["config"]["plan"]
    assert plan == runs["auto"]["config"]["plan"]
    assert plan["spacing"] == [8, 8, 8]
    assert runs["own"]["config"]["plan"]["patch_size"] == [64, 64, 32]
    assert set(runs["auto"]["planned"]) == {"asked", "reasons", "fingerprints"}
    assert "planned" not in runs["planned"]
    assert json.loads(Path("hospital-a/local/medfedaug.json").read_text())["memory"] == 4
