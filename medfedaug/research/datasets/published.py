"""`Benchmark`: a published data set, as its file in ``datasets/`` registers it, and folds by patient."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from medfedaug.data.base import Case, SiteFolder, by_patient, shuffled, split_patients
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError

COMMON_OPTIONS: dict[str, Any] = {"fraction": 1.0, "unseen": ""}
"""The options of every benchmark (`open_benchmark`), with their defaults."""

FOLDS: dict[str, Any] = {"folds": 0, "fold": 1, "fold_seed": 0}
"""The options of data sets whose sites may be split into folds by patient, with their defaults."""

OPTION_TEXTS = {
    "fraction": "share of each site's training cases that is used.",
    "unseen": "a site that does not train and is tested with all its cases.",
    "folds": "number of folds by patient instead of the sites' splits, or 0; a case without a patient's name "
    "stands for one; an unseen site is tested in every fold.",
    "fold": "number of the fold that is tested, from 1.",
    "fold_seed": "seed of the shuffle that deals patients to folds.",
}
"""Texts of options that several data sets have, for the catalogue."""


@dataclass(frozen=True)
class Benchmark:
    """A published data set."""

    #: Function of folder and options that returns the sites; raises `FileNotFoundError`.
    open: Callable[..., list[SiteFolder]]
    description: str
    source: str  #: address at which its owners publish it
    layout: str  #: content of the folder, in one line
    in_folds: bool = False  #: whether it has the options `FOLDS`, too

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `open_benchmark` for this benchmark, with their defaults."""
        _, *parameters = inspect.signature(self.open).parameters.values()
        specific = {parameter.name: parameter.default for parameter in parameters}
        return {**COMMON_OPTIONS, **specific, **(FOLDS if self.in_folds else {})}


def listed_sites(root: Path, data_set: str, names: Sequence[str]) -> list[SiteFolder]:
    """Return the sites of a published data set, and no others, from folders with a ``dataset.json``."""
    folders = sorted(path.parent for path in root.glob("*/dataset.json"))
    for folder in folders:
        if folder.name not in names:
            raise DataError(
                f"no site of {data_set}, whose sites are {', '.join(names)}",
                site=folder.name,
                path=folder,
                hint="Train on sites of your own with `medfedaug simulate --data DIR`.",
            )
    return [VolumeFolder.open(folder) for folder in folders]


def base_folder(root: Path, *names: str) -> Path:
    """Return the first of some folders below ``root`` that exists, or ``root``: where an archive unpacked."""
    return next((root / name for name in names if (root / name).is_dir()), root)


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
