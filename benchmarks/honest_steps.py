"""Lengths and directions of honest sites' steps, as `max_step` measures them.

    python benchmarks/honest_steps.py --data DIR --out FILE [--rounds N] [--set image_size=64]

DIR has one folder a site. Every update of every round is compared with those of the other sites
(`medfedaug.federation.server.step_comparison`), and no step is shortened. Each run appends a line of JSON to
the output: for parameters and running statistics the numbers of steps longer than 2, 3 and 4 times the
others', the longest step, and the lowest cosine.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import hardware, parser

from medfedaug.data.sites import find_sites
from medfedaug.federation import Reply, Request, run_in_process
from medfedaug.federation.in_process import InProcessCarrier
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.protocol import Accept
from medfedaug.federation.server.step_comparison import ComparedStep, StepComparison
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure
from medfedaug.utils.files import parse_json


def watched(steps: list[ComparedStep]) -> type[InProcessCarrier]:
    """Make a carrier that compares the updates of each round, and changes nothing."""

    class Watched(InProcessCarrier):
        """Compares the sites' answers."""

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
                steps.extend(
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
    """Compare all steps of a run."""
    steps: list[ComparedStep] = []
    folders = find_sites(data)
    config = configure(folders, methods=tuple(parse_methods(methods)), rounds=rounds, **settings)
    server = run_in_process(config, data, folders, "cpu", carrier=watched(steps))
    lengths = {what: [step.times[what] for step in steps] for what in ("parameters", "buffers")}
    return {
        "data": data.name,
        "methods": methods,
        "rounds": rounds,
        "settings": dict(settings),
        "samples": sorted(server.sites.values()),
        "steps": len(steps),
        **{
            f"{what} above {k}": sum(t > k for t in times)
            for what, times in lengths.items()
            for k in (2, 3, 4)
        },
        **{f"longest, {what}": round(max(times), 2) for what, times in lengths.items()},
        "lowest cosine": round(min(step.cosine for step in steps), 2),
        "hardware": hardware(),
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    arguments.add_argument("--rounds", type=int, default=6)
    arguments.add_argument("--methods", default="fedavg")
    arguments.add_argument("--set", nargs="+", default=[], metavar="SETTING=JSON", help="settings of the run")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    settings = {name: parse_json(value) for name, _, value in (one.partition("=") for one in options.set)}
    line = measured(options.data, options.rounds, options.methods, settings)
    print(json.dumps(line))
    with options.out.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
