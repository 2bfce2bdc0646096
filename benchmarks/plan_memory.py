r"""The estimated memory of a plan, compared with the measured memory of a training step.

`medfedaug.federation.planning.planner.training_bytes` counts the tensors of a step without computing it. A
separate process measures each row: the highest resident memory during three steps with Adam, above that
before the network.

    python benchmarks/plan_memory.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
from measure import hardware, parser

from medfedaug.federation.planning.planner import training_bytes
from medfedaug.models import build_network
from medfedaug.tasks.losses import build_loss

WIDE = {"features": [16, 32, 64, 128, 256, 16]}
ROWS = [
    ("basicunet", WIDE, (4, 1, 256, 256)),
    ("basicunet", WIDE, (16, 1, 256, 256)),
    ("basicunet", WIDE, (2, 1, 96, 96, 96)),
    ("basicunet", WIDE, (4, 2, 96, 96, 48)),
    ("segresnet", {}, (2, 1, 64, 64, 64)),
]
TINY = [("basicunet", {"features": [4] * 6}, (1, 1, 32, 32))]


def resident(field: str) -> int:
    """Return bytes: ``VmRSS`` now, ``VmHWM`` the highest since its reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(name: str, args: dict, shape: tuple[int, ...]) -> int:
    """Return the bytes of three training steps."""
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the highest
    network = build_network(name, spatial_dims=len(shape) - 2, in_channels=shape[1], out_channels=2, **args)
    optimiser, loss = torch.optim.Adam(network.parameters()), build_loss("segmentation", 2)
    images = torch.rand(shape)
    labels = torch.randint(2, (shape[0], 1, *shape[2:]))
    for _ in range(3):
        optimiser.zero_grad()
        loss(network(images), labels).backward()
        optimiser.step()
    return resident("VmHWM") - before


def main() -> None:
    """Measure, and print a table."""
    arguments = parser(__doc__)
    arguments.add_argument("--tiny", action="store_true", help="one small row, for a quick test")
    arguments.add_argument("--row", type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    rows = TINY if options.tiny else ROWS
    torch.set_num_threads(1)
    if options.row is not None:
        print(json.dumps(measure(*rows[options.row])))
        return
    print(hardware())
    print("| network | batch | counted GiB | measured GiB | measured / counted |")
    print("|---|---|---|---|---|")
    for number, (name, args, shape) in enumerate(rows):
        with torch.device("meta"):
            network = build_network(
                name, spatial_dims=len(shape) - 2, in_channels=shape[1], out_channels=2, **args
            )
        counted = training_bytes(network, shape) / 2**30
        command = [sys.executable, __file__, "--row", str(number), *(["--tiny"] if options.tiny else [])]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        measured = int(done.stdout.splitlines()[-1]) / 2**30
        size = " x ".join(map(str, shape))
        print(f"| {name} | {size} | {counted:.2f} | {measured:.2f} | {measured / counted:.2f} |", flush=True)


if __name__ == "__main__":
    main()
