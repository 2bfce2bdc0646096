"""A training step in bfloat16 compared with float32, for a U-Net on slices and an AlexNet on photographs.

python benchmarks/precision.py --device cuda
"""

from __future__ import annotations

import torch
from measure import alternately, begin, parser, report

from medfedaug.models import build_network
from medfedaug.models.precision import run_in_bfloat16

CASES = [
    ("basicunet", 1, 2, 16, 64),
    ("basicunet", 1, 2, 16, 128),
    ("unet", 1, 2, 16, 128),
    ("alexnet", 3, 10, 32, 96),
    ("alexnet", 3, 10, 32, 256),
]


def main() -> None:
    """Measure every network and size."""
    arguments = parser(__doc__, repeats=5, on_gpu=True)
    arguments.add_argument("--tiny", action="store_true", help="one small case, for a quick test")
    options, device = begin(arguments)
    for name, channels, classes, batch, size in [("lenet5", 3, 10, 2, 32)] if options.tiny else CASES:
        images = torch.rand(batch, channels, size, size, device=device)
        images = images.to(memory_format=torch.channels_last)

        def step(network, optimiser, images=images):
            network.zero_grad(set_to_none=True)
            network(images).square().mean().backward()
            optimiser.step()

        work = {}
        for precision in ("float32", "bfloat16"):
            network = build_network(name, in_channels=channels, out_channels=classes).to(device)
            network = network.to(memory_format=torch.channels_last)
            if precision == "bfloat16":
                run_in_bfloat16(network)
            optimiser = torch.optim.SGD(network.parameters(), lr=1e-3)
            work[precision] = lambda n=network, o=optimiser, step=step: step(n, o)
        report(
            f"{name}, {batch} images of {size} x {size}",
            alternately(work, options.repeats),
            {("float32", "bfloat16"): (">=", 1.0)},
        )


if __name__ == "__main__":
    main()
