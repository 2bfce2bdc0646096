"""Training steps of FedFD, FedFD-A and FRAug compared with FedAvg's, and FedFD-A's inference with plain.

    python benchmarks/fedfd_step.py

A site's step has forward pass, cross-entropy, the methods' terms, backward pass, SGD, and the methods' own
steps. The network is MONAI's ResNet-18 for seven classes. The paper's ratios are 1.57 and 2.45 for training
and 1.02 for inference (Table 4 of FedFD-A: 2.25, 3.50 and 1.43 ms, and 1.37 and 1.34 ms).
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from measure import Made, alternately, begin, exchange_once, parser, report, steps_on
from torch import Tensor, nn

from medfedaug.methods import build_methods, parse_methods
from medfedaug.methods.base import ServerContext, SiteContext, Step
from medfedaug.models import build_network

METHODS = {"FedAvg": "fedavg", "FedFD": "fedfd", "FedFD-A": "fedfd_a", "FRAug": "fraug"}
CLASSES = 7


def prepared(network: nn.Module, methods: str) -> tuple[nn.Module, list]:
    """Copy the network with the methods' parts, after one exchange of one site."""
    network = copy.deepcopy(network)
    chosen = build_methods(parse_methods(methods))
    for method in chosen:
        network = method.prepare_network(network)
    network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    parts = [method.at_site(SiteContext("site", network)) for method in chosen]
    exchange_once(chosen, parts, ServerContext(network, 3))
    for part in parts:
        part.start_round()
    return network, parts


def step(network: nn.Module, parts: list) -> Made:
    """Make one step of local training with images and their classes."""
    network.train()
    criterion = nn.CrossEntropyLoss()
    trained = [p for p in network.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=1e-3, momentum=0.5)

    def run(inputs: Tensor, labels: Tensor) -> Tensor:
        for part in parts:
            part.mix(inputs, [(1.0, labels)])
        outputs = network(inputs)
        context = Step(network, inputs, labels, outputs, criterion)
        loss = context.task_loss
        for part in parts:
            part.after_pass(context)
        for part in parts:
            term = part.loss(context)
            if term is not None:
                loss = loss + term
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        for part in parts:
            part.after_step(context)
        return loss.detach()

    return run, parts


def inference(network: nn.Module, parts: list) -> Made:
    """Make one pass in evaluation mode."""
    return torch.no_grad()(network.eval()), parts


def main() -> None:
    """Measure training, then inference of a batch and of a single image."""
    arguments = parser(__doc__, repeats=12, on_gpu=True)
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--size", type=int, default=128, help="edge of the images, pixels")
    options, device = begin(arguments)
    limit = 2.75 if device.type == "cpu" else 3.0
    torch.manual_seed(0)
    network = build_network("resnet18", in_channels=3, out_channels=CLASSES).to(device)
    images = torch.rand(options.batch, 3, options.size, options.size, device=device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, CLASSES, (options.batch,), device=device)
    size = f"{options.batch} images of {options.size} x {options.size}"

    makers = {
        name: partial(lambda methods: step(*prepared(network, methods)), methods)
        for name, methods in METHODS.items()
    }
    seconds = alternately(steps_on(device, (images, labels), makers), options.repeats)
    goals = {("FedFD", "FedAvg"): ("<=", 2.1), ("FedFD-A", "FedAvg"): ("<=", limit)}
    report(f"training step, {size}", seconds, {**goals, ("FRAug", "FedAvg"): ("<=", 1.5)})

    makers = {
        name: partial(lambda methods: inference(*prepared(network, methods)), METHODS[name])
        for name in ("FedAvg", "FedFD-A")
    }
    for batch in (images, images[:1]):
        seconds = alternately(steps_on(device, (batch,), makers), 4 * options.repeats)
        goal = {("FedFD-A", "FedAvg"): ("<=", 1.15)}
        report(f"inference, {len(batch)} image(s) of {options.size} x {options.size}", seconds, goal)


if __name__ == "__main__":
    main()
