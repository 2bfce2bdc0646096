"""Patches of volumes and slices: where they are cut, and the voxels that they are centred on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from medfedaug.config.plan import Plan

# Of each class and item; enough that any part of a lesion is hit, and a few kilobytes.
_CANDIDATES = 1000


def patch_centres(labels: Tensor, known: Tensor | None = None) -> Tensor:
    """Voxels that a patch may be centred on, at most 1,000 of each class and item, evenly from all.

    The background is among the classes of an item of which some voxels are unknown, and some are not.

    Args:
        labels: label maps, (N, 1, *spatial), 0 where the class is unknown.
        known: whether it is known, the same; ``None`` where it always is.

    Returns:
        Rows of item, class and position, (M, 2 + spatial dimensions), int32.
    """
    rows = [torch.zeros(0, labels.ndim, dtype=torch.int32)]
    for item, label in enumerate(labels[:, 0]):
        least, told = 1, None if known is None else known[item, 0]
        if told is not None and bool(told.any()) and not bool(told.all()):
            least, label = 0, label.long().masked_fill(~told, -1)
        for value in torch.unique(label[label >= least]).tolist():
            found = (label == value).nonzero()
            places = torch.linspace(0, len(found) - 1, min(len(found), _CANDIDATES)).long()
            # Above 2^24, float32 may round the last place to one that is not there.
            chosen = found[places.clamp(max=len(found) - 1)]
            head = torch.tensor([item, value]).expand(len(chosen), 2)
            rows.append(torch.cat([head, chosen], dim=1).int())
    return torch.cat(rows)


def patch_window(
    size: Sequence[int], candidates: Tensor, plan: Plan, random: np.random.RandomState
) -> tuple[slice, ...]:
    """Draw where a patch is cut.

    With probability `Plan.foreground` it is centred on a foreground voxel, of a class that is drawn first;
    otherwise, and where there is no foreground, its place is uniform, or on known background where some
    voxels are unknown: of these alone a patch teaches nothing. A patch never leaves the volume: along an axis
    on which the volume is smaller, all of it is taken.

    Args:
        size: of the volume, *spatial.
        candidates: rows of `patch_centres`, of one item.
        plan: patch size and share of the foreground.
        random: draws.
    """
    assert plan.patch_size is not None
    lengths = [min(n, patch) for n, patch in zip(size, plan.patch_size, strict=True)]
    room = [n - length for n, length in zip(size, lengths, strict=True)]
    # Drawn in any case, so that the draws that follow do not depend on the label map.
    share, which, where = random.uniform(), random.uniform(), random.uniform(size=len(size))
    foreground = candidates[candidates[:, 1] > 0]
    of_class = candidates[candidates[:, 1] == 0]
    if share < plan.foreground and len(foreground):
        classes = foreground[:, 1].unique()
        of_class = foreground[foreground[:, 1] == classes[int(which * len(classes))]]
    if len(of_class):
        centre = of_class[int(where[0] * len(of_class)), 2:].tolist()
        starts = [
            min(max(c - length // 2, 0), most) for c, length, most in zip(centre, lengths, room, strict=True)
        ]
    else:
        starts = [int(share * (most + 1)) for share, most in zip(where, room, strict=True)]
    return tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
