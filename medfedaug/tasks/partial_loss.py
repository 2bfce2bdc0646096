"""Losses of cases that have some classes annotated, or some voxels: marginal, and exclusion beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from medfedaug.data.annotation import Annotation
from medfedaug.errors import ConfigError
from medfedaug.functional import working_precision
from medfedaug.tasks.losses import Loss

_NEVER = -1e4
"""The logit of a class that a case cannot show: its probability is 0 in every floating-point format."""

# A perfect prediction has a loss near 0; a share of `_NEVER` in it shows.
_LARGEST = 100.0


def merged_logits(logits: Tensor, annotated: Tensor) -> Tensor:
    r"""Logits of the classes that each case has annotated, the others merged with its background.

    .. math:: q_0 = p_0 + \sum_{n \notin A} p_n, \qquad q_n = p_n \; (n \in A)

    (Shi et al., Med. Image Anal. 2021, marginal probability), computed as the logarithm of a sum of
    exponentials, so that a loss of logits stays what it is. Channels of merged classes stay, with probability
    0: a loss over a batch counts a class over the cases that have it annotated.

    Args:
        logits: (B, K, \*spatial).
        annotated: A of each case, boolean, (B, K), the background among them.
    """
    kept = annotated.reshape(*annotated.shape, *[1] * (logits.ndim - 2))
    # The background itself and all that is merged with it.
    others = kept.clone()
    others[:, 0] = False
    background = logits.masked_fill(others, -torch.inf).logsumexp(dim=1, keepdim=True)
    return torch.cat([background, logits.masked_fill(~kept, _NEVER)[:, 1:]], dim=1)


def exclusion_loss(logits: Tensor, labels: Tensor, annotated: Tensor) -> Tensor:
    r"""Overlap of the classes that a case has not annotated with the structures that it has.

    .. math:: \frac{1}{K - 1} \sum_n \Bigl( \frac{2 \sum_v p_{nv} e_{nv}}{\sum_v p_{nv} + e_{nv}}
              + \frac{1}{V} \sum_v e_{nv} \log(p_{nv} + 1) \Bigr)

    over the classes n without the background (Shi et al., Med. Image Anal. 2021, exclusion Dice and exclusion
    cross-entropy), where :math:`e_{nv} = 1` at the annotated structures of cases that have not annotated n,
    and v runs over the voxels of these cases. Cases with nothing annotated take no part.

    Args:
        logits: (B, K, \*spatial).
        labels: (B, 1, \*spatial), 0 where unknown.
        annotated: boolean, (B, K).

    Deviations:
        The paper takes e of every class, of annotated ones too, where the loss of the labels says the same.
        Its sums over a training volume are over the batch here, as the Dice of this package is.
    """
    has_some = annotated[:, 1:].any(dim=1, keepdim=True)
    lacking = (~annotated & has_some).reshape(*annotated.shape, *[1] * (logits.ndim - 2))
    shares = logits.softmax(dim=1) * lacking
    excluded = (labels > 0) * lacking.to(shares.dtype)
    over = (0, *range(2, logits.ndim))
    both, either = (shares * excluded).sum(over), (shares + excluded).sum(over)
    voxels = lacking.expand_as(shares).sum(over).clamp_min(1)
    entropy = (excluded * (shares + 1).log()).sum(over) / voxels
    found: Tensor = (2 * both / either.clamp_min(1e-5) + entropy)[1:].mean()
    return found


class PartialLoss(Loss):
    r"""A loss of label maps that are coded with what their case has annotated.

    Classes that a case has not annotated are merged with its background (`merged_logits`). Classes that no
    case of the batch has annotated take no part, so that a mean over classes is over the others; a loss with
    a weight for each class counts them as learned. Unknown voxels are left out: where there are some, the
    loss sees the known voxels of the batch as one image.

    Args:
        loss: of all classes.
        annotation: the code of the label maps.
        kind: ``"marginal"``; ``"exclusion"``, with `exclusion_loss` added; or ``"none"``, which takes for
            background what is not annotated.

    Raises:
        ConfigError: for a loss that cannot leave a class or a voxel out.
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
        """Return whether the loss takes two classes: it does not where each class has a weight."""
        try:
            with torch.no_grad():
                return bool(super().__call__(torch.zeros(1, 2, 8, 8), torch.zeros(1, 1, 8, 8)).isfinite())
        except Exception:  # each class of losses says so in its own way
            return False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        r"""The loss of logits, (B, K, \*spatial), and coded label maps, (B, 1, \*spatial)."""
        labels, known, annotated = self.annotation.decode(targets)
        if self.kind == "none":
            return super().__call__(outputs, labels)
        outputs = working_precision(outputs)
        merged = merged_logits(outputs, annotated)
        there = annotated.any(dim=0)
        if self._takes_fewer and 1 < int(there.sum()) < self.num_classes:
            merged, labels = merged[:, there], (there.cumsum(0) - 1)[labels]
        found = self._known(merged, labels, known)
        return found + exclusion_loss(outputs, labels, annotated) if self.kind == "exclusion" else found

    def _known(self, logits: Tensor, labels: Tensor, known: Tensor) -> Tensor:
        if not self.annotation.has_unknown:
            return super().__call__(logits, labels)
        chosen = known[:, 0]
        if not bool(chosen.any()):
            return 0 * logits.sum()
        image = logits.movedim(1, -1)[chosen].T[None]
        return super().__call__(image, labels[:, 0][chosen][None, None])
