"""Seconds of a tiny comparison by who makes its runs, and of a search; each is one command of a user.

A phantom of two sites, a U-Net of three levels, one round: a run computes next to nothing, and the rest is
the cost of a job. Slurm has to be there before (`SLURM_CONF`), and Dask's scheduler too.

    python benchmarks/cluster_jobs.py --workers 1 local:2 slurm:short --trials 20
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure import hardware, parser

from medfedaug.data.datasets.phantom import make_phantom

NETWORK = {"channels": [4, 8, 8], "strides": [2, 2], "norm": "instance"}
COMMAND = [sys.executable, "-c", "from medfedaug.cli import main; main()", "benchmark"]


def seconds(*arguments: object) -> float:
    """Run ``medfedaug benchmark``; returns the seconds that it took."""
    started = time.perf_counter()
    subprocess.run([*COMMAND, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Print a table of commands and seconds."""
    given = parser(__doc__, 1)
    given.add_argument("--workers", nargs="+", default=["1", "local:2"], help="default 1 local:2")
    given.add_argument("--runs", type=int, nargs="+", default=[1, 4], help="of a comparison (default 1 4)")
    given.add_argument("--trials", type=int, default=20, help="of the search, 0 for none (default 20)")
    options = given.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{hardware()}\n\n| command | runs | seconds |\n|---|---:|---:|")
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
                    took = seconds(*own, "--out", out, *what)
                    print(f"| `--workers {where}` | {runs} | {took:.1f} |", flush=True)
        if options.trials:
            search.write_text("learning_rate: {low: 0.0001, high: 0.01, log: true}\n")
            what = ("--methods", "norm", "--seeds", 1, "--search", search, "--trials", options.trials)
            took = seconds(*own, "--out", Path(folder, "found"), *what)
            print(f"| `--search`, one worker | {options.trials} and the winner | {took:.1f} |", flush=True)


if __name__ == "__main__":
    main()
