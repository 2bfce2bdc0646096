"""Idle time of a round: our NVFlare job, also with secure aggregation, and NVFlare's plain FedAvg recipe.

All run in the simulator with the same network, the same number of sites and little computation. The idle time
of a round is its duration at the server minus the longest work of a site. The script also lists the steps of
a round under secure aggregation, each from its request to the next one.

    python benchmarks/nvflare_round.py --sites 4 --rounds 8
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path

CLIENT = """
import time
import nvflare.client as flare

flare.init()
while flare.is_running():
    model = flare.receive()
    started = time.perf_counter()
    params = {key: value + 0 for key, value in model.params.items()}
    print("SITE SECONDS", time.perf_counter() - started, flush=True)
    flare.send(flare.FLModel(params=params, metrics={"accuracy": 0.0}))
"""


STEPS = ("keys", "shares", "train", "confirm", "open")


def ours(sites: int, rounds: int, folder: Path, secure: bool = False) -> list[float]:
    """Return the idle seconds of each round of our job, with FedRDN and FFA, or securely with FFA."""
    from medfedaug.config.run import RunConfig
    from medfedaug.data.datasets.phantom import make_phantom
    from medfedaug.methods import parse_methods
    from medfedaug.nvflare_jobs import run_in_simulator

    folder = folder / ("secure" if secure else "open")
    data = folder / "data"
    names = [site.name for site in make_phantom(data, sites=sites, patients=3, shape=(32, 32, 4))]
    config = RunConfig(
        methods=tuple(parse_methods("fedfa" if secure else "fedrdn,fedfa")),
        secure_aggregation=secure,
        network="basicunet",
        network_args={"features": [8, 8, 8, 8, 8, 8]},
        rounds=rounds,
    )
    work = folder / "run"
    work.mkdir()
    results = json.loads((run_in_simulator(config, data, names, work, "cpu") / "results.json").read_text())
    return [
        entry["seconds"] - max(site["seconds"] for site in entry["sites"].values())
        for entry in results["rounds"]
    ]


def steps(run: Path) -> dict[str, list[float]]:
    """Return the seconds of each step of the rounds under secure aggregation, from the server's log.

    The first round starts the sites' training and the last ends with the evaluation; neither counts.
    """
    requests = []
    logs = sorted(run.rglob("server/**/log.txt"))
    for line in (line for log in logs for line in log.read_text(errors="replace").splitlines()):
        match = re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}).*scheduled task (\w+)", line)
        if match and match[2] in STEPS:
            requests.append((match[2], datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()))
    seconds: dict[str, list[float]] = {step: [] for step in STEPS}
    rounds = list(itertools.pairwise(requests))[len(STEPS) : -len(STEPS) + 1]
    for (step, begun), (_, ended) in rounds:
        seconds[step].append(ended - begun)
    return seconds


def plain(sites: int, rounds: int, folder: Path) -> list[float]:
    """Return the idle seconds of each round of NVFlare's recipe, from its server's log."""
    script = folder / "run.py"
    (folder / "client.py").write_text(CLIENT)
    script.write_text(
        f"""
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe.sim_env import SimEnv
recipe = FedAvgRecipe(
    name="plain", min_clients={sites}, num_rounds={rounds}, train_script="client.py",
    server_expected_format=ExchangeFormat.PYTORCH,
    model={{"class_path": "monai.networks.nets.BasicUNet",
            "args": {{"spatial_dims": 2, "norm": "batch", "features": [8, 8, 8, 8, 8, 8]}}}},
)
recipe.execute(SimEnv(num_clients={sites}, workspace_root={str(folder / "plain")!r}))
"""
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    text = done.stdout + done.stderr
    stamps, last = [], 0.0
    for line in text.splitlines():  # the title of a round is on the line below the time stamp
        stamp = re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3})", line)
        if stamp:
            last = datetime.strptime(stamp[1], "%Y-%m-%d %H:%M:%S,%f").timestamp()
        if re.search(r"Round \d+ started", line):
            stamps.append(last)
    work = [float(match) for match in re.findall(r"SITE SECONDS ([\d.e-]+)", text)]
    if len(stamps) < 2 or not work:
        raise SystemExit(f"the plain recipe did not run:\n{text[-2000:]}")
    return [b - a - max(work) for a, b in itertools.pairwise(stamps)]


def print_steps(seconds_by_step: dict[str, list[float]]) -> None:
    """Print the median of each step, and its share of a round."""
    middle = {step: statistics.median(times) for step, times in seconds_by_step.items()}
    whole = sum(middle.values())
    print(f"steps of {len(seconds_by_step['train'])} rounds under secure aggregation: median seconds, share:")
    for step, seconds in middle.items():
        print(f"  {step:20s} {seconds:.2f}  {seconds / whole:.0%}", flush=True)


def main() -> None:
    """Run all and print medians, and their ratios to the recipe's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # The first round starts the sites' processes, and does not count.
        common = (arguments.sites, arguments.rounds, Path(folder))
        idle = {"medfedaug": ours(*common)[1:], "medfedaug, secure": ours(*common, secure=True)[1:]}
        # Before the recipe, which may fail.
        print_steps(steps(Path(folder) / "secure/run"))
        idle["plain FedAvgRecipe"] = plain(*common)[1:]
    print(f"{arguments.sites} sites, {os.cpu_count()} cores, idle seconds a round (min, median, max):")
    *_, recipe = idle.values()
    for name, values in idle.items():
        middle = statistics.median(values)
        times = f"{min(values):.2f}  {middle:.2f}  {max(values):.2f}"
        print(f"  {name:20s} {times}, {middle / statistics.median(recipe):.2f} times the recipe's")


if __name__ == "__main__":
    main()
