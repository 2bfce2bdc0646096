"""`docs/pipelines.md`: a Bundle and a network of one's own, as the page says."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import bundles
import pytest
import torch
from monai.bundle import ConfigParser

from medfedaug.config import bundle_reference
from medfedaug.config.run import RunConfig
from medfedaug.data.datasets.phantom import make_phantom

PAGE = (Path(__file__).resolve().parents[2] / "docs/pipelines.md").read_text(encoding="utf-8")
FAST = {
    "simulate": ("--engine", "inprocess", "--no-report"),
    "evaluate": ("--device", "cpu", "--out", "again.json"),
    "site-config": (),
    "doctor": None,
    "export": (),
    "networks": (),
}


def section(title: str) -> str:
    return re.split(r"^## ", PAGE.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    sys.modules.pop("our_networks", None)


def carry_out(text, run, monkeypatch) -> list[str]:
    """Each command of a section, in its order; returns their names."""
    done = []
    for line in (line for block in blocks(text, "bash") for line in block.splitlines()):
        words = shlex.split(line)
        while "=" in words[0]:
            monkeypatch.setenv(*words.pop(0).split("="))
        if words[0] == "pip":
            pip = [sys.executable, "-m", *words, "--quiet", "--no-deps", "--no-build-isolation"]
            subprocess.run([*pip, "--target", "site-packages"], check=True)
            monkeypatch.syspath_prepend(str(Path("site-packages").resolve()))
            continue
        done.append(words[1])
        more = FAST[words[1]]
        code, out, err = run(*words[1:], *(more or ()))
        assert code == 0 or more is None, (words, err)
        if more is None:  # of a whole site, which has no data here
            assert "bundle spleen" in out
            assert "jobs may use it" in out.replace("\n", " ") or "jobs may" in out
    return done


def test_the_commands_of_a_bundle_run(run, kits, monkeypatch):
    monkeypatch.chdir(kits)
    make_phantom("data", sites=2, patients=3, shape=(20, 20, 8), seed=0)
    bundle = bundles.write(Path("bundles/spleen"), bundles.volumes())
    assert len(carry_out(section("From a Bundle"), run, monkeypatch)) == 5
    results = json.loads(Path("runs/spleen/results.json").read_text())
    assert list(results["test"]["mean"]) == ["mean_dice", "accuracy"]
    again = json.loads(Path("again.json").read_text())
    assert again["mean"]["mean_dice"] == pytest.approx(results["test"]["mean"]["mean_dice"])
    with monkeypatch.context() as patch:  # as in another process
        patch.setattr(bundle_reference, "_given", {})
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
    (written,) = blocks(section("From a Bundle"), "json")
    (bundle / "configs/train.json").write_text((bundle / "configs/train.json").read_text() + "\n")
    code, _, err = run("evaluate", "--model", "runs/spleen", "--data", "data", "--out", "no.json")
    assert code == 2
    assert "the Bundle spleen" in " ".join(err.split())
    transform = ConfigParser({"last": json.loads(written)}).get_parsed_content("last")
    assert transform({"image": torch.zeros(1, 2, 2, 2)})["image"].shape == (1, 2, 2, 2)


def test_the_commands_and_the_package_of_a_network_run(run, kits, monkeypatch):
    monkeypatch.chdir(kits)
    make_phantom("data", sites=2, patients=3, shape=(16, 16, 2), seed=0)
    text = section("A network of your own")
    Path("our-networks").mkdir()
    for language, file in (("toml", "pyproject.toml"), ("python", "our_networks.py")):
        (block,) = blocks(text, language)
        Path("our-networks", file).write_text(block)
    assert carry_out(text, run, monkeypatch) == ["networks", "simulate", "simulate", "site-config"]
    for name in ("highresnet", "shallow"):
        results = json.loads(Path(f"runs/{name}/results.json").read_text())
        assert RunConfig.from_dict(results["config"]).network.lower().endswith(name)
        assert results["test"]["mean"]["dice"] is not None
