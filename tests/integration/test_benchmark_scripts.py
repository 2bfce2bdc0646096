"""Every benchmark script runs, at sizes that measure nothing."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"

SMALL = "--patients 5 --shape 16 16 2 --features 4 4 4 4 4 4 --rounds 1 --local-epochs 1"
NARROW = "--patients 3 --shape 16 16 4 --rounds 1 --local-epochs 1 --channels 4 8"
RUNS = {
    "aggregation.py --sites 3": "3 sites",
    "layouts.py --only alexnet --dimensions 2 --repeats 1": "cpu, batch norm, 2D: ",
    "short_ranking.py --out OUT --table": "named: 0 of 0",
    "memory.py --volumes 2 --shape 64 64 32 --steps 1": "| 2 |",
    "method_costs.py --batch 2 --size 32 --repeats 1": "FedFD-A / FedAvg",
    "privacy_epsilon.py --data DATA --out OUT --halve --rounds 1 --features 4 4 4 4 4 4 --seeds 0 "
    "--epsilon 8 --draws 2": "| fedfa | clipped | 0.00 |",
    "privacy_weights.py --data DATA --out OUT --site 1 --rounds 1 --steps 2 --channels 4 8 --batch-size 2 "
    "--seeds 0": "| site | 1 | ",
    f"robustness.py --out OUT --work OUT/work {NARROW} --methods fedavg median "
    "--attacks hijack": "2 x hijack",
    f"shift_gain.py --work OUT/work --out OUT {SMALL} --real own=DATA --seeds 0 1 --shifts 1 3 "
    "--methods fedavg fedrdn": "| distance | federations |",
    "promises.py --work OUT/work --out OUT --sites 2 --patients 12 --train-patients 3 --shape 32 32 4 "
    "--features 4 4 4 4 4 4 --rounds 1 --draws 3": "| calibrated at | site_A | site_B |",
    "partial_labels.py --out OUT --rounds 1 --patients 3 --remedies  --seeds 0 1 --federations alike "
    "--runs marginal condist": "",
}
"""The script with its arguments, and a part of what it prints."""
AGAIN = {
    "promises.py": "12 patients, ",
    "privacy_weights.py": " s\n",
    "robustness.py": "seed 0:",
    "shift_gain.py": " s\n",
}
"""Scripts that continue, and what they print of each run."""


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


@pytest.mark.parametrize("line", RUNS, ids=lambda line: line.partition(" ")[0])
def test_the_script_runs_and_continues(script, line, phantom_dir, tmp_path):
    (tmp_path / "out").mkdir()
    folders = {"OUT": str(tmp_path / "out"), "DATA": str(phantom_dir)}
    name, *arguments = (re.sub("OUT|DATA", lambda at: folders[at[0]], word) for word in line.split(" "))
    assert RUNS[line] in script(name, *arguments)
    if name in AGAIN:
        assert AGAIN[name] not in script(name, *arguments)


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


def test_pages_have_the_gains_that_are_computed_from_the_committed_runs(script):
    readme, retina = (
        (FOLDER.parent / page).read_text(encoding="utf-8").splitlines()
        for page in ("README.md", "docs/results/retina/index.md")
    )
    rows = script("retina_tables.py").splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    verdicts = [row for row in cells if row[1:3] == ["5", "120"]]
    assert len(verdicts) == 11
    for method, _, _, gain, interval, verdict in verdicts:
        assert any(line.startswith(f"| {method} | {gain} ({interval}) | {verdict} |") for line in retina), (
            method
        )
    in_readme = [row for row in verdicts if any(" | ".join(row[3:]) in line for line in readme)]
    assert len(in_readme) == 6
    longer = rows[-16:]
    assert [row for row in longer if row not in retina] == []
