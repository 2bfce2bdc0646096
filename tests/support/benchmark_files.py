"""Small files of benchmarks, as their owners publish them."""

import bz2
import gzip
import json
import pickle
import struct
import zlib
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

OFFICE = ("amazon", "caltech", "dslr", "webcam")

DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


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


def write_vlcs(root: Path, times: int = 1) -> None:
    for site in ("CALTECH", "LABELME", "PASCAL", "SUN"):
        for part, number in (("train", 3), ("crossval", 1), ("test", 2)):
            for label in range(5):
                for i in range(times * number):
                    picture(root / f"{site}/{part}/{label}/{i}.jpg", i)


def write_tiny_imagenet(root: Path) -> tuple[str, ...]:
    """Three of the 200 classes; returns their names."""
    root = root / "tiny-imagenet-200"
    ids, rows = ("n01443537", "n01629819", "n02132136"), []
    for number, name in enumerate(ids):
        for i in range(12):
            picture(root / f"train/{name}/images/{name}_{i}.JPEG", i, mode="L" if i == 3 else "RGB", size=64)
        for i in range(4):
            file = f"val_{4 * number + i}.JPEG"
            picture(root / "val/images" / file, i, size=64)
            rows.append(f"{file}\t{name}\t0\t32\t44\t62")
    (root / "val/val_annotations.txt").write_text("\n".join(rows) + "\n")
    (root / "wnids.txt").write_text("\n".join(ids) + "\n")
    return ids


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


def python2_array(array: np.ndarray) -> bytes:
    """A NumPy array in the opcodes that Python 2.7 and NumPy 1.x wrote."""
    shape = b"".join(b"M" + struct.pack("<H", n) for n in array.shape)
    return (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01("
        + shape
        + b"tcnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T"
        + struct.pack("<I", array.nbytes)
        + array.tobytes()
        + b"tb"
    )


def write_cifar(root: Path, batch: int = 40, test: int = 50) -> dict[str, np.ndarray]:
    """The six pickles of "CIFAR-10 python version", byte for byte in the form of the published ones."""
    rng = np.random.default_rng(0)
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = b"(lp1\n" + b"".join(b"S'class_%d'\na" % i for i in range(10))
    (folder / "batches.meta").write_bytes(b"(dS'label_names'\n" + names + b"sS'num_vis'\nI3072\ns.")
    written = {}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        count = test if name == "test_batch" else batch
        images = rng.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = b"](" + b"".join(b"K" + bytes([i % 10]) for i in range(count)) + b"e"
        (folder / name).write_bytes(
            b"\x80\x02}(U\x0bbatch_labelU\x05batchU\x06labels"
            + labels
            + b"U\x04data"
            + python2_array(images)
            + b"u."
        )
        written[name] = images
    return written


def write_fedscale(root: Path, lists: dict[str, dict[str, int]]) -> None:
    """FedScale's FEMNIST: images, and a list of them by writer."""
    (root / "client_data_mapping").mkdir(parents=True)
    (root / "data").mkdir()
    for name, writers in lists.items():
        rows = ["client_id,sample_path,label_name,label_id"]
        for writer, number in writers.items():
            for i in range(number):
                image = f"data/{name}_{writer}_{i}.png"
                Image.new("L", (28, 28), i).save(root / image)
                rows.append(f"{writer},{image},?,{i % 62}")
        (root / f"client_data_mapping/{name}.csv").write_text("\n".join(rows) + "\n")


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def write_digits(root: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    labels, test_labels = np.arange(50) % 10, np.arange(20) % 10
    grey, test_grey = (rng.integers(0, 256, (n, 28, 28), dtype=np.uint8) for n in (50, 20))
    mnist = root / "MNIST"
    mnist.mkdir(parents=True)
    (mnist / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(grey)))
    (mnist / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    (mnist / "t10k-images-idx3-ubyte").write_bytes(idx(test_grey))
    (mnist / "t10k-labels-idx1-ubyte").write_bytes(idx(test_labels))
    usps = root / "USPS"
    usps.mkdir()
    values = rng.integers(0, 256, (50, 256))
    for name, part in (("usps.bz2", labels), ("usps.t.bz2", test_labels)):
        lines = [
            f"{label + 1} " + " ".join(f"{j + 1}:{v / 127.5 - 1:.6f}" for j, v in enumerate(values[i]))
            for i, label in enumerate(part)
        ]
        (usps / name).write_bytes(bz2.compress("\n".join(lines).encode()))
    for part, listed in (("mnist_m_train", labels), ("mnist_m_test", test_labels)):
        rows = []
        for i, label in enumerate(listed):
            picture(root / f"MNIST_M/{part}/{i:08d}.png", i, size=32)
            rows.append(f"{i:08d}.png {label}")
        (root / f"MNIST_M/{part}_labels.txt").write_text("\n".join(rows) + "\n")
    return {"MNIST": grey, "USPS": values}


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
