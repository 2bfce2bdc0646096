"""Losses of partially annotated cases: marginal loss and exclusion loss."""

from contextlib import suppress

import torch
from torch import Tensor

from medfedaug.data.annotation import Annotation
from medfedaug.errors import ConfigError
from medfedaug.functional import working_precision
from medfedaug.tasks.losses import Loss

_NEVER = -1e4  # logit of a class that a case cannot have: its probability is 0 in every floating-point format
# The loss of a perfect prediction is far below; with a share of `_NEVER` it is above.
_LARGEST = 100.0


def merged_logits(logits: Tensor, annotated: Tensor) -> Tensor:
    r"""Return logits of the classes that each case has annotated, the others merged with its background.

    ::

        q₀ = p₀ + Σ_(n∉A) pₙ,   qₙ = pₙ (n ∈ A)

    (Shi et al., Med. Image Anal. 2021, marginal probability), computed as the logarithm of a sum of
    exponentials, so that the result are logits again. Channels of merged classes stay, with probability 0: a
    loss over a batch counts a class over the cases that have it annotated.

    Args:
        logits: (B, K, \*spatial).
        annotated: A of each case, boolean, (B, K), with the background.
    """
    kept = annotated.reshape(*annotated.shape, *[1] * (logits.ndim - 2))
    # False for the background and all classes that are merged with it.
    others = kept.clone()
    others[:, 0] = False
    background = logits.masked_fill(others, -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([background, logits.masked_fill(~kept, _NEVER)[:, 1:]], dim=1)


def exclusion_loss(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    r"""Compute the overlap of classes that a case has not annotated with its annotated structures.

    ::

        (1/(K − 1)) Σₙ [2 (Σᵥ pₙᵥ eₙᵥ) / (Σᵥ (pₙᵥ + eₙᵥ)) + (1/V) Σᵥ eₙᵥ log(pₙᵥ + 1)]

    over the classes n without the background (Shi et al., Med. Image Anal. 2021, exclusion Dice and exclusion
    cross-entropy), where ``eₙᵥ = 1`` at the annotated structures of cases that have not annotated n,
    and v runs over the voxels of these cases. Cases with nothing annotated take no part.

    Args:
        logits: (B, K, \*spatial).
        labels: (B, 1, \*spatial), 0 where unknown.
        annotated: boolean, (B, K).

    Deviations:
        The paper also takes e of annotated classes, which the loss of the labels covers. Its sums over a
        training volume are over the batch here, as in the Dice of this package.
    """
    has_some = annotated[:, 1:].any(dim=1, keepdim=True)
    lacking = (~annotated & has_some).reshape(*annotated.shape, *[1] * (logits.ndim - 2))
    shares = logits.softmax(dim=1) * lacking
    excluded = (labels > 0) * lacking.to(shares.dtype)
    over = (0, *range(2, logits.ndim))
    both, either = (shares * excluded).sum(over), (shares + excluded).sum(over)
    voxels = lacking.expand_as(shares).sum(over).clamp_min(1)
    entropy = (excluded * (shares + 1).log()).sum(over) / voxels
    return (2 * both / either.clamp_min(1e-5) + entropy)[1:].mean()


class PartialLoss(Loss):
    """A loss of label maps whose code has the annotated classes and voxels of their case.

    Classes that a case has not annotated are merged with its background (`merged_logits`). Classes that no
    case of the batch has annotated take no part, so that a mean over classes is over the others; a loss with
    a weight for each class counts them as learned. With unknown voxels, the loss gets the known voxels of the
    batch as one image.

    Args:
        loss: the loss of all classes.
        annotation: the code of the label maps.
        kind: ``"marginal"``; ``"exclusion"``, with `exclusion_loss` added; or ``"none"``, which takes
            everything without annotation for background.
    """

    def __init__(self, loss: Loss, annotation: Annotation, kind: str = "marginal") -> None:
        super().__init__(loss.name, loss.num_classes, loss.labels, None)
        self.annotation, self.kind = annotation, kind
        if kind == "none":
            return
        if not loss.merges:
            raise ConfigError(
                f"loss {loss.name}: some classes are not annotated everywhere, which needs softmax over the "
                "classes, and no distances between voxels: choose dice_ce, or leave its activation out"
            )
        perfect = torch.zeros(1, loss.num_classes, 8, 8)
        perfect[:, 0] = 50.0
        alone = torch.eye(loss.num_classes, dtype=torch.bool)[:1]
        with torch.no_grad():
            if super().__call__(merged_logits(perfect, alone), torch.zeros(1, 1, 8, 8)) > _LARGEST:
                raise ConfigError(
                    f"loss {loss.name}: it asks for a share of every class (label smoothing), and some are "
                    "not annotated everywhere; leave that out"
                )
        self._takes_fewer = self._can_take_fewer()

    def _can_take_fewer(self) -> bool:
        """Return whether the loss takes fewer classes: it does not with a weight for each class."""
        with torch.no_grad(), suppress(Exception):  # losses have different errors
            return bool(super().__call__(torch.zeros(1, 2, 8, 8), torch.zeros(1, 1, 8, 8)).isfinite())
        return False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        r"""Compute the loss of logits, (B, K, \*spatial), and coded label maps, (B, 1, \*spatial)."""
        labels, known, annotated = self.annotation.decode(targets)
        if self.kind == "none":
            return super().__call__(outputs, labels)
        outputs = working_precision(outputs)
        merged = merged_logits(outputs, annotated)
        present = annotated.any(dim=0)
        if self._takes_fewer and 1 < int(present.sum()) < self.num_classes:
            merged, labels = merged[:, present], (present.cumsum(0) - 1)[labels]
        loss = self._known(merged, labels, known)
        return loss + exclusion_loss(outputs, labels, annotated) if self.kind == "exclusion" else loss

    def _known(self, logits: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        if not self.annotation.has_unknown:
            return super().__call__(logits, labels)
        voxels = known[:, 0]
        if not bool(voxels.any()):
            return 0 * logits.sum()
        image = logits.movedim(1, -1)[voxels].T[None]
        return super().__call__(image, labels[:, 0][voxels][None, None])
