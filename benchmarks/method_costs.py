"""Costs of the five methods: their training steps and inference, divided by FedAvg's.

    python benchmarks/method_costs.py
    python benchmarks/method_costs.py --device cuda --compile

A step has forward pass, the task's loss, the methods' terms, backward pass, optimiser, and the methods' own
steps. FedFA and FedFA+ train the default U-Net on slices; a measurement has two steps, in the first of which
the 1st, 3rd and 5th FFA layer are active, in the second the others, so that p is exactly 0.5. FedFD, FedFD-A
and FRAug train MONAI's ResNet-18 for seven classes. FedRDN's cost is that of its transform, which normalises
each image in place of MONAI's `NormalizeIntensityd`.
"""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from measure import alternately, begin, parser, report
from monai.losses import DiceCELoss
from monai.transforms import NormalizeIntensityd
from torch import Tensor, nn

from medfedaug.errors import first_line
from medfedaug.methods import build_methods, parse_methods
from medfedaug.methods.base import ServerContext, SiteContext, SitePart, Step
from medfedaug.models import FFALayer, build_network, ffa_layers
from medfedaug.models.execution import call_plainly, compile_calls, lay_out
from medfedaug.statistics import ChannelStatistics
from medfedaug.transforms import FedRDNd

CLASSES = 7


def prepared(
    network: nn.Module, methods: str, images: Tensor, compiled: bool = False
) -> tuple[nn.Module, Sequence[SitePart]]:
    """Copy the network with the methods' parts, after one exchange of one site."""
    network = copy.deepcopy(network)
    chosen = build_methods(parse_methods(methods))
    for method in chosen:
        network = method.prepare_network(network)
    network = lay_out(network)
    context = SiteContext(
        "site", network, num_samples=lambda: len(images), training_images=lambda: iter([images])
    )
    parts = [method.at_site(context) for method in chosen]
    server = ServerContext(network, images.shape[1])
    for method, part in zip(chosen, parts, strict=True):
        exchange = method.every_round(server)
        if exchange is not None and part.every_round is not None:
            exchange.accept("site", {key: value.cpu() for key, value in part.every_round.collect().items()})
            part.every_round.apply(exchange.result())
        part.start_round()
    if compiled:
        compile_calls(network, "site")
    return network.train(), parts


def step(
    network: nn.Module, parts: Sequence[SitePart], criterion: nn.Module, images: Tensor, labels: Tensor
) -> Callable[[], None]:
    """Make two steps of local training, each with one half of the FFA layers active."""
    optimiser = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=1e-4)
    layers = list(ffa_layers(network).values())

    def run() -> None:
        for first in (0, 1):
            for index, layer in enumerate(layers):
                layer.prob = float(index % 2 == first)
            context = Step(network, images, labels, network(images), criterion)
            loss = context.task_loss
            for part in parts:
                part.after_pass(context)
            for part in parts:
                term = part.loss(context)
                loss = loss if term is None else loss + term
            optimiser.zero_grad(set_to_none=True)
            try:
                loss.backward()
            except Exception as error:  # PyTorch 2.13: the compiled backward pass of a padding, on a CPU
                if not call_plainly(network):
                    raise
                print(f"  not compiled: {first_line(error)}")
                return run()
            optimiser.step()
            for part in parts:
                part.after_step(context)

    return run


def transform_costs(repeats: int) -> None:
    """Compare FedRDN's transform with MONAI's normalisation."""
    image = {"image": torch.rand(1, 240, 240)}
    pairs = {
        site: ChannelStatistics(torch.tensor([m]), torch.tensor([0.2]), 9)
        for site, m in (("A", 0.4), ("B", 0.6))
    }
    draw, plain = FedRDNd("image", pairs), NormalizeIntensityd("image", channel_wise=True)
    work = {"FedRDNd": lambda: draw(image), "NormalizeIntensityd": lambda: plain(image)}
    seconds = alternately(work, 10 * repeats)
    report("an image of 240 x 240", seconds, {("FedRDNd", "NormalizeIntensityd"): ("<=", 1.1)})


