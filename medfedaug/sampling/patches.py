"""Draw windows of patches in volumes and slices, around candidate voxels."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from medfedaug.config.plan import Plan

# Of each class and item; enough to reach any part of a lesion, in a few kilobytes.
_CANDIDATES = 1000


def patch_centres(labels: Tensor, known: Tensor | None = None) -> Tensor:
    """Choose candidate centres of patches, at most 1,000 of each class and item, evenly from all voxels.

    The background counts as a class of an item with known and unknown voxels.

    Args:
        labels: label maps, (N, 1, *spatial), 0 for an unknown class.
        known: whether the class is known, of the same shape; ``None`` for always.

    Returns:
        Rows of item, class and position, (M, 2 + spatial dimensions), int32.
    """
    rows = [torch.zeros(0, labels.ndim, dtype=torch.int32)]
    for item, label in enumerate(labels[:, 0]):
        least, inside = 1, None if known is None else known[item, 0]
        if inside is not None and bool(inside.any()) and not bool(inside.all()):
            least, label = 0, label.long().masked_fill(~inside, -1)
        for value in torch.unique(label[label >= least]).tolist():
            voxels = (label == value).nonzero()
            places = torch.linspace(0, len(voxels) - 1, min(len(voxels), _CANDIDATES)).long()
            # Above 2^24, float32 may round the last place beyond the end.
            candidates = voxels[places.clamp(max=len(voxels) - 1)]
            head = torch.tensor([item, value]).expand(len(candidates), 2)
            rows.append(torch.cat([head, candidates], dim=1).int())
    return torch.cat(rows)


def patch_window(
    size: Sequence[int], candidates: Tensor, plan: Plan, random: np.random.RandomState
) -> tuple[slice, ...]:
    """Draw the window of a patch.

    With probability `Plan.foreground` its centre is a foreground voxel, of a class that is drawn first.
    Otherwise, and without foreground, its place is uniform, or on known background where some voxels are
    unknown, since a patch of unknown voxels teaches nothing. A patch never leaves the volume, and covers an
    axis along which the volume is smaller. ``candidates`` are the rows of `patch_centres` of one item.
    """
    assert plan.patch_size is not None
    lengths = [min(n, patch) for n, patch in zip(size, plan.patch_size, strict=True)]
    room = [n - length for n, length in zip(size, lengths, strict=True)]
    # Always drawn, so that later draws do not depend on the label map.
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
