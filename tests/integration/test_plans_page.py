"""`docs/plans.md`: its commands run, and its table has every field."""

import json
from pathlib import Path

from page_blocks import ROOT, run_shell, shell

from medfedaug.data.phantom import make_phantom

PAGE = (ROOT / "docs/plans.md").read_text(encoding="utf-8")


def test_the_commands_run(kits, monkeypatch):
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
