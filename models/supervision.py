"""Deep supervision: networks with several outputs, the finest of them the segmentation."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from monai.losses import DeepSupervisionLoss
from monai.networks.nets import BasicUNetPlusPlus, DynUNet, MedNeXt, SegResNetDS
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

Criterion = Callable[[Tensor, Tensor], Tensor]

SUPERVISED = (BasicUNetPlusPlus, DynUNet, MedNeXt, SegResNetDS)
"""MONAI's networks that have heads at several levels of their decoder."""
_BLOCKS_DOWN = (1, 2, 2, 4)  # MONAI's default of SegResNetDS


def supervision_arguments(network: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that give a network of `SUPERVISED` its heads.

    If the number of heads is an argument, all levels of the decoder have one but the coarsest, which has no
    weight in nnU-Net; at least two have one. A decoder of one level has one head, and needs no argument.

    Example:
        >>> supervision_arguments(DynUNet, {"strides": (1, 2, 2, 2, 2)})
        {'deep_supervision': True, 'deep_supr_num': 2}
    """
    if network not in SUPERVISED:
        known = ", ".join(kind.__name__.lower() for kind in SUPERVISED)
        raise ValueError(f"it has one output, and deep_supervision needs several: {known} have them")
    if network in (BasicUNetPlusPlus, MedNeXt):
        return {"deep_supervision": True}
    blocks = args["strides"] if network is DynUNet else args.get("blocks_down", _BLOCKS_DOWN)
    levels = len(blocks) - 1
    if levels < 2:
        return {}
    heads = max(2, levels - 1)
    if network is SegResNetDS:
        return {"dsdepth": heads}
    return {"deep_supervision": True, "deep_supr_num": heads - 1}


def network_heads(net: nn.Module, output: Any) -> list[Tensor]:
    """Return the heads in the output of a network, (B, K, *spatial) each, the finest first.

    The output is a tensor; a list or tuple of tensors, finest first (BasicUNetPlusPlus: finest last); or the
    stack of DynUNet in training, (B, heads, K, *spatial).
    """
    if isinstance(output, Tensor):
        stacked = isinstance(net, DynUNet) and net.training and net.deep_supervision
        return list(output.unbind(dim=1)) if stacked else [output]
    heads = list(output) if isinstance(output, (list, tuple)) else []
    if not heads or not all(isinstance(head, Tensor) for head in heads):
        kinds = ", ".join(type(head).__name__ for head in heads) or type(output).__name__
        raise TypeError(f"{type(net).__name__} gives {kinds}; scores of the classes are needed, as a tensor")
    return heads[::-1] if isinstance(net, BasicUNetPlusPlus) else heads


def head_weights(count: int) -> list[float]:
    """Return weights of the heads, the finest first: each half of the previous, with a sum of one.

    Example:
        >>> head_weights(2)
        [0.6666666666666666, 0.3333333333333333]
    """
    weights = [0.5**level for level in range(count)]
    return [weight / sum(weights) for weight in weights]


class DeepSupervision:
    r"""Loss over all heads of a network that returns its finest head.

    ::

        ℓ = Σₕ wₕ ℓₕ,   wₕ = 2⁻ʰ / Σᵢ 2⁻ⁱ

    over the heads h = 0, 1, ..., the finest first (nnU-Net, Isensee et al., Nature Methods 2021). For a head
    of lower resolution the targets are resized by nearest neighbour. The loss of a network with one output
    keeps its bits.

    A hook on the network returns the finest head, (B, K, \*spatial), to every caller, in training and in
    evaluation; `criterion` adds the coarser heads.

    Raises:
        TypeError: on a call of the network, when its output is not a tensor or list of tensors.

    Deviations:
        nnU-Net gives no weight to the coarsest head; MONAI's networks have only the requested heads.
    """

    def __init__(self, net: nn.Module) -> None:
        self._coarser = WeakTensorKeyDictionary()
        net.register_forward_hook(self._keep)

    def _keep(self, net: nn.Module, _args: tuple[Any, ...], output: Any) -> Tensor:
        finest, *coarser = network_heads(net, output)
        if coarser and net.training:
            self._coarser[finest] = coarser
        return finest

    def criterion(self, loss: Criterion) -> Criterion:
        """Return the loss over all heads, given a loss over the finest."""

        def over_all_heads(outputs: Tensor, targets: Tensor) -> Tensor:
            coarser = self._coarser.get(outputs)
            if not coarser:
                return loss(outputs, targets)
            heads = [outputs, *coarser]
            supervised = DeepSupervisionLoss(cast(Any, loss), weights=head_weights(len(heads)))
            total: Tensor = supervised(heads, targets.float())  # integers cannot all be resized
            return total

        return over_all_heads
