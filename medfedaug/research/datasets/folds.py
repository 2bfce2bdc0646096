"""Folds of a cross-validation over a site's patients."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from medfedaug.data.base import Case, SiteFolder, by_patient, shuffled, split_patients
from medfedaug.errors import ConfigError


def fold_patients(
    site: str, cases: Sequence[Case], folds: int, fold: int, seed: int = 0
) -> dict[str, Sequence[Case]]:
    """Split a site's cases for one fold of a cross-validation over its patients.

    The patients are shuffled by seed and the site's name and dealt to the folds in turn, with all their
    cases; a case without a patient's name stands for one. Fold number ``fold`` tests, the next one validates,
    the others train: over all folds, every patient is tested once. A site with fewer than three patients is
    unseen: all are tested in every fold.

    Example:
        >>> from pathlib import Path
        >>> cases = [Case(name, Path(name), "") for name in "abcdef"]
        >>> [[case.name for case in fold_patients("DU", cases, 3, fold)["test"]] for fold in (1, 2, 3)]
        [['b', 'e'], ['a', 'c'], ['f', 'd']]
    """
    if folds < 3 or not 1 <= fold <= folds:
        raise ConfigError(f"{folds} folds: at least 3 are needed; fold {fold} must be from 1 to {folds}")
    patients = by_patient(sorted(cases, key=lambda case: case.name))
    if len(patients) < 3:
        return split_patients(site, cases)
    if len(patients) < folds:
        raise ConfigError(f"site {site} has {len(patients)} patients, too few for {folds} folds")
    drawn = shuffled(patients, "folds", site, seed)
    parts = [[*chain(*drawn[k::folds])] for k in range(folds)]
    return {
        "training": [*chain(*(parts[(fold - 1 + k) % folds] for k in range(2, folds)))],
        "validation": parts[fold % folds],
        "test": parts[fold - 1],
    }


def in_fold(site: SiteFolder, folds: int, fold: int, seed: int = 0) -> SiteFolder:
    """Return a site with the splits of a fold (`fold_patients`); unchanged with 0 folds or if unseen."""
    if not folds or not site.trains:
        return site
    parts = fold_patients(site.name, [*chain(*site.cases.values())], folds, fold, seed)
    return replace(site, cases={split: tuple(cases) for split, cases in parts.items()})
