"""ProstateMRI: T2-weighted MRI of the prostate from six sources (Liu et al., IEEE TMI 2020)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from medfedaug.data.base import Case, SiteFolder, reading, split_patients
from medfedaug.data.preparation.cache import decoded
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import ConfigError, DataError
from medfedaug.research.datasets.published import Benchmark, base_folder, fold_patients
from medfedaug.utils.files import parse_json
from medfedaug.utils.validation import check_choice

if TYPE_CHECKING:
    import torch

# Names in the papers' tables, and names of folders and lists in HarmoFL's code.
_SITES = {"BIDMC": "BIDMC", "HK": "HK", "I2CVB": "I2CVB", "BMC": "ISBI_1.5", "RUNMC": "ISBI", "UCL": "UCL"}

_CLASSES = ("background", "prostate")
_TOP = 0.99  # quantile of a volume's intensities that becomes white
_FEWEST = 32  # training slices

T = TypeVar("T")


@dataclass(frozen=True)
class ProstateSite(VolumeFolder):
    """A site of ProstateMRI; a case is a patient, or with `Case.index` one slice of a patient.

    As in the papers, a volume is clipped at its 99 % quantile and mapped to whole numbers from 0 to 255. With
    ``neighbours``, a slice and the two next to it are three channels. Central gland and peripheral zone are
    one class.
    """

    neighbours: bool = True

    listing = ""
    compares_axes = False  # the published pairs agree voxel by voxel

    @property
    def scaling(self) -> str:
        """Scaling by one fixed number: volumes hold whole numbers from 0 to 255."""
        return "fixed"

    def check_files(self) -> int:
        """Check the files as `VolumeFolder.check_files` does; neighbours make three channels."""
        return super().check_files() + 2 * self.neighbours

    def load_image(self, case: Case, intensity: str = "raw") -> torch.Tensor:
        """Return the volume, (C, H, W, D) with C = 3 neighbours or 1, or a slice (C, H, W, 1).

        The values are 0 to 255, or with ``"scale"`` 0 to 1. A slice at an end of the stack is its own
        neighbour.
        """
        image = decoded("window", case.files, lambda: _window(self.name, case.image)).float()
        if self.neighbours:
            import torch

            below = torch.cat([image[..., :1], image[..., :-1]], dim=-1)
            above = torch.cat([image[..., 1:], image[..., -1:]], dim=-1)
            image = torch.cat([below, image, above])
        if case.index is not None:
            image = image[..., case.index, None]
        return image / 255 if intensity == "scale" else image

    def read_label(self, case: Case) -> torch.Tensor:
        """Return the label map with all parts of the prostate as one, (1, H, W, D) or (1, H, W, 1)."""
        path = Path(case.label)
        label = decoded("mask", [path], lambda: _mask(self.name, path)).float()
        return label if case.index is None else label[..., case.index, None]


# Cached: slices of one patient are read in any order, and each would decode the volume again.


@lru_cache(maxsize=32)
def _window(site: str, path: Path) -> torch.Tensor:
    image = VolumeFolder(site, path.parent, _CLASSES, {}).load_image(Case(path.name, path, path)).numpy()
    low, high = image.min(), np.quantile(image, _TOP)
    if not high > low:
        raise DataError("nearly every voxel has the lowest value", site=site, path=path)
    import torch

    return torch.from_numpy(((np.minimum(image, high) - low) / (high - low) * 255).astype(np.uint8))


@lru_cache(maxsize=32)
def _mask(site: str, path: Path) -> torch.Tensor:
    label = VolumeFolder(site, path.parent, _CLASSES, {}).read_label(Case(path.name, path, path))
    return label.clamp(max=1).byte()


def prostate_mri(
    root: Path,
    split: str = "patient",
    neighbours: bool = True,
    fraction: float = 1.0,
    folds: int = 0,
    fold: int = 1,
    fold_seed: int = 0,
) -> list[SiteFolder]:
    """Six sites, with ``Case00.nii.gz`` and ``Case00_segmentation.nii.gz`` for each patient.

    Args:
        split: ``"patient"``: patients split 60/20/20, scored by volume. ``"published"``: the protocol of
            HarmoFL, FedFA and FedRDN: slices with foreground, without the first and last of a volume, in the
            order of the published permutation, 60/20/20: slices of one patient are in training and test. For
            comparison with published numbers only.
        neighbours: three-slice input, as in the papers.
        fraction: of the training cases. At least 32 published slices remain, as in FedFA's code.
        folds: number of folds (`fold_patients`) instead of the patients' split, or 0.
        fold: number of the test fold, from 1.
        fold_seed: of the shuffle before the patients are dealt to the folds.
    """
    if folds and split != "patient":
        raise ConfigError(f"folds are of patients, and split={split} mixes the slices of patients")
    check_choice("split", split, ("patient", "published"))
    root = base_folder(root, "ProstateMRI", "data")
    sites: list[SiteFolder] = []
    for name, alias in _SITES.items():
        folder = root / alias if not (root / name).is_dir() else root / name
        cases = _patients(folder)
        if split == "published":
            parts = _published_slices(root, name, cases, fraction)
        else:
            if folds:
                parts = fold_patients(name, cases, folds, fold, fold_seed)
            else:
                parts = split_patients(name, cases)
            parts["training"] = parts["training"][: max(1, round(fraction * len(parts["training"])))]
        splits = {key: tuple(part) for key, part in parts.items()}
        sites.append(ProstateSite(name, folder, _CLASSES, splits, neighbours=neighbours))
    return sites


def _patients(folder: Path) -> list[Case]:
    return [
        Case(match[1], folder / f"{match[1]}.nii.gz", label)
        for label in sorted(folder.iterdir())
        if (match := re.fullmatch(r"(Case\d+)_segmentation\.nii\.gz", label.name, flags=re.IGNORECASE))
    ]


def _published_slices(
    root: Path, site: str, patients: Sequence[Case], fraction: float
) -> dict[str, Sequence[Case]]:
    reader = ProstateSite(site, root, _CLASSES, {})
    slices = []
    for patient in patients:
        foreground = reader.read_label(patient).flatten(0, 2).any(dim=0)
        for index in foreground[1:-1].nonzero().flatten().tolist():
            slices.append(Case(f"{patient.name}/{index + 1}", patient.image, patient.label, index + 1))
    path, order = _permutation(root, site)
    if sorted(order) != list(range(len(slices))):
        raise DataError(
            f"is a permutation of {len(order)} slices, the volumes have {len(slices)} with foreground",
            site=site,
            path=path,
        )
    return slice_splits([slices[i] for i in order], fraction)


def slice_splits(shuffled: Sequence[T], fraction: float = 1.0) -> dict[str, Sequence[T]]:
    """Split slices 60/20/20 in the order of the published permutation, as in FedFA's code.

    The counts agree with FedFA+ Table 2 and FedRDN Table 6 and, for a sixth, FedFA+ Table 4: counts are
    rounded down, the last 20 % test, and at least 32 slices train at any fraction.

    >>> {split: len(part) for split, part in slice_splits(range(261)).items()}
    {'training': 156, 'validation': 52, 'test': 52}
    """
    number = len(shuffled)
    training, held = shuffled[: int(0.6 * number)], int(0.2 * number)
    return {
        "training": training[: max(int(0.6 * fraction * number), _FEWEST)],
        "validation": shuffled[len(training) : len(training) + held],
        "test": shuffled[number - held :],
    }


def _permutation(root: Path, site: str) -> tuple[Path, list[int]]:
    paths = [
        folder / f"{name}-index{suffix}"
        for folder in (root, root / "splits", root.parent)
        for name in (_SITES[site], site)
        for suffix in (".npy", ".json")
    ]
    path = next(filter(Path.is_file, paths), paths[0])
    path.stat()  # a missing file has an error of its own
    with reading(site, path):
        order = np.load(path) if path.suffix == ".npy" else parse_json(path.read_text())
        return path, [int(i) for i in order]


BENCHMARKS = {
    "prostate_mri": Benchmark(
        prostate_mri,
        "ProstateMRI: prostate segmentation in T2-weighted MRI of six sites",
        "https://liuquande.github.io/SAML and, for split=published, "
        "https://github.com/med-air/HarmoFL/tree/main/data/prostate (the permutations)",
        "{BIDMC,HK,I2CVB,BMC,RUNMC,UCL}/Case<n>.nii.gz and Case<n>_segmentation.nii.gz "
        "(ISBI_1.5 may stand for BMC, ISBI for RUNMC); for split=published also <site>-index.npy",
    )
}
