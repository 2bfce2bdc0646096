"""DAC-SC: norms that remove style from features and keep their content."""

from typing import Any, TypeVar

import torch
from monai.networks.blocks.dynunet_block import UnetResBlock
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug.functional.features import per_channel, scale_by_moments, working_precision
from medfedaug.methods.base import Method, ServerContext, ServerExchange, SiteContext, SitePart
from medfedaug.methods.exchanges import AveragedParameters, AverageServer
from medfedaug.models import insert_layers, stage_layers
from medfedaug.models.adaptation import UnsavedModule
from medfedaug.models.stages import PickledHook, StageLayer, known_stages


class DACSC(Method):
    """Decompose, adjust, compose: SCNorm and CCNorm (Lee et al., CVPR 2023).

    Amplitudes of features over space stand for style, and phases for content. After every stage but the last
    comes an SCNorm, in training and in evaluation, ::

        x̂ = γ (s₁ IN(x) + s₂ x) + β,   s = softmax(h / T)

    with T = 0.1. In the shortcuts of residual blocks CCNorm replaces the batch norm; it keeps the phases of
    ``x − λμ`` with λ = 0.5 (`control_content`).

    Exchange, every round and SCNorm: γ and β, (C,) each, and h, (2,), up; their average down, which a
    finished run keeps.

    Deviations:
        The abstract and the published code were available, not the paper's text. The code transforms features
        to frequencies and back; the closed forms above are equal up to rounding, except that the code's
        amplitudes are at least 0.003. The code trains λ, which stays at its initial 0.5: it acts on a phase
        of 0 or π, which has no gradient. A network without normalised shortcuts, such as AlexNet and most
        U-Nets, gets only SCNorm. The paper's networks are ResNets with weights from ImageNet, with an SCNorm
        after three of four stages; in a U-Net the norm follows the pooling, and skip connections have none.
        Methods on the entries of the state dict, such as FedProx and SCAFFOLD, do not act on γ, β and h.
    """

    name = "dac_sc"
    requires = frozenset({"norm_layers"})
    excludes = frozenset({"complete_state_dict"})

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Insert the norms."""
        known = known_stages(network)
        stages = None if known is None else [stage.name for stage in known[:-1]]
        return control_shortcuts(insert_layers(network, StyleControlNorm, stages))

    def at_site(self, context: SiteContext) -> SitePart:
        return AveragedParameters(_parameters(context.network))

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(_parameters(context.network))


def _parameters(network: nn.Module) -> dict[str, Tensor]:
    """Return γ, β and h of all norms by stage."""
    return {
        f"{stage}/{name}": parameter
        for stage, norm in stage_layers(network, StyleControlNorm).items()
        for name, parameter in norm.named_parameters()
    }


def control_style(x: Tensor, shares: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Features with a mixture of their own amplitudes and normalised ones (DAC-SC's SCNorm).

    With amplitudes α and phases ρ over space, of each channel of each image::

        x̂ = γ F⁻¹(a, ρ(x)) + β,   a = s₁ α(IN(x)) + s₂ α(x)

    The function computes ``γ (s₁ IN(x) + s₂ x) + β``, which is the same: instance
    norm scales all frequencies but zero by ``1 / σ`` and keeps their phases, and at frequency zero
    only x has an amplitude.

    Features x are (B, C, *spatial), the shares s (2,), γ and β (C,).

    Example:
        >>> one, zero = torch.ones(1), torch.zeros(1)
        >>> control_style(torch.tensor([[[1.0, 3.0]]]), torch.tensor([0.5, 0.5]), one, zero, eps=0.0)
        tensor([[[0., 2.]]])
    """

    def move(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        s1, s2 = shares.to(mean)
        scale = weight.to(mean) * s1 / (variance + eps).sqrt()
        return scale + weight.to(mean) * s2, bias.to(mean) - scale * mean

    return scale_by_moments(x, move)


def control_content(
    x: Tensor, normalised: Tensor, mean: Tensor, content: float = 0.5, bias: Tensor | None = None
) -> Tensor:
    """Normalised features with the phases of features from which less was subtracted (DAC-SC's CCNorm).

    ::

        x̂ = F⁻¹(α(y), ρ(x − λμ)),   y = (x − μ)/σ

    with λ = 0 PCNorm, which keeps the phases of x; with 1 the norm itself. Only the phase at
    frequency zero differs, which is 0 or π: where an image's mean is on the one side of
    λμ and on the other side of μ, the function changes the sign of the mean of y.

    Features x and the norm's output γ y + β are (B, C, *spatial), μ and β (C,); λ is from 0 to 1. It
    returns γ x̂ + β.

    Example:
        >>> x = torch.tensor([[[1.0, 3.0]]])
        >>> control_content(x, x - 3.0, torch.tensor([3.0]))
        tensor([[[0., 2.]]])
    """
    work = working_precision(normalised)
    space = tuple(range(2, x.dim()))
    with torch.no_grad():  # a sign has no gradient
        means, threshold = working_precision(x).mean(space), mean.to(work.dtype)
        flipped = (means >= content * threshold) != (means >= threshold)
    middle = work.mean(space)
    if bias is not None:
        middle = middle - bias.to(work.dtype)
    shift = torch.where(flipped, -2.0 * middle, 0.0)
    return (work + per_channel(shift, x.dim())).to(normalised.dtype)


Network = TypeVar("Network", bound=nn.Module)


class StyleControlNorm(UnsavedModule, StageLayer):
    """Mix normalised features and the features themselves, in training and in evaluation (SCNorm).

    ::

        x̂ = γ (s₁ IN(x) + s₂ x) + β,   s = softmax(h / T)

    by `control_style`. γ, β and h are parameters of the network and trained with it, but no entries of its
    state dict.

    Example:
        >>> norm = StyleControlNorm(2)
        >>> norm(torch.rand(4, 2, 8, 8)).shape, len(norm.state_dict()), len(list(norm.parameters()))
        (torch.Size([4, 2, 8, 8]), 0, 3)
    """

    kind = "SCNorm"
    slug = "scnorm"

    def __init__(self, num_channels: int) -> None:
        super().__init__(num_channels)
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))
        self.scores = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in part."""
        shares = (self.scores / 0.1).softmax(dim=0)
        return control_style(x, shares, self.weight, self.bias)


def shortcut_norms(net: nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch norms at the ends of residual blocks' shortcuts, by dotted name.

    The blocks are MONAI's and torchvision's ResNet blocks with a ``downsample`` of several layers, and the
    blocks of MONAI's DynUNet.
    """
    names = {id(module): name for name, module in net.named_modules()}
    norms = {}
    for module in net.modules():
        path = getattr(module, "downsample", None)
        if isinstance(module, UnetResBlock):
            norm = module.norm3 if path else None
        else:
            norm = path[-1] if isinstance(path, nn.Sequential) and len(path) else None
        if isinstance(norm, _BatchNorm):
            norms[names[id(norm)]] = norm
    return norms


def control_shortcuts(net: Network, content: float = 0.5) -> Network:
    """Replace the batch norms in the shortcuts of residual blocks by CCNorm.

    The modules keep their names, parameters and statistics: their output passes through `control_content`. A
    network without normalised shortcuts stays as it is.

    ``content`` is λ, from 0, which keeps the phases, to 1, which is the batch norm itself.
    """
    for norm in shortcut_norms(net).values():
        _ControlContent(content).register_first(norm)
    return net


class _ControlContent(PickledHook):
    def __init__(self, content: float) -> None:
        self.content = content

    def __call__(self, norm: _BatchNorm, args: tuple[Any, ...], output: Tensor) -> Tensor:
        (x,) = args
        if norm.training or norm.running_mean is None:
            mean = working_precision(x.detach()).mean((0, *range(2, x.dim())))
        else:
            mean = norm.running_mean
        return control_content(x, output, mean, self.content, norm.bias)
