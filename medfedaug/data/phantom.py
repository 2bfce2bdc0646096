"""A seeded multi-site MRI phantom: FLAIR-like brains with a bright lesion, seen by different scanners.

Anatomy differs by patient and never by site; the scanner differs by site and hardly by patient. So a method
gains on it only by handling feature shift. The phantom replaces real data in demos, tests and documentation,
and nowhere else: tissue boundaries and lesions are drawn, not segmented.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import nibabel as nib
import numpy as np
import torch
from monai.config import NdarrayOrTensor
from monai.transforms import (
    AdjustContrast,
    GaussianSmooth,
    RandBiasField,
    RandRicianNoise,
    ScaleIntensity,
    ShiftIntensity,
)
from numpy.typing import ArrayLike

from medfedaug.data.sites import MANIFEST
from medfedaug.utils.files import check_empty

CLASSES = ("background", "lesion", "ventricles", "deep grey matter", "white matter")
"""Classes of the label maps, in the order of the labels."""

SPACINGS = ((1.0, 1.0, 1.0), (3.0, 3.0, 3.0), (1.5, 1.5, 6.0))
"""Voxel size in mm where sites differ: site by site, and from the first again."""
# Splits of consecutive patients: 60/20/20, one of each from three patients on; a patient keeps its split when
# more patients are added.
_SPLITS = ("training", "validation", "test", "training", "training")
# FLAIR-like signal, fat as 1: scalp and lesion are equally bright, so that no threshold finds the lesion.
_FAT, _BONE, _FLUID, _GREY, _WHITE = 0.95, 0.08, 0.12, 0.58, 0.44

_SCALP, _SKULL, _MENINGES = 6.0, 6.0, 1.5  # thickness in mm, from the skin inwards


@dataclass(frozen=True)
class Scanner:
    """Scanner of one site; every number but the field of view varies slightly between patients.

    Attributes:
        field_of_view: in-plane edge of the image, mm.
        coverage: extent of the slice stack, mm.
        gamma: exponent of the tissue contrast (`AdjustContrast`).
        bias: largest coefficient of the coil's bias field (`RandBiasField`), whose form differs by site.
        blur: in-plane point spread, standard deviation in mm (`GaussianSmooth`).
        noise: standard deviation of the Rician noise, fat signal as 1 (`RandRicianNoise`).
        gain: stored intensity of the fat signal (`ScaleIntensity`).
        offset: stored intensity of no signal (`ShiftIntensity`).
        inverted: whether it stores no signal as bright, and the fat signal as dark.
    """

    field_of_view: float
    coverage: float
    gamma: float
    bias: float
    blur: float
    noise: float
    gain: float
    offset: float
    inverted: bool = False

    def shifted(self, shift: float) -> Scanner:
        """Return the scanner ``shift`` times as far from the middle of all scanners.

        A parameter p becomes ``m (p / m)ˢ``, m the geometric mean of its lowest and highest value; the
        coil's field s times as strong. Parameters that could remove the lesion from the image (field
        of view, coverage, blur, noise) stay within the range of scanners. A shift s of 0 makes all scanners
        equal, 1 keeps them.
        """
        if shift == 1:
            return self
        low, high = _RANGES.T
        middle = np.sqrt(low * high)
        numbers = {name: value for name, value in asdict(self).items() if name != "inverted"}
        values = np.array(list(numbers.values()))
        moved = dict(zip(numbers, middle * (values / middle) ** shift, strict=True))
        moved["bias"] = min(self.bias * shift, _STRONGEST_BIAS)
        for index, name in enumerate(moved):
            if name in ("field_of_view", "coverage", "blur", "noise"):
                moved[name] = min(max(moved[name], low[index]), high[index])
        return Scanner(**{name: round(float(v), 6) for name, v in moved.items()}, inverted=self.inverted)


@dataclass(frozen=True)
class Structure:
    """Lesions of a site's patients, and outlines of its readers.

    Attributes:
        lesions: number of lesions of a patient who has some.
        size: factor of their radius.
        outline: distance of the label's border beyond the lesion, mm; negative inside it.
        prevalence: share of the patients with lesions; the first of each split always has some.
    """

    lesions: int = 1
    size: float = 1.0
    outline: float = 0.0
    prevalence: float = 1.0


_STRONGEST_BIAS = 0.8  # beyond, parts of the head are dark

# Lowest and highest value of each parameter, in the order of `Scanner`; drawn evenly in the logarithm.
_RANGES = np.array(
    [(215, 250), (84, 100), (0.6, 1.6), (0.08, 0.4), (0.4, 2.8), (0.008, 0.06), (150, 1500), (1, 40)],
    dtype=np.float64,
)


def make_phantom(
    out_dir: str | Path,
    sites: int = 4,
    patients: int = 10,
    shape: Sequence[int] = (96, 96, 12),
    seed: int = 0,
    *,
    classes: int = 2,
    spacings: Sequence[Sequence[float]] | None = None,
    shift: float | Sequence[float] = 1.0,
    inverted: Sequence[bool] = (),
    scanner_seed: int | None = None,
    structures: Sequence[Structure] = (),
) -> list[Path]:
    """Write a federation of phantom sites, one NIfTI volume and one label map per patient.

    A site is `<out_dir>/site_A/` with `images/`, `labels/` and `dataset.json` in MONAI's decathlon style
    (`training`, `validation`, `test`, split 60/20/20 by patient). `<out_dir>/phantom.json` holds the
    arguments and every site's `Scanner`. The same seed gives the same files, byte for byte; further sites or
    patients change neither images nor splits of the others.

    Args:
        out_dir: folder to write, new or empty; it appears only when complete.
        patients: number of patients per site, at least 3 (one for each split).
        shape: voxels of a volume, (left-right, posterior-anterior, slices); without effect with ``spacings``.
        seed: from 0 to 2**32 - 1.
        classes: number of `CLASSES` that are labelled, background first; the images do not depend on it.
        spacings: voxel size in mm, site by site and from the first again, for instance `SPACINGS`:
            heads keep their size, in more or fewer voxels. By default every volume has ``shape``.
        shift: distance between the sites' scanners (`Scanner.shifted`): 0 for the same scanner everywhere,
            up to 3; or a number for each site, such as (2, 0, 0, 0) for one odd scanner. The patients do not
            depend on it.
        inverted: for each site whether its images are inverted, bright where other sites' are dark, as stains
            and modalities differ; none by default. The patients do not depend on it.
        scanner_seed: the seed of the scanners; by default ``seed``. A fixed one gives new patients the same
            scanners.
        structures: for each site, lesions and outlines; one lesion a patient, outlined exactly, by default.

    Returns:
        The sites' folders.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     [site.name for site in make_phantom(folder, sites=2, patients=3, shape=(32, 32, 4))]
        ['site_A', 'site_B']
    """
    shape = tuple(int(n) for n in shape)
    shifts = list(shift) if isinstance(shift, Sequence) else [shift] * sites
    out = Path(out_dir).resolve()
    check_empty(out)
    inversions = [bool(value) for value in inverted] or [False] * sites
    scanner_seed = seed if scanner_seed is None else scanner_seed
    structures_by_site = structures or [Structure()] * sites
    scanners = {
        _site_name(k): replace(_scanner(scanner_seed, k).shifted(shifts[k]), inverted=inversions[k])
        for k in range(sites)
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        root = Path(temporary) / out.name
        for index, (name, scanner) in enumerate(scanners.items()):
            spacing = tuple(map(float, spacings[index % len(spacings)])) if spacings else None
            grid, seeds = _grid(scanner, shape, spacing), (seed, scanner_seed)
            _write_site(
                root / name, scanner, structures_by_site[index], index, patients, grid, seeds, classes
            )
        manifest = {
            "seed": seed,
            "arguments": {
                "sites": sites,
                "patients": patients,
                **({"spacings": spacings} if spacings else {"shape": shape}),
                "classes": classes,
                "shift": shift,
                "inverted": inversions,
                "scanner_seed": scanner_seed,
                "structures": [*map(asdict, structures_by_site)],
            },
            "sites": {name: asdict(scanner) for name, scanner in scanners.items()},
        }
        (root / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        shutil.copytree(root, out, dirs_exist_ok=True)
    return [out / name for name in scanners]


def _site_name(index: int) -> str:
    first = ascii_uppercase[index // 26 - 1] if index >= 26 else ""
    return f"site_{first}{ascii_uppercase[index % 26]}"


def _scanner(seed: int, index: int) -> Scanner:
    # A scrambled Sobol sequence puts any four consecutive sites into different quarters of every range;
    # independent draws would often make two of four sites alike. Point k does not depend on later points.
    points = torch.quasirandom.SobolEngine(len(_RANGES), scramble=True, seed=seed).draw(index + 1)
    low, high = _RANGES.T
    values: list[Any] = (low * (high / low) ** points[index].double().numpy()).tolist()
    return Scanner(*(round(value, 6) for value in values))


_Grid = tuple[tuple[int, ...], np.ndarray]  # voxels, and the edges of one in mm


def _grid(scanner: Scanner, shape: tuple[int, ...], spacing: tuple[float, ...] | None) -> _Grid:
    extent = np.array([scanner.field_of_view, scanner.field_of_view, scanner.coverage])
    if spacing is None:
        return shape, extent / shape
    return tuple(max(1, round(float(n))) for n in extent / spacing), np.array(spacing)


def _write_site(
    folder: Path,
    scanner: Scanner,
    structure: Structure,
    site: int,
    patients: int,
    grid: _Grid,
    seeds: tuple[int, int],
    classes: int,
) -> None:
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    shape, spacing = grid
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = -spacing * (np.array(shape) - 1) / 2  # the middle of the head is the origin
    axes = [np.arange(n) * spacing[d] + affine[d, 3] for d, n in enumerate(shape)]
    split: dict[str, list[dict[str, str]]] = {key: [] for key in ("training", "validation", "test")}
    for patient in range(patients):
        # Numpy keeps the numbers of `RandomState` in every version.
        R = np.random.RandomState([seeds[0], site, patient])
        # A separate draw: neither anatomy nor noise of a patient depends on the prevalence.
        drawn = np.random.RandomState([seeds[0], site, patient, 1]).uniform()
        has_lesions = patient < len(set(_SPLITS)) or drawn < structure.prevalence
        signal, labels = _head(R, axes, structure, has_lesions)
        image = _acquire(signal, scanner, spacing, seeds[1], site, R)
        label = np.where(labels < classes, labels, 0).astype(np.uint8)
        entry = {}
        for key, voxels in (("image", image), ("label", label)):
            entry[key] = f"{key}s/patient_{patient + 1:03d}.nii.gz"
            volume = nib.Nifti1Image(voxels, affine)
            volume.header.set_xyzt_units("mm")
            # Not `nib.save`, which puts the time of day into the gzip header.
            (folder / entry[key]).write_bytes(gzip.compress(volume.to_bytes(), compresslevel=4, mtime=0))
        split[_SPLITS[patient % len(_SPLITS)]].append(entry)
    description = {
        "name": folder.name,
        "description": "Synthetic FLAIR-like brain MRI with one lesion a patient; not for clinical use",
        "modality": {"0": "FLAIR"},
        "labels": {str(index): name for index, name in enumerate(CLASSES[:classes])},
        "tensorImageSize": "3D",
        **{f"num{key.capitalize()}": len(entries) for key, entries in split.items()},
        **split,
    }
    (folder / "dataset.json").write_text(json.dumps(description, indent=2) + "\n")


def _waves(R: np.random.RandomState, axes: Sequence[np.ndarray], wavelength: float) -> np.ndarray:
    """Sample a smooth random function of position with about unit variance, independent of the grid."""
    number = 12
    k = R.normal(size=(number, 3))
    k *= 2 * np.pi / wavelength * R.uniform(0.7, 1.4, (number, 1)) / np.linalg.norm(k, axis=1, keepdims=True)
    # A plane wave is separable, so three short vectors and one matrix product make the volume.
    x, y, z = (np.exp(1j * np.outer(k[:, d], axis)) for d, axis in enumerate(axes))
    x *= np.exp(1j * R.uniform(0, 2 * np.pi, (number, 1)))
    total = x.T @ (y[:, :, None] * z[:, None, :]).reshape(number, -1)
    return total.real.reshape([len(axis) for axis in axes]) * np.sqrt(2 / number)


def _inside(depth: np.ndarray, width: float = 0.8) -> np.ndarray:
    """Return the soft membership of a depth in mm below a surface: 0 outside, 0.5 on it, 1 inside."""
    return 1 / (1 + np.exp(-np.clip(depth / width, -30, 30)))


def _ellipsoid(points: np.ndarray, centre: ArrayLike, axes: ArrayLike) -> np.ndarray:
    """Return the approximate depth below the surface of an ellipsoid, mm."""
    unit = (points - np.reshape(centre, (3, 1, 1, 1))) / np.reshape(axes, (3, 1, 1, 1))
    return (1 - np.sqrt((unit**2).sum(0))) * float(np.mean(np.asarray(axes)))


def _head(
    R: np.random.RandomState, axes: Sequence[np.ndarray], structure: Structure, has_lesions: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Return one patient's signal (fat as 1) and `CLASSES` on the grid of `axes` (world coordinates, mm)."""

    def waves(wavelength: float) -> np.ndarray:
        return _waves(R, axes, wavelength)

    radii = np.array([76.0, 94.0, 86.0]) * R.uniform(0.93, 1.05, 3)
    tilt = R.uniform(-0.15, 0.15)
    turn = np.array([[np.cos(tilt), -np.sin(tilt), 0], [np.sin(tilt), np.cos(tilt), 0], [0, 0, 1]])
    grid = np.stack(np.meshgrid(*axes, indexing="ij"))
    points = np.tensordot(turn, grid - R.uniform(-4, 4, 3).reshape(3, 1, 1, 1), 1)
    skin = _ellipsoid(points, (0, 0, 0), radii) + 1.5 * waves(110)
    brain = skin - _SCALP - _SKULL - _MENINGES

    # Sulci are the zero surfaces of a smooth function, down to a limited depth; the midline is one more.
    folds = 4.5 * np.abs(waves(24))
    cortex = np.hypot(folds, np.maximum(brain - R.uniform(11, 17), 0))
    midline = np.hypot(points[0] + 1.2 * waves(60), np.maximum(brain - 32, 0))
    depth = np.minimum(np.minimum(brain, cortex), midline)  # below the nearest brain surface

    size = R.uniform(0.75, 1.5)
    wobble = 1.2 * waves(50)
    mirrored = np.concatenate([np.abs(points[:1]), points[1:]])
    bent = mirrored.copy()
    bent[0] -= 0.0035 * points[1] ** 2
    ventricle = _ellipsoid(bent, (8, -2, 8), (4.5 * size, 32 * size**0.5, 12 * size)) + wobble
    nuclei = _ellipsoid(mirrored, (22, 4, 2), (9, 19, 15)) + 1.5 * wobble

    white = _inside(depth - R.uniform(3.0, 4.0)) * (1 - _inside(nuclei)) * (1 - _inside(ventricle))
    grey_signal, white_signal = _GREY + 0.02 * waves(15), _WHITE + 0.02 * waves(40)
    tissue = grey_signal + (white_signal - grey_signal) * white
    signal = _FLUID + (tissue - _FLUID) * _inside(depth - 0.5) * (1 - _inside(ventricle))
    # A thin bright lining of the ventricles is normal in FLAIR, and no lesion.
    signal += R.uniform(0.05, 0.25) * np.exp(-((ventricle + 2.5) ** 2) / 4) * _inside(brain - 15)

    # A lesion is centred on a voxel of white matter, well below the surface where there is such a place.
    home = np.flatnonzero((white > 0.8 * white.max()) & (brain > min(10.0, 0.5 * float(brain.max()))))
    in_brain, no_fluid, outlined = _inside(brain - 1.5), 1 - _inside(ventricle), np.zeros(brain.shape, bool)
    for _ in range(structure.lesions):
        centre = points.reshape(3, -1)[:, home[R.randint(len(home))]]
        radius = 7 * structure.size * 4 ** R.uniform()  # 7 to 28 mm, as many small as large
        blob = _ellipsoid(points, centre, radius * R.uniform(0.75, 1.3, 3))
        rough = waves(1.6 * radius) + 0.5 * waves(0.8 * radius)
        # The roughness fades towards the centre, which therefore always belongs to the lesion.
        blob = blob + 0.22 * radius * rough * (1 - np.clip(blob / radius, 0, 1))
        width = R.uniform(0.8, 2.2)
        lesion = _inside(blob, width) * in_brain * no_fluid
        bright = R.uniform(0.66, 0.95) * (1 + 0.06 * waves(14))
        if has_lesions:
            signal += (bright - signal) * lesion
            border = min(-structure.outline, 0.7 * float(blob.max()))  # a part of a lesion is always outlined
            outlined |= _inside(blob - border, width) * in_brain * no_fluid > 0.5

    signal = _BONE + (signal - _BONE) * _inside(brain)
    signal += (_FAT - 0.06 * np.abs(waves(30)) - signal) * (1 - _inside(skin - _SCALP))
    inside = brain > 0
    structures = (outlined, inside & (ventricle > 0), inside & (nuclei > 0), inside & (white > 0.5))
    return signal * _inside(skin), np.select(structures, range(1, len(CLASSES)), 0)


