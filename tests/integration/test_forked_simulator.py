"""A simulation in forks of a prepared process gives the same bits as one in fresh processes."""

from __future__ import annotations

import json

import pytest
import torch

from medfedaug.config.run import Execution
from medfedaug.nvflare_jobs.simulator.simulator import LOG_FILE, run_in_simulator
from medfedaug.nvflare_jobs.simulator.simulator_process import FAST_START_VARIABLE, no_fast_start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(no_fast_start() is not None, reason=f"no fast start: {no_fast_start()}"),
]


def simulated(config, data, work):
    work.mkdir()
    output = run_in_simulator(
        config, data, ["site_A", "site_B", "site_C"], work, "cpu", execution=Execution(threads=1)
    )
    return json.loads((output / "results.json").read_text()), torch.load(
        output / "final_model.pt", weights_only=True
    )


def numbers(results):
    """All but times, dates and the name that each run draws for itself."""
    if isinstance(results, list):
        return [numbers(entry) for entry in results]
    if isinstance(results, dict):
        return {k: numbers(v) for k, v in results.items() if "seconds" not in k and k not in ("run", "date")}
    return results


def test_forks_give_the_same_bits_as_fresh_processes(phantom_dir, tmp_path, tiny_config, monkeypatch):
    config = tiny_config("fedrdn,fedfa", rounds=2)
    monkeypatch.delenv(FAST_START_VARIABLE, raising=False)
    results, model = simulated(config, phantom_dir, tmp_path / "forks")
    monkeypatch.setenv(FAST_START_VARIABLE, "0")
    expected, expected_model = simulated(config, phantom_dir, tmp_path / "fresh")
    assert "afresh" not in (tmp_path / "forks" / LOG_FILE).read_text()
    assert numbers(results) == numbers(expected)
    assert model.keys() == expected_model.keys()
    assert all(torch.equal(model[key], expected_model[key]) for key in model)
