"""BIN: batch norms that learn, for each channel, the share of an image's own statistics."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from medfedaug.functional.features import normalising, scale_by_moments
from medfedaug.methods.arguments import Positive
from medfedaug.methods.base import Method, ServerExchange, SitePart, check_norms
from medfedaug.methods.contexts import ServerContext, SiteContext, Step
from medfedaug.methods.exchanges import AveragedParameters, AverageServer
from medfedaug.models.adaptation import UnsavedModule
from medfedaug.models.stages import PickledHook


class BIN(Method):
    """Batch-instance normalisation (Nam and Kim, NeurIPS 2018), with which FedFD-A compares its adapter.

    Every batch norm returns ``(ρ x̂_B + (1 − ρ) x̂_I) γ + β``. ρ is trained with the network and clipped to
    [0, 1] after each step.

    Exchange, every round and batch norm, in simulations only, since clipping after a long step leaves the
    sign of the last batch's gradient: ρ, (C,), up; the average down, which a finished run keeps.

    Args:
        rate: factor of the gradient of ρ; for SGD, of its learning rate.

    Deviations:
        Neither the paper's text nor FedFD-A's settings were available. The run's weight decay and momentum
        act on ρ too. Batch norms of features without spatial dimensions stay as they are.
    """

    name = "bin"
    requires = frozenset({"norm_layers"})
    excludes = frozenset({"complete_state_dict", "counted_patients"})

    def __init__(self, rate: Positive = 1.0) -> None:
        self.rate = rate

    def prepare_network(self, network: nn.Module) -> nn.Module:
        return mix_instance_norms(network)

    def at_site(self, context: SiteContext) -> SitePart:
        return BINSite(self.rate, context.network)

    def every_round(self, context: ServerContext) -> ServerExchange:
        return AverageServer(batch_shares(context.network))


class BINSite(AveragedParameters):
    """The site's half: ρ stays in [0, 1]."""

    def __init__(self, rate: float, network: nn.Module) -> None:
        super().__init__(batch_shares(network))
        self.rate = rate

    def before_step(self, step: Step) -> None:
        for rho in self.parameters.values():
            if rho.grad is not None and self.rate != 1:
                rho.grad.mul_(self.rate)

    @torch.no_grad()
    def after_step(self, step: Step) -> None:
        for rho in self.parameters.values():
            rho.clamp_(0.0, 1.0)


Network = TypeVar("Network", bound=nn.Module)


class BatchShare(UnsavedModule):
    """ρ of one batch norm: a parameter of the network, but no entry of its state dict."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.ones_like(like))


def mix_instance_norms(net: Network) -> Network:
    """Let every batch norm that keeps statistics mix in each image's statistics (Nam and Kim, NeurIPS 2018).

    ::

        y = (ρ x̂_B + (1 − ρ) x̂_I) γ + β

    in training and in evaluation, with the batch norm's γ and β, and ρ in [0, 1] for each channel, 1 at
    first. Modules and state dict stay the same.

    Deviations:
        ρ has no effect on features without spatial dimensions, which have no instance statistics.
    """
    norms = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    check_norms(BIN.name, net, norms, "batch norm with running statistics")
    for norm in norms:
        assert norm.running_mean is not None
        norm.add_module("batch_share", BatchShare(norm.running_mean))
        _MixInstance().register_first(norm)
    return net


def batch_shares(net: nn.Module) -> dict[str, nn.Parameter]:
    """ρ by the dotted name of its batch norm."""
    modules = ((name, m) for name, m in net.named_modules() if isinstance(m, BatchShare))
    return {name.removesuffix(".batch_share"): module.share for name, module in modules}


class _MixInstance(PickledHook):
    def __call__(self, norm: _BatchNorm, args: tuple[Any, ...], batch: Tensor) -> Tensor:
        x = args[0]
        if x.dim() < 3:
            return batch

        def move(mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
            return normalising(mean, (var + norm.eps).sqrt(), norm.weight, norm.bias)

        module = norm.get_submodule("batch_share")
        assert isinstance(module, BatchShare)
        share = module.share.to(batch.dtype).view(-1, *[1] * (x.dim() - 2))
        return torch.lerp(scale_by_moments(x, move).to(batch.dtype), batch, share)
