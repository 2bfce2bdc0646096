"""No method's step takes more operations on a device than `benchmarks/operations.json` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
RECORDED = json.loads((FOLDER / "operations.json").read_text(encoding="utf-8"))
FAST = ("fedfa", "fedfd_a")
"""Their steps contain those of plain averaging and of FedFD."""
LAYERS = 5
"""FFA layers of the script's classifier."""


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in RECORDED]
)
@pytest.mark.filterwarnings("ignore")
def test_no_step_has_grown(monkeypatch, method):
    monkeypatch.syspath_prepend(str(FOLDER))
    from operations import PHASES, operations

    _, counts, _ = operations(method)
    counts["step"] = sum(counts[phase] for phase in PHASES)
    assert {key: value for key, value in counts.items() if value > RECORDED[method][key]} == {}


def test_the_methods_stay_near_plain_averaging():
    step = {method: RECORDED[method]["step"] for method in RECORDED}
    assert step["fedfa"] <= step["fedavg"] + 12 * LAYERS
    assert step["fedfd"] <= 2.2 * step["fedavg"]
    assert step["fedfd_a"] <= 3.2 * step["fedavg"]
    assert RECORDED["fedfd_a"]["inference"] <= 1.5 * RECORDED["fedavg"]["inference"]
