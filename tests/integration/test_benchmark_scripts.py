"""Every benchmark script runs, at sizes that measure nothing."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from finished_runs import simulated

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

RUNS = {
    "aggregation.py": (["--sites", "3"], "3 sites"),
    "layouts.py": (["--only", "alexnet", "--dimensions", "2", "--repeats", "1"], '("cpu", "batch", 2): '),
    "memory.py": (["--volumes", "2", "--shape", "64", "64", "32", "--steps", "1"], "| 2 |"),
    "method_costs.py": (["--batch", "2", "--size", "32", "--repeats", "1"], "FedFD-A / FedAvg"),
}


@pytest.fixture
def script(monkeypatch, capsys):
    """Run a script as the main program, in this process: what it prints."""

    def run(name: str, *arguments: object) -> str:
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    yield run
    for name in ("measure", "shift_gain"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", RUNS)
def test_the_script_runs(script, name):
    arguments, expected = RUNS[name]
    printed = script(name, *arguments)
    assert expected in printed
    assert "1 thread(s)" in printed.splitlines()[0]


def test_the_order_of_cases_is_judged_by_their_dice(script, phantom_dir, tmp_path):
    """The script itself compares each Dice with the run's record."""
    run = simulated(phantom_dir, tmp_path / "run", "fedavg")
    record = tmp_path / "cases.jsonl"
    printed = script(
        "look_first.py", run, "--data", phantom_dir, "--record", record, "--draws", 3
    ).splitlines()
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert {row["site"] for row in rows} == {"site_A", "site_B", "site_C"}
    measured = ("dice", "dice_of_mean", "confidence", "agreement", "mean_confidence")
    assert all(0 <= row[score] <= 1 for row in rows for score in measured)
    for split in ("validation", "test"):
        count = sum(row["split"] == split for row in rows)
        first = printed.index(f"{split}: {count} cases of {count} patients in 1 runs")
        assert printed[first + 6].startswith("| soft Dice confidence | ")
        assert re.match(r"size outside: \d+ of \d+ cases, mean Dice ", printed[first + 2])


def test_gain_against_shift_runs_and_continues(script, phantom_dir, tmp_path):
    small = ["--patients", 5, "--shape", 16, 16, 2, "--features", *[4] * 6]
    small += ["--rounds", 1, "--local-epochs", 1, "--real", f"own={phantom_dir}"]
    cells = ["--seeds", 0, 1, "--shifts", 1, 3, "--methods", "fedavg", "fedrdn"]
    where = ["--work", tmp_path / "work", "--out", tmp_path / "out"]
    printed = script("shift_gain.py", *where, *small, *cells)
    assert printed.count(" s\n") == 8
    assert "| distance | federations |" in printed
    record = json.loads((tmp_path / "out/numbers.json").read_text())
    assert record["real"]["own"] > 0
    assert {(run["seed"], run["shift"]) for run in record["runs"]} == {(0, 1), (0, 3), (1, 1), (1, 3)}
    assert (tmp_path / "out/gain.png").exists()
    assert " s\n" not in script("shift_gain.py", *where, *small, *cells)
    assert json.loads((tmp_path / "out/numbers.json").read_text())["runs"] == record["runs"]


def test_the_gradient_of_the_alignment_is_measured(script, tmp_path):
    small = ["--patients", 5, "--shape", 32, 32, 4, "--features", *[4] * 6, "--rounds", 3, "--steps", 3]
    chosen = ["--batches", 4, "--weights", 0, 0.1, "--samples", "pixels"]
    where = ["--work", tmp_path / "work", "--out", tmp_path / "out"]
    printed = script("alignment.py", "phantom", *where, *small, *chosen)
    assert "| phantom | pixels | 4 | 0.1 | 0.01 | -1 | stored | 1 |" in printed
    plain, aligned = json.loads((tmp_path / "out/numbers.json").read_text())["runs"]
    assert "ratio" not in plain
    assert aligned["ratio_90"] >= aligned["ratio"] > 0
    assert 0 <= aligned["outside"] <= 1
    assert aligned["moved"] > 0
    assert aligned["term"] > 0


def test_accuracy_against_epsilon_runs(script, phantom_dir, tmp_path):
    options = ["--rounds", 1, "--features", *[4] * 6, "--seeds", 0, "--epsilon", 8, "--draws", 2]
    printed = script("privacy_epsilon.py", "--data", phantom_dir, "--out", tmp_path, "--halve", *options)
    assert "| fedfa | clipped | 0.00 |" in printed
    assert (tmp_path / "epsilon.png").exists()
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert [r["level"] for r in numbers["runs"]] == ["none", "none", "none", "clipped", "clipped", "8", "8"]
    assert all(7.9 < e <= 8 for r in numbers["runs"][-2:] for e in r["epsilon"].values())


