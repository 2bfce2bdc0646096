"""Sweeps continue where they stopped, and leave finished runs alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from benchmark_files import picture
from PIL import Image
from sweeps import OFFICE_PRESET, TINY, planned, scores, snapshot

from medfedaug.data.preparation.cache import DecodedMemory, keep_decoded
from medfedaug.errors import ConfigError
from medfedaug.research.datasets.benchmarks import open_benchmark
from medfedaug.research.sweeps.sweep import run_all
from medfedaug.research.sweeps.tables import write_tables
from medfedaug.research.sweeps.workers import find_workers


def test_a_sweep_that_was_stopped_continues_and_leaves_finished_runs_alone(office, tmp_path, monkeypatch):
    runs = planned(office, seeds=1)
    assert len(runs) == 2
    assert runs[0].config.rounds == 2
    opened = []
    monkeypatch.setattr(Image, "open", lambda path, open_=Image.open: opened.append(path) or open_(path))
    run_all(runs, OFFICE_PRESET, office, tmp_path / "whole", device="cpu")
    assert len(opened) == len(set(opened)) == 4 * 14  # all runs share what was decoded

    rounds = []

    def stop(event):
        rounds.append(event["event"])
        if rounds.count("round_finished") == 4:  # after the second run's first round was saved
            raise KeyboardInterrupt

    out = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        run_all(runs, OFFICE_PRESET, office, out, device="cpu", on_event=stop)
    first, second = out / runs[0].folder, out / runs[1].folder
    assert (first / "results.json").exists()
    assert not (second / "results.json").exists()
    before, events = snapshot(first), []
    assert run_all(runs[::-1], OFFICE_PRESET, office, out, device="cpu", on_event=events.append) == {}
    assert snapshot(first) == before
    finished = [(e["folder"], e["number"], e["made"]) for e in events if e["event"] == "run"]
    # What is there comes first.
    assert finished == [(str(runs[0].folder), 1, False), (str(runs[1].folder), 2, True)]
    assert [e["round"] for e in events if e["event"] == "resumed"] == [1]
    for run in runs:
        assert scores(out / run.folder) == scores(tmp_path / "whole" / run.folder)
    log = [json.loads(line)["event"] for line in Path(f"{second}.log").read_text().splitlines()]
    assert log.count("resumed") == 1
    everything, events = {str(run.folder): snapshot(out / run.folder) for run in runs}, []
    run_all(runs, OFFICE_PRESET, office, out, device="cpu", on_event=events.append)
    assert {event["event"] for event in events} == {"run"}
    assert {str(run.folder): snapshot(out / run.folder) for run in runs} == everything


def test_a_sweep_does_not_count_finished_runs_of_other_files(office, tmp_path):
    """A test image was replaced: new runs are not mixed with the old ones, which are in no table."""
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(office, data)
    (run,) = planned(data, "fedavg", seeds=1, scale=0.001)
    assert run_all([run], OFFICE_PRESET, data, out, device="cpu") == {}
    site = open_benchmark("office_caltech_10", data)[1]
    picture(site.cases["test"][0].image, 7)
    failed = run_all([run], OFFICE_PRESET, data, out, device="cpu")
    assert list(failed) == [run.folder]
    assert f"site {site.name}, " in failed[run.folder]
    assert "has other files since the finished run" in failed[run.folder]
    with pytest.raises(ConfigError, match="no run is finished"):
        write_tables([run], OFFICE_PRESET, out, failed=failed)


def test_a_run_that_fails_is_named_and_the_others_are_made(office, tmp_path):
    runs = planned(office, "fedavg fedprox", ["fedprox.mu=1e38"], seeds=1)
    events = []
    failed = run_all(runs, OFFICE_PRESET, office, tmp_path, device="cpu", on_event=events.append)
    assert list(failed) == [runs[1].folder]
    assert "round 1: 0 of 4 needed updates" in failed[runs[1].folder]
    _, notes = write_tables(runs, OFFICE_PRESET, tmp_path)
    assert notes[0] == "UNFINISHED: 1 of 2 runs."
    assert notes[0] in (tmp_path / "table.md").read_text()
    with pytest.raises(ConfigError, match="--workers needs --engine inprocess"):
        run_all(runs, OFFICE_PRESET, office, tmp_path, engine="nvflare", workers=find_workers("2", tmp_path))


@pytest.mark.slow
def test_a_sweep_that_is_stopped_takes_its_processes_along(office, tmp_path):
    """Or they would go on, and the next sweep would write to the same folders."""
    command = [
        *(sys.executable, "-m", "medfedaug.cli", "benchmark", "office_caltech_10", "--data", str(office)),
        *("--methods", "fedavg", "fedprox", "--out", str(tmp_path), "--workers", "2", "--device", "cpu"),
        *("--set", *TINY),
    ]
    command[1:3] = ["-c", "from medfedaug.cli import main; main()"]
    for stop in (signal.SIGINT, signal.SIGKILL):
        sweep = subprocess.Popen(
            command,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        while sweep.poll() is None and not any(
            "round_finished" in log.read_text() for log in tmp_path.glob("*/*/*.log")
        ):
            time.sleep(0.2)
        assert sweep.poll() is None
        sweep.send_signal(stop)  # to it alone, as from a scheduler
        sweep.wait(120)
        for _ in range(100):
            try:
                os.killpg(sweep.pid, 0)
            except ProcessLookupError:
                break
            time.sleep(0.2)
        else:
            os.killpg(sweep.pid, signal.SIGKILL)
            pytest.fail("processes are left")
        for log in tmp_path.glob("*/*/*.log"):
            log.unlink()


def test_what_does_not_fit_in_memory_is_decoded_again(office):
    memory = DecodedMemory(max_bytes=100)
    files, decoded = {"big": torch.zeros(40), "small": torch.zeros(20)}, []
    for name in ("big", "small") * 3:
        kept_or_read = memory.get((name,), lambda name=name: decoded.append(name) or files[name])
        assert torch.equal(kept_or_read, files[name])
    assert (decoded, memory.num_bytes) == (["big", "small", "big", "big"], 80)
    site = open_benchmark("office_caltech_10", office)[0]
    case = site.cases["test"][0]
    with keep_decoded(2**20) as kept:
        first = site.load_image(case)
        assert site.load_image(case) is first
        torch.testing.assert_close(site.load_image(case, "scale"), first / 255)
        assert kept.num_bytes == first.numel()
    assert site.load_image(case) is not first
