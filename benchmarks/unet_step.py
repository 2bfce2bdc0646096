"""A training step of a U-Net with FFA at p = 0.5, and with FFA and alignment, compared with a plain step.

    python benchmarks/unet_step.py

A site's step has forward pass, Dice and cross-entropy, the methods' terms, backward pass and Adam. The
networks are MONAI's BasicUNet with the widths of the papers and with the default widths of this library. A
measurement has two steps: in the first the 1st, 3rd and 5th FFA layer are active, in the second the others,
so that p is exactly 0.5.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from measure import Made, alternately, begin, exchange_once, parser, report, steps_on
from monai.losses import DiceCELoss
from torch import Tensor, nn

from medfedaug.federation.site.step_graph import of_device
from medfedaug.methods import build_methods, parse_methods
from medfedaug.methods.base import ServerContext, SiteContext, Step
from medfedaug.models import build_network, ffa_layers

NETWORKS = {"paper": (32, 64, 128, 256, 512, 32), "default": (16, 32, 64, 128, 256, 16)}
METHODS = {"plain": "fedavg", "FFA": "fedfa", "FFA + alignment": "fedfa,fedfa_h"}


def steps(network: nn.Module, methods: str, images: Tensor) -> Made:
    """Make two steps of local training with images and labels, and the methods' parts in them."""
    network = copy.deepcopy(network)
    chosen = build_methods(parse_methods(methods))
    for method in chosen:
        network = method.prepare_network(network)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    context = SiteContext(
        "site", network, num_samples=lambda: len(images), training_images=lambda: iter([images])
    )
    parts = [method.at_site(context) for method in chosen]
    server = ServerContext(network, images.shape[1])
    exchange_once(chosen, parts, server)  # to have γ and a histogram
    network.train()
    criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    optimiser = of_device(torch.optim.Adam(network.parameters(), lr=1e-3), images.device)
    layers = list(ffa_layers(network).values())

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        for first in (0, 1):
            for index, layer in enumerate(layers):
                layer.prob = float(index % 2 == first)
            outputs = network(inputs)
            loss = criterion(outputs, labels)
            for part in parts:
                term = part.loss(Step(network, inputs, labels, outputs))
                if term is not None:
                    loss = loss + term
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
        return loss.detach()

    return run, parts


def main() -> None:
    """Measure both networks."""
    arguments = parser(__doc__, repeats=12, on_gpu=True)
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--size", type=int, default=96, help="edge of the slices, pixels")
    arguments.add_argument("--network", choices=["both", *NETWORKS], default="both")
    options, device = begin(arguments)
    limit = 1.08 if device.type == "cpu" else 1.1
    for name, features in NETWORKS.items():
        if options.network not in ("both", name):
            continue
        torch.manual_seed(0)
        network = build_network("basicunet", features=features).to(device)
        images = torch.rand(options.batch, 1, options.size, options.size, device=device)
        labels = (torch.rand_like(images) < 0.1).float()
        images = images.to(memory_format=torch.channels_last)
        makers = {label: partial(steps, network, methods, images) for label, methods in METHODS.items()}
        seconds = alternately(steps_on(device, (images, labels), makers), options.repeats)
        report(
            f"{name} U-Net, features {features}, two steps of {options.batch} slices of "
            f"{options.size} x {options.size}",
            seconds,
            {("FFA", "plain"): ("<=", 1.05), ("FFA + alignment", "plain"): ("<=", limit)},
        )


if __name__ == "__main__":
    main()
