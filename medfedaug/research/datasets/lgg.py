"""LGG multi-site: brain MRI of lower-grade glioma from five institutions (TCGA-LGG; Buda et al. 2019)."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from medfedaug.data.base import Case, SiteFolder, split_patients
from medfedaug.data.volumes import VolumeFolder
from medfedaug.research.datasets.published import Benchmark, base_folder, listed_sites

if TYPE_CHECKING:
    import torch

_INSTITUTIONS = ("CS", "DU", "EZ", "FG", "HT")  # as in the patients' names, TCGA_CS_4941
_CLASSES = ("background", "FLAIR abnormality")
_FLAIR = 1  # of the three channels: before contrast, FLAIR, after contrast


class LGGSite(VolumeFolder):
    """Patients as folders of TIFF slices, ``<patient>_<number>.tif`` with ``..._mask.tif``."""

    listing = ""
    compares_axes = False  # TIFF has neither axes nor millimetres

    def check_files(self) -> int:
        """Check by headers that slices have masks, and all of a patient one size; return 1 channel, FLAIR."""
        for case in self.listed_cases:
            sizes = set[tuple[int, int]]()
            for slice_ in _slices(case.image):
                for path in (slice_, _mask(slice_)):
                    with self.reading(path), Image.open(path) as file:
                        sizes.add(file.size)
            if len(sizes) != 1:
                raise self.error(f"slices and masks have {len(sizes)} different sizes", case.image)
        return 1

    def read_files(self, case: Case) -> list[torch.Tensor]:
        """Read FLAIR of all slices, float32 (1, H, W, D)."""
        return [self._stack(_slices(case.image))]

    def read_label(self, case: Case) -> torch.Tensor:
        """Read the masks of all slices, 0 or 1, float32 (1, H, W, D)."""
        return (self._stack([_mask(path) for path in _slices(case.image)]) > 0).float()

    def _stack(self, paths: list[Path]) -> torch.Tensor:
        import torch

        planes = []
        for path in paths:
            with self.reading(path), Image.open(path) as file:
                pixels = np.asarray(file, np.float32)
            planes.append(pixels[..., _FLAIR] if pixels.ndim == 3 else pixels)
        return torch.from_numpy(np.stack(planes, axis=-1))[None]


def lgg_multisite(root: Path) -> list[SiteFolder]:
    """Five sites, FLAIR, split by patient; an institution with fewer than three patients is an unseen site.

    Reads the slices as published (``kaggle_3m/TCGA_<institution>_<patient>_<date>/*.tif``, split 60/20/20),
    or volumes with a ``dataset.json`` and its split for each site.

    Raises:
        DataError: for another site with a ``dataset.json``.
    """
    return listed_sites(root, "LGG", _INSTITUTIONS) or _published(root)


def _published(root: Path) -> list[SiteFolder]:
    root = base_folder(root, "kaggle_3m")
    patients: dict[str, list[Case]] = defaultdict(list)
    for folder in sorted(root.iterdir()):
        if folder.is_dir() and (match := re.fullmatch(r"TCGA_([A-Z0-9]{2})_\w+", folder.name)):
            patients[match[1]].append(Case(folder.name, folder, folder))
    return [
        LGGSite(site, root, _CLASSES, {k: tuple(v) for k, v in split_patients(site, cases).items()})
        for site, cases in sorted(patients.items())
    ]


def _slices(folder: Path) -> list[Path]:
    """Return a patient's slices from first to last; the numbers have no leading zeros."""
    numbered = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := re.fullmatch(r".*_(\d+)\.tif", path.name))
    ]
    return [path for _, path in sorted(numbered)]


def _mask(path: Path) -> Path:
    return path.with_name(f"{path.stem}_mask.tif")


BENCHMARKS = {
    "lgg_multisite": Benchmark(
        lgg_multisite,
        "LGG: FLAIR abnormality in brain MRI of five institutions",
        "https://www.kaggle.com/datasets/mateuszbuda/lgg-mri-segmentation",
        "kaggle_3m/TCGA_<institution>_<patient>_<date>/*.tif, or <site>/dataset.json with volumes",
        in_folds=True,
    )
}
