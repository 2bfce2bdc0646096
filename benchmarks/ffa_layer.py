"""Forward and backward pass of an active FFA layer, compared with batch norm and the equations line by line.

    python benchmarks/ffa_layer.py

Batch norm, one fused operation in torch, is the lower bound for a layer with statistics of its features. The
reference implements FedFA+ Eq. 2, 4, 5 and 8 to 10 as printed, like a research script.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from measure import Made, alternately, begin, parser, report, steps_on
from torch import Tensor, nn

from medfedaug.models import FFALayer

# The stages of the paper's U-Net after pooling, for a batch of 16 slices of 192 x 192 pixels, and of a
# U-Net for volumes.
SHAPES = [
    (16, 32, 96, 96),
    (16, 64, 48, 48),
    (16, 128, 24, 24),
    (16, 256, 12, 12),
    (2, 32, 48, 48, 48),
    (2, 64, 24, 24, 24),
    (2, 128, 12, 12, 12),
]


class LineByLine(nn.Module):
    """The equations one after another, on whole arrays."""

    def __init__(self, channels: int, momentum: float = 0.99, eps: float = 1e-6) -> None:
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_std", torch.ones(channels))
        self.register_buffer("gamma_mean", torch.ones(channels))
        self.register_buffer("gamma_std", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        space = tuple(range(2, x.dim()))
        mean = x.mean(dim=space, keepdim=True)  # Eq. 2
        std = (x.var(dim=space, keepdim=True, unbiased=False) + self.eps).sqrt()
        variance_mean = mean.var(dim=0, keepdim=True, unbiased=False)  # Eq. 4
        variance_std = std.var(dim=0, keepdim=True, unbiased=False)
        with torch.no_grad():  # Eq. 5
            self.running_mean = self.momentum * self.running_mean + (1 - self.momentum) * mean.mean(0).ravel()
            self.running_std = self.momentum * self.running_std + (1 - self.momentum) * std.mean(0).ravel()
        gamma_shape = (1, -1, *[1] * len(space))
        spread_mean = ((self.gamma_mean.view(gamma_shape) + 1) * variance_mean).sqrt()  # Eq. 8
        spread_std = ((self.gamma_std.view(gamma_shape) + 1) * variance_std).sqrt()
        new_mean = mean + torch.randn_like(mean) * spread_mean  # Eq. 10
        new_std = std + torch.randn_like(std) * spread_std
        return new_std * (x - mean) / std + new_mean  # Eq. 9


def step(layer: nn.Module) -> Made:
    """Make a forward and backward pass of features, with the gradient of the output."""

    def run(x: Tensor, gradient: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        layer(x).backward(gradient)
        assert x.grad is not None
        return x.grad

    return run, ()


def layers(shape: tuple[int, ...], device: torch.device) -> dict[str, Callable[[], nn.Module]]:
    """Make the compared layers."""
    channels = shape[1]

    def ffa() -> nn.Module:
        layer = FFALayer(channels, prob=1.0).to(device)
        layer.set_gamma(torch.ones(channels), torch.ones(channels))
        return layer

    norm = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm3d
    return {
        "batch norm": lambda: norm(channels).to(device),
        "FFA": ffa,
        "line by line": lambda: LineByLine(channels).to(device),
    }


def main() -> None:
    """Measure every shape, in both memory layouts."""
    arguments = parser(__doc__, repeats=15, on_gpu=True)
    arguments.add_argument("--tiny", action="store_true", help="small shapes, for a quick test")
    options, device = begin(arguments)
    limit = 2.0 if device.type == "cpu" else 1.5
    for shape in [(4, 8, 12, 12), (2, 8, 6, 6, 6)] if options.tiny else SHAPES:
        for layout in ("contiguous", "channels last"):
            x = torch.randn(shape, device=device)
            if layout == "channels last":
                flat = len(shape) == 4
                x = x.to(memory_format=torch.channels_last if flat else torch.channels_last_3d)
            gradient = torch.randn_like(x)
            makers = {
                name: partial(lambda make: step(make()), make) for name, make in layers(shape, device).items()
            }
            report(
                f"{' x '.join(map(str, shape))}, {layout}",
                alternately(steps_on(device, (x, gradient), makers), options.repeats),
                {("FFA", "batch norm"): ("<=", limit), ("line by line", "FFA"): (">=", 1.3)},
            )


if __name__ == "__main__":
    main()
