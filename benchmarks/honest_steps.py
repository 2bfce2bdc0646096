"""Lengths and directions of honest sites' steps, as `max_step` sees them.

    python benchmarks/honest_steps.py --data DIR --out FILE [--rounds N] [--set image_size=64]

DIR has one folder a site. Every update of every round is compared with those of the other sites
(`medfedaug.federation.server.step_comparison`), and nothing is shortened. The output is appended to, one line
of JSON a run: for parameters and running statistics how many of the steps are longer than 2 and 3 times the
others', the longest, and the lowest cosine.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import hardware

from medfedaug.data.sites import find_sites
from medfedaug.federation import Reply, Request, run_in_process
from medfedaug.federation.in_process import InProcessCarrier
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.protocol import Accept
from medfedaug.federation.server.step_comparison import ComparedStep, StepComparison
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure
from medfedaug.utils.files import parse_json


def watched(found: list[ComparedStep]) -> type[InProcessCarrier]:
    """A carrier that compares the updates of each round, and changes nothing."""

    class Watched(InProcessCarrier):
        """Compares what the sites answer."""

        def ask(
            self, request: Request, names: Sequence[str], needed: int, accept: Accept
        ) -> Mapping[str, str]:
            """Ask, and compare the updates."""
            replies: dict[str, Reply] = {}

            def see(name: str, reply: Reply) -> bool:
                replies[name] = reply
                return accept(name, reply)

            missing = super().ask(request, names, needed, see)
            if request.task == TRAIN:
                model, start = self.server.reply_checks.model, request.weights
                found.extend(
                    StepComparison(model, math.inf)
                    .compare(
                        {name: reply.weights for name, reply in replies.items()},
                        {name: model.steps(reply.weights, start) for name, reply in replies.items()},
                        self.server.participation.weights(self.server.sites),
                        start,
                    )
                    .values()
                )
            return missing

    return Watched


def measured(data: Path, rounds: int, methods: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The comparison of all steps of a run."""
    found: list[ComparedStep] = []
    folders = find_sites(data)
    config = configure(folders, methods=tuple(parse_methods(methods)), rounds=rounds, **settings)
    server = run_in_process(config, data, folders, "cpu", carrier=watched(found))
    lengths = {what: [step.times[what] for step in found] for what in ("parameters", "buffers")}
    return {
        "data": data.name,
        "methods": methods,
        "rounds": rounds,
        "settings": dict(settings),
        "samples": sorted(server.sites.values()),
        "steps": len(found),
        **{
            f"{what} above {k}": sum(t > k for t in times)
            for what, times in lengths.items()
            for k in (2, 3, 4)
        },
        **{f"longest, {what}": round(max(times), 2) for what, times in lengths.items()},
        "lowest cosine": round(min(step.cosine for step in found), 2),
        "hardware": hardware(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines, which is appended to")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--methods", default="fedavg")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING=JSON", help="settings of the run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: parse_json(value) for name, _, value in (one.partition("=") for one in options.set)}
    line = measured(options.data, options.rounds, options.methods, settings)
    print(json.dumps(line))
    with options.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
