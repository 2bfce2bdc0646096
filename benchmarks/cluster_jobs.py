"""Seconds of a tiny comparison by its workers, and of a search: each a command of a user.

A phantom of two sites, a U-Net of three levels, one round: a run computes almost nothing, and the rest is the
cost of a job. Slurm (`SLURM_CONF`) and Dask's scheduler must run before.

    python benchmarks/cluster_jobs.py --workers 1 local:2 slurm:short --trials 20
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from measure import hardware, parser

from medfedaug.data.datasets.phantom import make_phantom

NETWORK = {"channels": [4, 8, 8], "strides": [2, 2], "norm": "instance"}
COMMAND = [sys.executable, "-c", "from medfedaug.cli import main; main()", "benchmark"]


def seconds(out: Path, *arguments: object) -> str:
    """Run ``medfedaug benchmark``; return elapsed and processor seconds, with Slurm's jobs."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = subprocess.Popen([*COMMAND, *map(str, arguments), "--out", str(out)], stdout=subprocess.DEVNULL)
    jobs: dict[int, float] = {}  # no children of the command
    while command.poll() is None:
        for process in psutil.process_iter(["pid", "cmdline", "cpu_times"]):
            line = process.info["cmdline"] or ()
            if "submitit.core._submit" in line and any(str(out) in part for part in line):
                jobs[process.info["pid"]] = sum(process.info["cpu_times"][:2])
        time.sleep(0.1)
    if command.returncode:
        raise SystemExit(f"exit code {command.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    children = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{time.perf_counter() - started:.0f} | {children + sum(jobs.values()):.1f}"


def main() -> None:
    """Print a table of commands and seconds."""
    arguments = parser(__doc__, 1)
    arguments.add_argument("--workers", nargs="*", default=["1", "local:2"], help="default 1 local:2")
    arguments.add_argument("--runs", type=int, nargs="+", default=[1, 4], help="default 1 4")
    arguments.add_argument("--trials", type=int, default=20, help="of the search, 0 for none (default 20)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{hardware()}\n\n| command | runs | seconds | of processors |\n|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        data, search = Path(folder, "data"), Path(folder, "search.yml")
        make_phantom(data, sites=2, patients=5, shape=(32, 32, 4))
        small = ("network=unet", f"network_args={json.dumps(NETWORK)}", "rounds=1", "batch_size=4")
        own = ("--data", data, "--threads", options.threads, "--set", *small)
        for turn in range(options.repeats):
            for where in options.workers:
                for runs in options.runs:
                    out = Path(folder, f"{where.replace(':', '-')}-{runs}-{turn}")
                    what = ("--methods", "norm", "--seeds", runs, "--workers", where)
                    took = seconds(out, *own, *what)
                    print(f"| `--workers {where}` | {runs} | {took} |", flush=True)
        if options.trials:
            search.write_text("learning_rate: {low: 0.0001, high: 0.01, log: true}\n")
            what = ("--methods", "norm", "--seeds", 1, "--search", search, "--trials", options.trials)
            took = seconds(Path(folder, "found"), *own, *what)
            print(f"| `--search`, one worker | {options.trials} and the winner | {took} |", flush=True)


if __name__ == "__main__":
    main()