def test_accuracy_against_the_noise_of_weights_runs_and_continues(script, phantom_dir, tmp_path):
    options = ["--rounds", 1, "--steps", 2, "--channels", 4, 8, "--batch-size", 2, "--seeds", 0]
    where = ["--data", phantom_dir, "--out", tmp_path, "--site", "1"]
    printed = script("privacy_weights.py", *where, *options)
    plain, site = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert plain["epsilon"] == {}
    assert all(epsilon > 0 for epsilon in site["epsilon"].values())
    assert f"| site | 1 | {site['dice']:.3f} |" in printed
    assert " s\n" not in script("privacy_weights.py", *where, *options)


def test_hostile_sites_are_compared_with_honest_ones(script, tmp_path):
    small = ["--patients", 3, "--shape", 16, 16, 4, "--rounds", 1, "--local-epochs", 1, "--channels", 4, 8]
    chosen = ["--methods", "fedavg", "median", "--attacks", "label flip", "hijack"]
    options = ["--out", tmp_path / "out", "--work", tmp_path, *small, *chosen]
    printed = script("robustness.py", *options)
    assert "median: 2 x label flip from site 0, seed 0" in printed
    runs = json.loads((tmp_path / "out/numbers.json").read_text())["runs"]
    assert [len(run["dice"]) for run in runs] == [5, 5, 4, 4, 4, 4, 3, 3, 3, 3]
    assert "seed 0:" not in script("robustness.py", *options)


@pytest.mark.parametrize("rounds", [20, 1000])
def test_nothing_is_lost_in_many_rounds_with_faults(script, tmp_path, rounds):
    """The script checks every round by itself."""
    script("soak.py", "--work", tmp_path, "--rounds", rounds, "--seed", 3, "--out", tmp_path / "summary.json")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rounds"] == rounds
    assert summary["updates refused or missing"] > 0
    assert summary["updates used"] > 2 * rounds
    first, last = summary["memory MiB"].values()
    assert last["resident"] < first["resident"] + 50 + 0.25 * rounds
    if rounds == 1000:  # all sites are there at the beginning of what is compared, but for one
        assert last["allocated"] < first["allocated"] + 20
        assert last["Python's blocks"] < first["Python's blocks"] + 100 * rounds


def test_sites_that_outline_different_structures_are_compared(script, tmp_path):
    small = ["--out", tmp_path, "--rounds", 1, "--patients", 3, "--remedies", "", "--seeds", 0, 1]
    script("partial_labels.py", *small, "--federations", "alike", "--runs", "marginal", "condist")
    reference, other = (tmp_path / "table.md").read_text().splitlines()[2:]
    assert reference.startswith("| alike | marginal |")
    assert reference.endswith("| 2 | reference |")
    assert other.endswith("| 2 | open: 2 of 5 seeds |")


def test_steps_are_measured_by_network(script, tmp_path):
    out = tmp_path / "steps.json"
    assert "lenet5, 28 x 28" in script("step_times.py", "--out", out, "--only", "lenet5", "--repeats", 1)
    measured = json.loads(out.read_text())["cpu"]
    assert "1 thread(s)" in measured["hardware"]
    assert set(measured["networks"]) == {"lenet5, 28 x 28, batch 10", "lenet5, 28 x 28, batch 64"}
    assert all(one["step"] > one["pass"] > 0 for one in measured["networks"].values())


def test_pages_have_the_gains_that_are_computed_from_the_committed_runs(script):
    readme, results, retina = (
        (FOLDER.parent / page).read_text(encoding="utf-8").splitlines()
        for page in ("README.md", "docs/results/index.md", "docs/results/retina/index.md")
    )
    rows = script("retina_tables.py").splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    verdicts = [row for row in cells if row[1:3] == ["5", "120"]]
    assert len(verdicts) == 11
    for method, _, _, gain, interval, verdict in verdicts:
        assert any(
            line.startswith(f"| {method} |") and line.endswith(f"| {gain} ({interval}) | {verdict} |")
            for line in results
        ), method
    in_readme = [row for row in verdicts if any(" | ".join(row[3:]) in line for line in readme)]
    assert len(in_readme) == 6
    longer = rows[-16:]
    assert [row for row in longer if row not in retina] == []
