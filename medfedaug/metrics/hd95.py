"""HD95: 95% Hausdorff distance between two surfaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from medfedaug.metrics.base import Metric, mean_of_classes

if TYPE_CHECKING:
    from medfedaug.metrics.label_maps import LabelMaps

_PERCENTILE = 95


def _hd95(maps: LabelMaps, index: int) -> float | None:
    """Compute the 95% Hausdorff distance of a class.

    ::

        HD95 = max{P₉₅(d(Sₚ, Sₜ)), P₉₅(d(Sₜ, Sₚ))}

    with the distances d between the surfaces S of prediction and truth
    (`medfedaug.metrics.label_maps.surface_distances`), and P₉₅ the 95th percentile, linear between
    neighbours. Without a truth or a prediction it is ``None``.
    """
    distances = maps.surface_distances(index)
    return None if distances is None else max(float(np.percentile(side, _PERCENTILE)) for side in distances)


METRIC = Metric(
    "hd95",
    "HD95",
    higher_is_better=False,
    # Beyond the diagonal of any scanner's volume, in millimetres or in voxels.
    largest=1e5,
    has_unit=True,
    cases="patients",
    task="segmentation",
    compute=mean_of_classes(_hd95),
    position=1,
    skips_missed=True,
    meaning="the 95% Hausdorff distance: the distance between two surfaces, without the worst 5%. Lower is "
    "better.",
)
