"""ResNets as torchvision lays them out: the names and shapes of their state dicts, and their forward pass.

Written from He et al., CVPR 2016, with the stride in the 3 x 3 convolution of a bottleneck.
"""

import torch
import torch.nn.functional as F

BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3)}
WIDTHS = (64, 128, 256, 512)


def layout(name: str, classes: int = 1000) -> dict[str, tuple[int, ...]]:
    """Shapes by name."""
    deep = name == "resnet50"
    shapes: dict[str, tuple[int, ...]] = {"conv1.weight": (64, 3, 7, 7), **norm("bn1", 64)}
    inputs = 64
    for stage, (count, width) in enumerate(zip(BLOCKS[name], WIDTHS, strict=True), start=1):
        outputs = width * (4 if deep else 1)
        for block in range(count):
            prefix = f"layer{stage}.{block}"
            sizes = (
                [(width, inputs, 1), (width, width, 3), (outputs, width, 1)]
                if deep
                else [(width, inputs, 3), (width, width, 3)]
            )
            for number, (out, into, kernel) in enumerate(sizes, start=1):
                shapes[f"{prefix}.conv{number}.weight"] = (out, into, kernel, kernel)
                shapes.update(norm(f"{prefix}.bn{number}", out))
            if block == 0 and (stage > 1 or deep):
                shapes[f"{prefix}.downsample.0.weight"] = (outputs, inputs, 1, 1)
                shapes.update(norm(f"{prefix}.downsample.1", outputs))
            inputs = outputs
    return {**shapes, "fc.weight": (classes, inputs), "fc.bias": (classes,)}


def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    entries = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (width,))
    return {f"{name}.{entry}": shape for entry, shape in {**entries, "num_batches_tracked": ()}.items()}


def weights(name: str, classes: int = 1000) -> dict[str, torch.Tensor]:
    """A state dict with values that keep the features near one."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for entry, shape in layout(name, classes).items():
        if not shape:
            state[entry] = torch.tensor(100)
        elif len(shape) > 1:
            state[entry] = torch.randn(shape, generator=generator) * (2 / shape[0] / shape[-1] ** 2) ** 0.5
        else:
            value = torch.rand(shape, generator=generator)
            state[entry] = value + 0.5 if entry.endswith(("var", "weight")) else value - 0.5
    return state


def forward(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Logits in evaluation."""

    def bn(name: str, value: torch.Tensor) -> torch.Tensor:
        mean, var, weight, bias = (
            state[f"{name}.{e}"] for e in ("running_mean", "running_var", "weight", "bias")
        )
        return F.batch_norm(value, mean, var, weight, bias)

    x = F.relu(bn("bn1", F.conv2d(x, state["conv1.weight"], stride=2, padding=3)))
    x = F.max_pool2d(x, 3, stride=2, padding=1)
    blocks = dict.fromkeys(".".join(name.split(".")[:2]) for name in state if name.startswith("layer"))
    for block in blocks:
        stride = 2 if block[5] != "1" and block.endswith(".0") else 1
        deep = f"{block}.conv3.weight" in state
        y = x
        for number in (1, 2, 3) if deep else (1, 2):
            kernel = state[f"{block}.conv{number}.weight"]
            step = stride if number == (2 if deep else 1) else 1
            y = bn(f"{block}.bn{number}", F.conv2d(y, kernel, stride=step, padding=kernel.shape[-1] // 2))
            y = F.relu(y) if number < (3 if deep else 2) else y
        if f"{block}.downsample.0.weight" in state:
            x = bn(f"{block}.downsample.1", F.conv2d(x, state[f"{block}.downsample.0.weight"], stride=stride))
        x = F.relu(x + y)
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])
