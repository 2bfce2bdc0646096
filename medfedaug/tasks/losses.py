"""Losses by name, or by the path of MONAI's class."""

from collections.abc import Callable, Mapping
from typing import Any

import monai.losses
import torch
from monai.losses import DiceCELoss, DiceFocalLoss, DiceLoss, FocalLoss, GeneralizedDiceLoss, TverskyLoss
from monai.networks.utils import one_hot
from torch import Tensor, nn

from medfedaug.config.run import DEFAULT_LOSSES
from medfedaug.errors import config_errors
from medfedaug.utils.class_paths import check_arguments, constructor_parameters, public_class

_OVERLAP: dict[str, Any] = {"include_background": False, "batch": True}
# By task and name: the class, and arguments that differ from its defaults. Overlaps are of the scored
# classes, over the batch, since a slice may have none of them; focal terms also need the background.
_LOSSES: dict[str, dict[str, tuple[type[nn.Module], dict[str, Any]]]] = {
    "segmentation": {
        "dice_ce": (DiceCELoss, _OVERLAP),
        "dice": (DiceLoss, _OVERLAP),
        "generalized_dice": (GeneralizedDiceLoss, _OVERLAP),
        "tversky": (TverskyLoss, _OVERLAP),
        "dice_focal": (DiceFocalLoss, {"batch": True}),
        "focal": (FocalLoss, {}),
        "cross_entropy": (nn.CrossEntropyLoss, {}),
    },
    "classification": {"cross_entropy": (nn.CrossEntropyLoss, {}), "focal": (FocalLoss, {})},
}
_ONE_HOT = "to_onehot_y"
# Names of the argument for logits, and arguments for other activations.
_SOFTMAX, _OTHERS = ("softmax", "use_softmax"), ("sigmoid", "other_act")
# Distances to the border of a class, which probabilities do not have.
_WHOLE_LABELS = ("HausdorffDTLoss", "LogHausdorffDTLoss")


class Loss:
    r"""A scalar of logits and targets, with targets as labels or as probabilities of K classes.

    Labels are (B, 1, \*spatial) or (B,), probabilities (B, K, \*spatial). A loss that ``merges`` uses the
    softmax of each voxel, so that classes can be merged and voxels left out.
    """

    def __init__(
        self,
        name: str,
        num_classes: int,
        labels: Callable[[Tensor, Tensor], Tensor],
        probabilities: Callable[[Tensor, Tensor], Tensor] | None,
        *,
        merges: bool = False,
    ) -> None:
        self.name, self.num_classes, self.merges = name, num_classes, merges
        self.labels, self.probabilities = labels, probabilities

    @property
    def takes_probabilities(self) -> bool:
        """True if targets may be probabilities."""
        return self.probabilities is not None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        r"""Compute the loss of logits, (B, K, \*spatial)."""
        soft = targets.ndim == outputs.ndim and targets.shape[1] == self.num_classes
        loss = self.probabilities if soft else self.labels
        assert loss is not None  # `medfedaug.federation.composition` refuses methods that mix targets
        if isinstance(loss, nn.Module):
            loss.to(outputs.device)  # weights of classes
        return loss(outputs, targets)


def build_loss(
    task: str, num_classes: int, name: str | None = None, args: Mapping[str, Any] | None = None
) -> Loss:
    """Build a loss by name.

    Args:
        name: a name of `_LOSSES`, or a class path such as ``monai.losses.TverskyLoss``, for segmentation any
            of MONAI's that takes label maps, with MONAI's defaults; ``None`` for the default of the task.
        args: further arguments of its class; lists of ``weight`` have a number for each class.
    """
    name, args = name or DEFAULT_LOSSES[task], args or {}
    # Classes check arguments in their own ways, some only in use.
    with config_errors(f"loss {name}"):
        check_arguments(args)
        cls, defaults = _find(task, name)
        loss = _make(name, cls, {**defaults, **args}, num_classes, dense=task == "segmentation")
        _try(loss, (8, 8) if task == "segmentation" else ())
    return loss


def _find(task: str, name: str) -> tuple[type[nn.Module], dict[str, Any]]:
    known, dense = _LOSSES[task], task == "segmentation"
    if name in known:
        return known[name]
    cls = public_class(monai.losses, name, "loss") if "." in name else None
    if cls is None or not (_ONE_HOT in constructor_parameters(cls) if dense else cls is FocalLoss):
        paths = ", or MONAI's for label maps by class path, for instance monai.losses.TverskyLoss"
        choices = f"{', '.join(known)}{paths if dense else ''}"
        raise ValueError(f"is not known for {task}; choose from {choices}")
    return cls, {}


def _make(name: str, cls: type[nn.Module], args: dict[str, Any], num_classes: int, *, dense: bool) -> Loss:
    parameters = constructor_parameters(cls)
    if isinstance(args.get("weight"), list):
        args["weight"] = torch.tensor([float(value) for value in args["weight"]])
    if cls is nn.CrossEntropyLoss:
        entropy = cls(**args)
        return Loss(name, num_classes, _Labels(entropy) if dense else entropy, entropy, merges=True)
    softmax = next((key for key in _SOFTMAX if key in parameters), None)
    if softmax and not any(args.get(key) for key in _OTHERS):
        args.setdefault(softmax, True)
    whole = cls.__name__ in _WHOLE_LABELS
    labels, probabilities = (cls(**args, **{_ONE_HOT: value}) for value in (True, False))
    soft = None if whole else probabilities
    merges = not whole and not any(args.get(key) for key in _OTHERS)
    return Loss(name, num_classes, labels if dense else _Column(labels), soft, merges=merges)


class _Labels(nn.Module):
    """A loss that takes labels without an axis for channels."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets.squeeze(1).long())


class _Column(_Labels):
    """A loss that takes labels with an axis for channels, for labels without one."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets[:, None])


@torch.no_grad()
def _try(loss: Loss, spatial: tuple[int, ...]) -> None:
    count = loss.num_classes
    labels = torch.arange(2 * 8 ** len(spatial)).remainder(count).view(2, *([1, *spatial] if spatial else []))
    outputs = torch.zeros(2, count, *spatial)
    probabilities = one_hot(labels if spatial else labels[:, None], count)
    for targets in (labels, probabilities) if loss.takes_probabilities else (labels,):
        value = loss(outputs, targets)
        if value.numel() != 1:
            raise ValueError(f"gives {tuple(value.shape)}, expected one number")
