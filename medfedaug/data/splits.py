"""Split cases into training, validation and test."""

from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

import numpy as np

from medfedaug.config.run import derive_seed
from medfedaug.data.base import SPLITS, Case, by_patient

T = TypeVar("T")

# Without published splits; seeds are names alone, so that all runs share a split.
_SHARES = (0.6, 0.2)


def shuffled(items: Sequence[T], *seeds: object) -> list[T]:
    """Shuffle items by a permutation that follows from some values, the same in every process."""
    order = np.random.default_rng(derive_seed(*seeds)).permutation(len(items))
    return [items[i] for i in order]


def split_by_class(
    site: str, cases: Sequence[Case], shares: tuple[float, float] = _SHARES
) -> dict[str, Sequence[Case]]:
    """Split each class by a permutation that depends only on the names of site and class."""
    split: dict[str, list[Case]] = {key: [] for key in SPLITS}
    for label in sorted({str(case.label) for case in cases}):
        images = [case for case in cases if case.label == label]
        drawn = shuffled(images, "split", site, label)
        first, second = (round(sum(shares[: k + 1]) * len(drawn)) for k in range(2))
        for key, part in zip(SPLITS, (drawn[:first], drawn[first:second], drawn[second:]), strict=True):
            split[key] += part
    return dict(split)


def split_patients(site: str, cases: Sequence[Case], seed: int = 0) -> dict[str, Sequence[Case]]:
    """Split patients 60/20/20 by a permutation that depends only on the site's name and a seed.

    Cases of one `Case.patient` stay together; a case without a name stands for a patient. A site with fewer
    than three patients is unseen: all are tested.
    """
    patients = by_patient(cases)
    if len(patients) < 3:
        return {"training": (), "validation": (), "test": tuple(cases)}
    drawn = shuffled(patients, "split", site, "patients", *([seed] if seed else []))
    held = max(1, round(_SHARES[1] * len(patients)))
    parts = (drawn[2 * held :], drawn[held : 2 * held], drawn[:held])
    return {split: [*chain(*part)] for split, part in zip(SPLITS, parts, strict=True)}
