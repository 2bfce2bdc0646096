"""Splits of cases into training, validation and test, and their distribution to sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from medfedaug.config.run import derive_seed
from medfedaug.data.base import SPLITS, Case, SiteFolder, by_patient
from medfedaug.errors import ConfigError

T = TypeVar("T")

# Where nothing is published. Seeded by names alone, so that all runs share one split.
_SHARES = (0.6, 0.2)


def shuffled(items: Sequence[T], *named: object) -> list[T]:
    """Shuffle items by what some values are, whoever does it."""
    order = np.random.default_rng(derive_seed(*named)).permutation(len(items))
    return [items[i] for i in order]


def split_in_order(items: Sequence[T], shares: tuple[float, float] = _SHARES) -> dict[str, list[T]]:
    """The first share trains, the second validates, the rest tests.

    >>> split_in_order(range(10))
    {'training': [0, 1, 2, 3, 4, 5], 'validation': [6, 7], 'test': [8, 9]}
    """
    first, second = (round(sum(shares[: k + 1]) * len(items)) for k in range(2))
    parts = items[:first], items[first:second], items[second:]
    return {split: list(part) for split, part in zip(SPLITS, parts, strict=True)}


def split_by_class(
    site: str, cases: Sequence[Case], shares: tuple[float, float] = _SHARES
) -> dict[str, Sequence[Case]]:
    """Each class split by a permutation that depends on the names of site and class alone."""
    split: dict[str, list[Case]] = {key: [] for key in SPLITS}
    for label in sorted({str(case.label) for case in cases}):
        own = [case for case in cases if case.label == label]
        for key, part in split_in_order(shuffled(own, "split", site, label), shares).items():
            split[key] += part
    return dict(split)


def split_patients(site: str, cases: Sequence[Case], seed: int = 0) -> dict[str, Sequence[Case]]:
    """Patients split 60/20/20 by a permutation that depends on the site's name and a seed alone.

    Cases of one patient, whom `Case.patient` names, stay together; one without stands for a patient. A site
    with fewer than three patients is an unseen one: all are tested.
    """
    patients = by_patient(cases)
    if len(patients) < 3:
        return {"training": (), "validation": (), "test": tuple(cases)}
    drawn = shuffled(patients, "split", site, "patients", *([seed] if seed else []))
    held = max(1, round(_SHARES[1] * len(patients)))
    parts = (drawn[2 * held :], drawn[held : 2 * held], drawn[:held])
    return {split: _flat(part) for split, part in zip(SPLITS, parts, strict=True)}


def fold_patients(
    site: str, cases: Sequence[Case], folds: int, fold: int, seed: int = 0
) -> dict[str, Sequence[Case]]:
    """Split a site's cases for one fold of a cross-validation over its patients.

    The patients are shuffled by seed and the site's name and dealt to the folds in turn, each with all cases
    that `Case.patient` says are theirs; a case without stands for a patient. Fold number ``fold`` tests, the
    one after it validates, the others train: over all folds, every patient is tested once. A site with fewer
    than three patients is an unseen one: all are tested in every fold.

    Args:
        site: the site's name.
        cases: all of the site.
        folds: how many, at least 3.
        fold: which one, counted from 1.
        seed: of the shuffle.

    Raises:
        ConfigError: for numbers that cannot be, and a site with fewer patients than folds.

    Example:
        >>> from pathlib import Path
        >>> cases = [Case(name, Path(name), "") for name in "abcdef"]
        >>> [[case.name for case in fold_patients("DU", cases, 3, fold)["test"]] for fold in (1, 2, 3)]
        [['b', 'e'], ['a', 'c'], ['f', 'd']]
    """
    if folds < 3:
        raise ConfigError(
            f"{folds} folds: at least 3 are needed, one to test, one to validate, the rest to train"
        )
    if not 1 <= fold <= folds:
        raise ConfigError(f"fold {fold} of {folds}: a number from 1 to {folds} is needed")
    patients = by_patient(sorted(cases, key=lambda case: case.name))
    if len(patients) < 3:
        return split_patients(site, cases)
    if len(patients) < folds:
        raise ConfigError(f"site {site} has {len(patients)} patients, too few for {folds} folds")
    drawn = shuffled(patients, "folds", site, seed)
    parts = [_flat(drawn[k::folds]) for k in range(folds)]
    return {
        "training": [case for k in range(2, folds) for case in parts[(fold - 1 + k) % folds]],
        "validation": parts[fold % folds],
        "test": parts[fold - 1],
    }


def in_fold(site: SiteFolder, folds: int, fold: int, seed: int = 0) -> SiteFolder:
    """A site whose splits are a fold of all its cases (`fold_patients`), or as it is with 0 folds.

    A site that does not train is tested with all its cases in every fold.
    """
    if not folds or not site.trains:
        return site
    everything = [case for split in site.cases.values() for case in split]
    parts = fold_patients(site.name, everything, folds, fold, seed)
    return replace(site, cases={split: tuple(cases) for split, cases in parts.items()})


def _flat(patients: Sequence[Sequence[Case]]) -> list[Case]:
    return [case for cases in patients for case in cases]


def deal_by_dirichlet(labels: np.ndarray, sites: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Deal images to sites of equal size, each with its own class proportions.

    Every site draws its proportions q ~ Dirichlet(α, ..., α) and its images one by one: a class by q, then
    an image of that class without replacement. A class that is used up is left out from there on (Hsu et
    al. 2019, arXiv:1909.06335, Section 3).

    Args:
        labels: the class of each image, (N,), whole numbers.
        sites: how many.
        alpha: small gives each site few classes, large all of them.
        seed: of the proportions and the images.

    Returns:
        For each site the indices of its images, ``N // sites`` of them; a remainder is left out.

    Deviations:
        Hsu et al. write Dirichlet(α p) with p the proportions of all images, so that their α is ours times
        the number of classes; Dir(0.3) and Dir(0.6) of later papers are meant as here. Where classes differ
        in size, each has its share of the sum: α times the number of classes times p.

    Example:
        >>> [len(part) for part in deal_by_dirichlet(np.arange(20) % 4, 3, 0.5, seed=0)]
        [6, 6, 6]
    """
    if not 1 <= sites <= len(labels):
        raise ConfigError(f"{len(labels)} images cannot be dealt to {sites} sites")
    if not alpha > 0:
        raise ConfigError(f"alpha must be positive, got {alpha}")
    rng = np.random.default_rng(seed)
    classes, counts = np.unique(labels, return_counts=True)
    left = [rng.permutation(np.flatnonzero(labels == label)).tolist() for label in classes]
    prior = alpha * len(classes) * counts / counts.sum()
    dealt = []
    for _ in range(sites):
        # A gamma of so small a shape may underflow to zeros altogether.
        share = rng.dirichlet(prior)
        share = share if np.isfinite(share).all() and share.sum() > 0 else prior / prior.sum()
        own: list[int] = []
        limits = _limits(share, left)
        for number in rng.random(len(labels) // sites):
            drawn = int(np.searchsorted(limits, number, side="right"))
            own.append(left[drawn].pop())
            if not left[drawn]:
                limits = _limits(share, left)
        dealt.append(np.array(sorted(own)))
    return dealt


def _limits(share: np.ndarray, left: Sequence[Sequence[int]]) -> np.ndarray:
    """The upper limits of the classes that still have images, on a line from 0 to 1."""
    there = np.array([bool(images) for images in left])
    weights = np.where(there, share, 0.0)
    if not weights.sum() > 0:  # what this site prefers is used up, or at the very end everything
        weights = (there if there.any() else ~there).astype(float)
    limits = np.cumsum(weights / weights.sum())
    # Rounding must not leave a gap below 1, nor lead beyond the last class that has images.
    limits[limits >= limits[np.flatnonzero(weights)[-1]]] = 1.0
    return limits
