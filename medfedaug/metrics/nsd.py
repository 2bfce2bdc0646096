"""NSD: normalised surface Dice, the share of two surfaces within a tolerance of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from medfedaug.metrics.base import MEAN, Metric, mean_of_classes

if TYPE_CHECKING:
    from medfedaug.metrics.label_maps import LabelMaps


def _nsd(maps: LabelMaps, index: int) -> float | None:
    """Compute the normalised surface Dice of a class (Nikolov et al. 2021).

    ::

        NSD = (|{s ∈ Sₚ: d(s, Sₜ) ≤ τ}| + |{s ∈ Sₜ: d(s, Sₚ) ≤ τ}|) / (|Sₚ| + |Sₜ|)

    with the distances d between the surfaces S of prediction and truth
    (`medfedaug.metrics.label_maps.surface_distances`). Without a truth it is ``None``, with a truth and no
    prediction 0.

    Deviations:
        Every surface voxel counts alike; Nikolov et al. weigh it by the area of the surface in it.
    """
    _, truth = maps.structure(index)
    if not bool(truth.any()):
        return None
    distances = maps.surface_distances(index)
    return 0.0 if distances is None else float((np.concatenate(distances) <= maps.tolerance).mean())


METRIC = Metric(
    "nsd",
    "NSD",
    cases="patients",
    task="segmentation",
    compute=mean_of_classes(_nsd),
    leaves=MEAN,
    position=2,
    zero_is_nothing=True,
    meaning="normalised surface Dice: the share of both surfaces that lie within a tolerance of each other.",
)
