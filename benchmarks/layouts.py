"""Training steps and inference with contiguous weights and channels last, for `models/execution.py`.

    python benchmarks/layouts.py

Small batches, cross-entropy, Adam, one thread, processor time. A row of the table is a type of norm layer and
the number of spatial dimensions, with the geometric mean of the ratios of its networks.
"""

import copy
import statistics
from collections import defaultdict
from collections.abc import Callable

import torch
from measure import alternately, begin, parser
from torch import Tensor, nn

from medfedaug.models import build_network
from medfedaug.models.execution import norm_of

UNET = {"features": (16, 16, 32, 64, 128, 16)}
NETWORKS = {
    "basicunet, batch": ("basicunet", {**UNET, "norm": "batch"}),
    "basicunet, instance": ("basicunet", {**UNET, "norm": ("instance", {"affine": True})}),
    "basicunet, group": ("basicunet", {**UNET, "norm": ("group", {"num_groups": 8})}),
    "alexnet": ("alexnet", {}),
    "resnet18": ("resnet18", {}),
    "segresnet": ("segresnet", {}),
    "swinunetr": ("swinunetr", {"feature_size": 12}),
}
IMAGES = {2: (8, 1, 96, 96), 3: (1, 1, 48, 48, 48)}
SWIN = {2: (4, 1, 64, 64), 3: (1, 1, 64, 64, 64)}
ALEXNET = (8, 1, 96, 96)
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def steps(
    network: nn.Module, images: Tensor, targets: Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Make a training step and an inference."""
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-4)

    def train() -> None:
        outputs = network.train()(images)
        optimiser.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(outputs, targets).backward()
        optimiser.step()

    @torch.no_grad()
    def infer() -> None:
        network.eval()(images)

    return train, infer


def main() -> None:
    """Measure each network, and print the rows and the table."""
    arguments = parser(__doc__, repeats=5, on_gpu=True)
    arguments.add_argument("--only", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    arguments.add_argument("--dimensions", nargs="+", type=int, choices=(2, 3), default=(2, 3))
    options, device = begin(arguments)
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    columns = ("network", "dimensions", "step, s", "channels last", "inference, s", "channels last")
    print(f"| {' | '.join(columns)} |")
    print("|---|---:|---:|---:|---:|---:|")
    for dimensions in options.dimensions:
        for name in options.only:
            kind, settings = NETWORKS[name]
            if kind == "alexnet" and dimensions == 3:
                continue
            torch.manual_seed(0)
            shape = ALEXNET if kind == "alexnet" else (SWIN if kind == "swinunetr" else IMAGES)[dimensions]
            network = build_network(
                kind, in_channels=1, out_channels=2, spatial_dims=dimensions, **settings
            ).to(device)
            images = torch.randn(shape, device=device)
            with torch.no_grad():
                outputs = network.eval()(images)
            targets = torch.randint(0, 2, (len(images), *outputs.shape[2:]), device=device)
            other = copy.deepcopy(network).to(memory_format=CHANNELS_LAST[dimensions])
            work = {}
            for layout, one in (("contiguous", network), ("last", other)):
                work[f"step {layout}"], work[f"inference {layout}"] = steps(one, images, targets)
            seconds = {
                key: statistics.median(values) for key, values in alternately(work, options.repeats).items()
            }
            contiguous, last = (
                seconds[f"step {layout}"] + seconds[f"inference {layout}"]
                for layout in ("contiguous", "last")
            )
            ratios[norm_of(network), dimensions].append(last / contiguous)
            row = [
                seconds[f"{what} {layout}"]
                for what in ("step", "inference")
                for layout in ("contiguous", "last")
            ]
            print(
                f"| {name} | {dimensions} | " + " | ".join(f"{value:.3f}" for value in row) + " |", flush=True
            )
    print("\nTime channels last, divided by contiguous:")
    for (norm, dimensions), values in ratios.items():
        print(f"{device.type}, {norm} norm, {dimensions}D: {statistics.geometric_mean(values):.2f}")


if __name__ == "__main__":
    main()
