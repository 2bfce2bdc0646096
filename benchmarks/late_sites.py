"""Simulated hours to a Dice with one site ten times slower than three others, by the waiting of a round.

A phantom of four sites; three sites need an hour for a round and the slow one ten. Sites take turns in this
process, with a simulated clock (`--site-speed`). After each round the global model is scored on the test
cases of all sites, which takes no time.

    python benchmarks/late_sites.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from measure import hardware, parser

from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.federation import FederationServer, SiteTrainer, run_in_process
from medfedaug.federation.in_process import InProcessCarrier
from medfedaug.methods import parse_methods

SLOW, NEEDED = "site_D", 3
SCHEMES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all sites of each round": ({}, {}),
    "grace of half an hour": ({}, {"min_sites": NEEDED, "grace": 1800.0}),
    "half of the sites, drawn": ({"participation": 0.5}, {}),
    "buffer of 3": ({"buffer": 3}, {}),
    "buffer of 3, staleness 0": ({"buffer": 3, "staleness": 0.0}, {}),
    "buffer of 2": ({"buffer": 2}, {}),
}
"""Settings and execution, by name."""


class TimeIsUp(Exception):
    """Ends a run after its hours."""


def watched(observers: Mapping[str, SiteTrainer], hours: float) -> tuple[type[InProcessCarrier], list[Any]]:
    """Make a carrier that scores the model of every round, and its list of hours and scores."""
    scores_by_hour: list[Any] = []

    class Watched(InProcessCarrier):
        def round_done(self, server: FederationServer) -> None:
            super().round_done(server)
            scores = {}
            for site, observer in observers.items():
                observer.receive({key: server.state[key] for key in server.shared})
                scores[site] = observer.evaluate("test", full=False)["dice"]
            scores_by_hour.append((self.time.now, scores))
            if self.time.now >= hours:
                raise TimeIsUp

    return Watched, scores_by_hour


def main() -> None:
    """Print a table of the schemes."""
    arguments = parser(__doc__, 3)
    arguments.add_argument("--hours", type=float, default=40.0, help="simulated hours (default 40)")
    arguments.add_argument("--dice", type=float, nargs="+", default=[0.5, 0.7], help="goals")
    arguments.add_argument("--patients", type=int, default=12, help="of each site (default 12)")
    arguments.add_argument(
        "--channels", type=int, nargs="+", default=[4, 8, 16], help="of the U-Net (default 4 8 16)"
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{hardware()}; {options.hours:g} hours, {options.repeats} seeds\n")
    goals = " | ".join(f"hours to {goal:g}" for goal in options.dice)
    print(f"| a round waits for | rounds | {goals} | Dice, last quarter | of it {SLOW} |")
    print("|---|---:" + "|---:" * (len(options.dice) + 2) + "|")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        names = [
            site.name for site in make_phantom(data, sites=4, patients=options.patients, shape=(32, 32, 4))
        ]
        for name, (settings, execution) in SCHEMES.items():
            runs = [_run(data, names, seed, options, settings, execution) for seed in range(options.repeats)]
            cells = [f"{fmean(len(run) for run in runs):.0f}"]
            cells += [_reached(runs, goal) for goal in options.dice]
            ends = [dice for run in runs for hour, dice in run if hour > 0.75 * options.hours]
            cells += [f"{fmean(fmean(one.values()) for one in ends):.3f}"]
            cells += [f"{fmean(one[SLOW] for one in ends):.3f}"]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def _run(
    data: Path, names: list[str], seed: int, options: Any, settings: dict[str, Any], execution: dict[str, Any]
) -> list[Any]:
    config = RunConfig(
        methods=tuple(parse_methods("norm")),
        network="unet",
        network_args={
            "channels": options.channels,
            "strides": [2] * (len(options.channels) - 1),
            "norm": "instance",
        },
        rounds=100_000,
        validate_every=100_000,
        batch_size=8,
        learning_rate=3e-3,
        local_epochs=5,
        seed=seed,
        **settings,
    )
    observers = {name: SiteTrainer(config, data / name, "cpu") for name in names}
    for name, observer in observers.items():
        observer.open(name)
    carrier, scores_by_hour = watched(observers, options.hours)
    speeds = Execution(site_speed={SLOW: 0.1}, **execution)
    with suppress(TimeIsUp):
        run_in_process(config, data, names, "cpu", execution=speeds, carrier=carrier)
    return scores_by_hour


def _reached(runs: list[list[Any]], goal: float) -> str:
    """Return the mean of the hours to a mean Dice, over the runs that reach it."""
    firsts = (next((hour for hour, dice in run if fmean(dice.values()) >= goal), None) for run in runs)
    hours = [hour for hour in firsts if hour is not None]
    some = f" ({len(hours)} of {len(runs)})" if len(hours) < len(runs) else ""
    return f"{fmean(hours):.1f}{some}" if hours else "never"


if __name__ == "__main__":
    main()