def layer_costs(batch: int, size: int, device: torch.device, repeats: int, compiled: bool) -> None:
    """Compare an active FFA layer with batch norm, forward and backward, in two and three dimensions."""
    for shape in ((batch, 32, size, size), (2, 32, size // 2, size // 2, size // 2)):
        norm = (nn.BatchNorm2d, nn.BatchNorm3d)[len(shape) - 4](32)
        layers = {"FFA": FFALayer(32, prob=1.0).to(device), "batch norm": norm.to(device)}
        features = torch.rand(shape, device=device, requires_grad=True)
        for layer in layers.values() if compiled else ():
            compile_calls(layer, "site")
        work = {name: partial(_pass, layer, features) for name, layer in layers.items()}
        title = f"FFA on {' x '.join(map(str, shape))}"
        report(title, alternately(work, 4 * repeats), {("FFA", "batch norm"): ("<=", 1.5)})


def _pass(layer: nn.Module, features: Tensor) -> None:
    layer(features).sum().backward()


def main() -> None:
    """Measure the transform, the layer, the U-Net, and the ResNet in training and in inference."""
    arguments = parser(__doc__, repeats=8, on_gpu=True)
    arguments.add_argument("--batch", type=int, default=16)
    arguments.add_argument("--size", type=int, default=96, help="edge of the images, pixels")
    arguments.add_argument("--compile", action="store_true", help="compile the networks and layers")
    options, device = begin(arguments)
    size = (options.size, options.size)
    transform_costs(options.repeats)
    layer_costs(options.batch, options.size, device, options.repeats, options.compile)

    torch.manual_seed(0)
    network = build_network("basicunet").to(device)
    images = torch.rand(options.batch, 1, *size, device=device)
    labels = (torch.rand_like(images) < 0.1).float()
    dice = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    steps = {
        name: step(*prepared(network, methods, images, options.compile), dice, images, labels)
        for name, methods in {"FedAvg": "fedavg", "FedFA": "fedfa", "FedFA+": "fedfa,fedfa_h"}.items()
    }
    report(
        f"U-Net, two steps of {options.batch} slices of {options.size} x {options.size}",
        alternately(steps, options.repeats),
        {("FedFA", "FedAvg"): ("<=", 1.05), ("FedFA+", "FedAvg"): ("<=", 1.1)},
    )

    network = build_network("resnet18", in_channels=3, out_channels=CLASSES).to(device)
    images = torch.rand(options.batch, 3, *size, device=device)
    labels = torch.randint(0, CLASSES, (options.batch,), device=device)
    methods = {"FedAvg": "fedavg", "FedFD": "fedfd", "FedFD-A": "fedfd_a", "FRAug": "fraug"}
    made = {name: prepared(network, chosen, images, options.compile) for name, chosen in methods.items()}
    steps = {name: step(*one, nn.CrossEntropyLoss(), images, labels) for name, one in made.items()}
    report(
        f"ResNet-18, two steps of {options.batch} images of {options.size} x {options.size}",
        alternately(steps, options.repeats),
        {
            ("FedFD", "FedAvg"): ("<=", 2.1),
            ("FedFD-A", "FedAvg"): ("<=", 2.75),
            ("FRAug", "FedAvg"): ("<=", 1.5),
        },
    )

    def inference(net: nn.Module) -> Callable[[], Tensor]:
        return lambda: torch.no_grad()(net.eval())(images)

    passes = {name: inference(made[name][0]) for name in ("FedAvg", "FedFD-A")}
    report(
        "ResNet-18, inference",
        alternately(passes, 4 * options.repeats),
        {("FedFD-A", "FedAvg"): ("<=", 1.15)},
    )


if __name__ == "__main__":
    main()