def _acquire(
    signal: np.ndarray, scanner: Scanner, spacing: np.ndarray, seed: int, site: int, R: np.random.RandomState
) -> np.ndarray:
    """Return the stored image of the site's scanner, with a variation of 5 per cent between patients."""
    means = (scanner.gamma, scanner.blur, scanner.noise, scanner.gain)
    gamma, blur, noise, gain = R.uniform(0.95, 1.05, 4) * means
    sigma = (blur / spacing[0], blur / spacing[1], 0.0)
    coil = RandBiasField(degree=2, coeff_range=(-scanner.bias, scanner.bias), prob=1.0)
    load = RandBiasField(degree=2, coeff_range=(-0.02, 0.02), prob=1.0)
    rician = RandRicianNoise(std=noise, sample_std=False, prob=1.0)
    coil.set_random_state(state=np.random.RandomState([seed, site]))  # one coil for all patients of the site
    load.set_random_state(state=R)
    rician.set_random_state(state=R)
    stored: NdarrayOrTensor = torch.as_tensor(signal[None], dtype=torch.float32)
    for effect in (  # in the order of the physics; `Compose` would set new seeds
        AdjustContrast(gamma),
        coil,
        load,
        GaussianSmooth(sigma),
        rician,
        ScaleIntensity(minv=None, maxv=None, factor=gain - 1),
        ShiftIntensity(scanner.offset),
    ):
        stored = effect(stored)
    if scanner.inverted:
        stored = gain + 2 * scanner.offset - np.asarray(stored)
    return np.clip(np.rint(np.asarray(stored)[0]), 0, np.iinfo(np.int16).max).astype(np.int16)
