"""The examples run, and before and after differ by no more than they promise."""

import difflib
import runpy
import sys
from pathlib import Path

import pytest
from monai.bundle import ConfigWorkflow
from running import command

from medfedaug.data.phantom import make_phantom
from medfedaug.models import ffa_layers
from medfedaug.statistics import load_statistics
from medfedaug.transforms import FedRDNd

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = (EXAMPLES / "monai_training.py", EXAMPLES / "monai_training_medfedaug.py")
BUNDLES = (EXAMPLES / "bundle/train.json", EXAMPLES / "bundle/train_medfedaug.json")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Two small phantom sites and the file of their statistics, made as the examples say."""
    folder = tmp_path_factory.mktemp("examples") / "data"
    make_phantom(folder, sites=2, patients=4, shape=(32, 32, 8))
    assert command("statistics", "--data", folder, "--out", folder / "statistics.json")[0] == 0
    assert set(load_statistics(folder / "statistics.json")) == {"site_A", "site_B"}
    return folder


def changes(before: Path, after: Path) -> tuple[list[str], list[str]]:
    """Lines that are gone and lines that are new; empty ones do not count."""
    difference = list(difflib.ndiff(before.read_text().splitlines(), after.read_text().splitlines()))
    gone, new = (
        [line[2:].strip() for line in difference if line.startswith(sign) and line[2:].strip()]
        for sign in ("- ", "+ ")
    )
    return gone, new


@pytest.mark.parametrize(("before", "after"), [SCRIPTS, BUNDLES], ids=["script", "bundle"])
def test_at_most_three_lines_apart(before, after):
    gone, new = changes(before, after)
    assert len(gone) <= len(new) <= 3
    assert any("FedRDNd" in line for line in new)
    assert any("insert_ffa" in line for line in new)
    assert not any("medfedaug" in line for line in gone)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_runs(script, root, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), str(root), "--epochs", "1"])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("epoch 1: loss ")
    assert [line.split(":")[0] for line in lines[1:]] == ["site_A", "site_B"]
    assert all(0 <= float(line.split()[-1]) <= 1 for line in lines[1:])


@pytest.mark.parametrize("config", BUNDLES, ids=lambda path: path.stem)
def test_the_bundle_runs(config, root, capsys):
    # What `monai.bundle.run` calls, with the parsed content within reach.
    workflow = ConfigWorkflow(str(config), workflow_type=None, logging_file=False)
    for key, value in {"root": str(root), "epochs": 1}.items():
        workflow.parser[key] = value
    workflow.initialize()
    workflow.run()
    printed = capsys.readouterr().out
    assert "epoch 1 loss" in printed
    assert "validation Dice" in printed

    network = workflow.parser.get_parsed_content("network")
    ours = config == BUNDLES[1]
    assert len(ffa_layers(network)) == (3 if ours else 0)
    if ours:
        assert any(int(layer.num_active_batches) for layer in ffa_layers(network).values())
        for part, site in (("train", None), ("validate", "site_A")):
            transforms = workflow.parser.get_parsed_content(f"{part}#transforms")
            (normalise,) = [t for t in transforms if isinstance(t, FedRDNd)]
            assert normalise.normalizer.site == site


def test_an_unknown_engine_is_refused_with_what_may_be_meant(root, tmp_path):
    code, _, err = command(
        *("simulate", "--data", root, "--methods", "fedavg"),
        *("--engine", "nvflar", "--out", tmp_path / "run"),
    )
    assert code == 2
    assert "engine 'nvflar' is not known; did you mean nvflare? All: nvflare, inprocess" in err
    assert not (tmp_path / "run").exists()
