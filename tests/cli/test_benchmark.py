"""The command `medfedaug benchmark`."""

import json

import torch
from sweeps import TINY

from medfedaug.models import build_network
from medfedaug.research.papers.presets import PRESETS


def test_the_list_names_every_protocol(run):
    code, out, _ = run("benchmark", "--list")
    assert code == 0
    for preset in PRESETS.values():
        assert f"{preset.name}\n" in out
        told = (preset.benchmark, preset.protocol, preset.config["network"], preset.schedule, preset.source)
        assert " · ".join(told) in out
    code, out, _ = run("benchmark", "fedfd_a_pacs", "--list")
    assert "The held-out site is tested with all its images" in out
    assert "https://domaingeneralization.github.io/#data" in out


def test_a_benchmark_starts_from_given_weights(run, office, tmp_path):
    state = build_network("lenet5", in_channels=3, out_channels=7).state_dict()
    torch.save({name: torch.ones_like(value) for name, value in state.items()}, tmp_path / "ones.pt")
    arguments = (
        *("benchmark", "office_caltech_10", "--data", office.parent, "--out", tmp_path / "out"),
        *("--device", "cpu", "--methods", "fedavg", "--seeds", 1, "--scale", 0.001, "--no-pictures"),
        *("--threads", 1, "--init", tmp_path / "ones.pt", "--set", *TINY, "learning_rate=1e-30"),
    )
    for _ in range(2):  # finished runs stay as they are
        code, _, err = run(*arguments)
        assert code == 0, err
    (results,) = tmp_path.glob("out/fedavg/*init=ones*/seed-0/results.json")
    record = json.loads(results.read_text())
    assert set(record["init"]["skipped"]) == {"head.8.weight", "head.8.bias"}
    weights = torch.load(results.parent / "global_model.pt", weights_only=True)
    assert bool((weights["encoder.0.0.weight"] == 1).all())


def test_the_command_runs_combinations_in_a_row_and_says_that_it_was_reduced(run, office, tmp_path):
    arguments = (
        *("benchmark", "office_caltech_10", "--data", office.parent, "--out", tmp_path, "--device", "cpu"),
        *("--methods", "fedavg", "fedrdn,fedfa", "--seeds", 1, "--scale", 0.001, "--threads", 1),
        "--no-pictures",
        *("--set", *TINY, "fedfa.prob=0.1", "fraction=1/2,1"),
    )
    code, out, err = run(*arguments)
    assert code == 0, err
    settings = "batch_size=4,fedfa.prob=0.1,image_size=32,network=lenet5,scale=0.001"
    assert f"4/4 fedrdn,fedfa/{settings}/seed-0" in err
    assert "UNFINISHED" not in out
    for name in ("table.md", "table.csv", "report.html"):
        text = (tmp_path / name).read_text()
        assert name == "table.csv" or "REDUCED, not the paper" in text
    assert len(list(tmp_path.glob("*/*/seed-0/results.json"))) == 4
    reduced = json.loads((next(tmp_path.glob("fedavg/*/seed-0")) / "results.json").read_text())
    assert reduced["config"]["rounds"] == 1
    assert reduced["data_options"]["fraction"] in (0.5, 1.0)
    code, out, err = run("report", tmp_path, "--out", tmp_path / "again.html")
    assert code == 0, err
    assert "data.fraction=0.5" in out.replace("\n", "")
    assert reduced["config"]["network"] == "lenet5"
