"""α of FedFD-A's adapters, layer by layer."""

from collections.abc import Iterable, Mapping

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn

from medfedaug.analysis.plots import PALETTE, tidy
from medfedaug.models import instance_adapters


@torch.no_grad()
def interpolation_weights(network: nn.Module, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Compute α of every image in every layer at inference (FedFD-A Eq. 7 with z = 0).

    Args:
        network: a network with instance adapters; it stays in evaluation mode.
        batches: images, (B, C, *spatial), normalised as the network expects them.

    Returns:
        α by the name of the batch norm, in the order of the network's modules, (N,) each.

    Raises:
        ValueError: without adapters or images.
    """
    adapters = instance_adapters(network)
    if not adapters:
        raise ValueError(f"{type(network).__name__} has no instance adapters")
    weights: dict[str, list[Tensor]] = {name: [] for name in adapters}
    hooks = [
        adapter.register_forward_hook(
            lambda _module, _args, alpha, name=name: weights[name].append(alpha[:, 0])
        )
        for name, adapter in adapters.items()
    ]
    try:
        network.eval()
        for images in batches:
            network(images)
    finally:
        for hook in hooks:
            hook.remove()
    if not next(iter(weights.values())):
        raise ValueError("no image")
    return {name: torch.cat(values).cpu() for name, values in weights.items()}


def alpha_by_layer(weights: Mapping[str, Mapping[str, Tensor]], *, width: float = 9.0) -> Figure:
    """Draw α over the layers, one panel per site (FedFD-A Fig. 6): median, quartiles and range over images.

    0 stands for the federation's statistics, 1 for the image's statistics.

    Args:
        weights: the result of `interpolation_weights` for each site.
        width: width of the figure, inches.
    """
    columns = min(len(weights), 2)
    rows = -(-len(weights) // columns)
    figure = Figure(figsize=(width, 2.2 * rows + 0.5), layout="constrained")
    for index, (site, by_layer) in enumerate(weights.items()):
        panel = figure.add_subplot(rows, columns, index + 1)
        layers = range(1, len(by_layer) + 1)
        levels = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0])
        low, lower, median, upper, high = torch.stack(
            [values.float().quantile(levels) for values in by_layer.values()]
        ).T.tolist()
        panel.fill_between(layers, low, high, color=PALETTE[0], alpha=0.15, linewidth=0)
        panel.fill_between(layers, lower, upper, color=PALETTE[0], alpha=0.35, linewidth=0)
        panel.plot(layers, median, color=PALETTE[0], linewidth=1.4, marker=".", markersize=4)
        panel.set_ylim(-0.03, 1.03)
        panel.set_title(site, fontsize=10, parse_math=False, y=1.0)
        tidy(panel)
        panel.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        if index >= len(weights) - columns:
            panel.set_xlabel("batch norm, in the order of the network", fontsize=9)
    figure.supylabel("α: 0 the federation's statistics, 1 the image's own", fontsize=10)
    return figure
