"""Small files of benchmarks, as their owners publish them."""

import json
import pickle
import zlib
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

OFFICE = ("amazon", "caltech", "dslr", "webcam")

DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


def counts(sites):
    return {site.name: tuple(len(cases) for cases in site.cases.values()) for site in sites}


def picture(path: Path, value: int = 0, mode: str = "RGB", size: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    place = zlib.crc32("/".join(path.parts[-3:]).encode())  # no two pictures of a site are the same
    pixels = np.random.default_rng([value, place]).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def write_fedbn(root: Path, archive: str, sites, train: int, test: int) -> None:
    """As FedBN's archives unpack: pickles of two arrays, paths from the folder above."""
    rng = np.random.default_rng(0)
    for site in sites:
        names = [f"{archive}/{site}/{label}/{i}.jpg" for label in ("bird", "tiger") for i in range(50)]
        chosen = [names[i] for i in rng.permutation(100)[: train + test]]
        for path in chosen:
            picture(root.parent / path, len(path))
        for part, listed in (("train", chosen[:train]), ("test", chosen[train:])):
            content = np.array(listed), np.array([path.split("/")[2] for path in listed])
            (root / f"{site}_{part}.pkl").write_bytes(pickle.dumps(content, protocol=4))


PACS = ("art_painting", "cartoon", "photo", "sketch")


def write_pacs(root: Path) -> None:
    for site in PACS:
        files = [f"{site}/{label}/pic_{i:03d}.jpg" for label in ("dog", "house") for i in range(5)]
        for file in files:
            picture(root / "kfold" / file, len(file))


def write_volume(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(array, np.eye(4)), path)


def write_site(folder: Path, channels: int = 1, shape=(16, 16, 4), cases=(2, 1, 1)) -> Path:
    """A site of random volumes: so many cases for training, validation and test."""
    rng = np.random.default_rng(sum(folder.name.encode()))
    content: dict = {"labels": {"0": "background", "1": "lesion"}}
    index = 0
    for split, count in zip(("training", "validation", "test"), cases, strict=True):
        content[split] = []
        for _ in range(count):
            size = shape if channels == 1 else (*shape, channels)
            write_volume(folder / f"images/{index}.nii.gz", rng.normal(100, 20, size).astype(np.float32))
            label = np.zeros(shape, np.uint8)
            label[4:9, 4:9, 1:3] = 1
            write_volume(folder / f"labels/{index}.nii.gz", label)
            content[split].append({"image": f"images/{index}.nii.gz", "label": f"labels/{index}.nii.gz"})
            index += 1
    (folder / "dataset.json").write_text(json.dumps(content))
    return folder


PROSTATE = {"BIDMC": "BIDMC", "HK": "HK", "I2CVB": "I2CVB", "BMC": "ISBI_1.5", "RUNMC": "ISBI", "UCL": "UCL"}


def write_prostate(root: Path, patients: int = 5, published: bool = False) -> int:
    """Volumes named as published; foreground in slices 0 to 5 of 6, so that 1 to 4 count."""
    rng = np.random.default_rng(0)
    for name, alias in PROSTATE.items():
        folder = root / (alias if published else name)
        ending = "Segmentation" if name == "BMC" else "segmentation"
        for case in range(0, 2 * patients, 2):
            image = rng.gamma(2.0, 100.0, (16, 16, 6)).astype(np.float32)
            label = np.zeros((16, 16, 6), np.uint8)
            label[4:9, 4:9] = 1
            label[6:9, 4:9, 2] = 2
            write_volume(folder / f"Case{case:02d}.nii.gz", image)
            write_volume(folder / f"Case{case:02d}_{ending}.nii.gz", label)
        if published:
            np.save(root / f"{alias}-index.npy", rng.permutation(4 * patients))
    return 4 * patients


def write_lgg(root: Path) -> None:
    rng = np.random.default_rng(0)
    for site, patients in (("CS", 5), ("DU", 10), ("EZ", 1)):
        for patient in range(patients):
            name = f"TCGA_{site}_{4941 + patient}_19960909"
            for number in range(1, 12):
                pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                pixels[..., 1] = number
                pixels[0, 0, 1] = 0
                mask = np.zeros((32, 32), np.uint8)
                mask[3:6, 4:9] = 255 * (number in (10, 11))
                folder = root / "kaggle_3m" / name
                folder.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(folder / f"{name}_{number}.tif")
                Image.fromarray(mask).save(folder / f"{name}_{number}_mask.tif")
    (root / "kaggle_3m/data.csv").write_text("Patient,RNASeqCluster\n")


def write_retina(root: Path, patients: int = 5, size: tuple[int, int] = (40, 32)) -> None:
    """Two cameras; at CHASEDB1 both eyes of each child, at AVWIDE no blue."""
    rng = np.random.default_rng(0)
    for name, eyes in (("AVWIDE", 1), ("CHASEDB1", 2)):
        folder = root / name
        rows = []
        for kind in ("images", "labels"):
            (folder / kind).mkdir(parents=True)
        for patient in range(patients):
            for eye in "LR"[:eyes]:
                pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
                label = (rng.random((size[1], size[0])) < 0.2).astype(np.uint8)
                if eyes == 1:
                    pixels[..., 2] = 0
                file = f"{patient}{eye}.png"
                Image.fromarray(pixels).save(folder / "images" / file)
                Image.fromarray(label).save(folder / "labels" / file)
                rows.append({"image": f"images/{file}", "label": f"labels/{file}", "patient": str(patient)})
        content = {
            "labels": {"0": "background", "1": "vessel"},
            "training": rows[: -2 * eyes],
            "validation": rows[-2 * eyes : -eyes],
            "test": rows[-eyes:],
        }
        (folder / "dataset.json").write_text(json.dumps(content))
