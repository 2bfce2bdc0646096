"""Each benchmark on small files in its published layout, and on the real ones where they are at hand."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED, write_volume
from PIL import Image

from medfedaug.data import archives
from medfedaug.data.benchmarks import BENCHMARKS, MARKER, open_benchmark, write_federation
from medfedaug.data.prostate import slice_splits
from medfedaug.data.sites import check_federation, find_sites, open_site
from medfedaug.data.splits import deal_by_dirichlet
from medfedaug.errors import ConfigError, DataError
from medfedaug.evaluate import evaluate_model
from medfedaug.federation import run_in_process
from medfedaug.federation.output import write_run
from medfedaug.simulate import configure

OFFICE = ("amazon", "caltech", "dslr", "webcam")
DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def counts(sites):
    return {site.name: tuple(len(cases) for cases in site.cases.values()) for site in sites}


def picture(path: Path, value: int = 0, mode: str = "RGB", size: int = 8) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(value).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


# --- Photographs ------------------------------------------------------------------------------------------


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


def test_office_caltech_10_as_fedbn_publishes_it(tmp_path):
    root = tmp_path / "office_caltech_10"
    write_fedbn(root, "office_caltech_10", OFFICE, train=11, test=3)
    for folder in (root, tmp_path):
        sites = open_benchmark("office_caltech_10", folder)
        assert counts(sites) == dict.fromkeys(OFFICE, (6, 5, 3))
        assert check_federation(sites) == ("classification", 3, ("bird", "tiger"))
    listed = pickle.loads((root / "dslr_train.pkl").read_bytes())[0]
    assert [f"office_caltech_10/{case.name}" for case in sites[2].cases["training"]] == listed[:6].tolist()
    assert sites[2].load_image(sites[2].cases["test"][0]).shape == (3, 8, 8)


def test_domainnet_10_has_the_papers_shares(tmp_path):
    write_fedbn(tmp_path / "DomainNet", "DomainNet", DOMAINNET, train=50, test=4)
    sites = open_benchmark("domainnet_10", tmp_path)
    assert counts(sites) == dict.fromkeys(DOMAINNET, (16, 10, 4))
    listed = pickle.loads((tmp_path / "DomainNet/real_train.pkl").read_bytes())[0].tolist()
    real = sites[4]
    assert [f"DomainNet/{case.name}" for case in real.cases["training"]] == listed[:16]
    assert [f"DomainNet/{case.name}" for case in real.cases["validation"]] == listed[-10:]
    assert counts(open_benchmark("domainnet_10", tmp_path, fraction=1.0))["real"] == (40, 10, 4)


@pytest.mark.skipif(not (SHARED / "data/splits").is_dir(), reason="the published lists are not at hand")
def test_domainnet_10_has_the_papers_counts(tmp_path):
    (tmp_path / "splits").symlink_to(SHARED / "data/splits/domainnet_10")
    assert counts(open_benchmark("domainnet_10", tmp_path)) == {
        "clipart": (672, 420, 526),
        "infograph": (840, 525, 657),
        "painting": (791, 494, 619),
        "quickdraw": (1280, 800, 1000),
        "real": (1556, 972, 1217),
        "sketch": (708, 442, 554),
    }


PACS = ("art_painting", "cartoon", "photo", "sketch")


def write_pacs(root: Path) -> None:
    for site in PACS:
        files = [f"{site}/{label}/pic_{i:03d}.jpg" for label in ("dog", "house") for i in range(5)]
        for file in files:
            picture(root / "kfold" / file, len(file))
        lines = [f"{file} {1 + ('house' in file)}" for file in files]
        held = [lines[0], lines[4], lines[5], lines[9]]
        parts = {"train": [line for line in lines if line not in held], "crossval": held, "test": lines}
        if site == "sketch":  # an image that the archive does not have
            parts["train"].append("sketch/dog/n02103406_4068-1.png 1")
        (root / "pacs_label").mkdir(exist_ok=True)
        for part, listed in parts.items():
            (root / f"pacs_label/{site}_{part}_kfold.txt").write_text("\n".join(listed) + "\n")


def test_pacs_split_by_seed_and_as_published(tmp_path):
    write_pacs(tmp_path)
    sites = open_benchmark("pacs", tmp_path)
    assert counts(sites) == dict.fromkeys(PACS, (6, 2, 2))
    assert sites[0].cases == open_site(tmp_path / "kfold/art_painting").cases
    sites = open_benchmark("pacs", tmp_path, split="published")
    assert counts(sites) == dict.fromkeys(PACS, (6, 2, 2))
    assert [case.name for case in sites[3].cases["validation"]] == ["dog/pic_000.jpg", "house/pic_000.jpg"]
    assert [case.label for case in sites[3].cases["test"]] == ["dog", "house"]
    assert check_federation(sites) == ("classification", 3, ("dog", "house"))


@pytest.mark.skipif(not (SHARED / "data/pacs_128").is_dir(), reason="PACS is not at hand")
def test_pacs_has_all_images():
    sites = open_benchmark("pacs", SHARED / "data/pacs_128")
    assert {name: sum(parts) for name, parts in counts(sites).items()} == {
        "art_painting": 2048,
        "cartoon": 2344,
        "photo": 1670,
        "sketch": 3929,
    }
    assert check_federation(sites)[2] == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def test_vlcs_in_both_layouts(tmp_path):
    for site in ("CALTECH", "LABELME", "PASCAL", "SUN"):
        for part, number in (("train", 3), ("crossval", 1), ("test", 2)):
            for label in range(5):
                for i in range(number):
                    picture(tmp_path / f"VLCS/{site}/{part}/{label}/{i}.jpg", i)
    sites = open_benchmark("vlcs", tmp_path)
    assert counts(sites) == dict.fromkeys(("CALTECH", "LABELME", "PASCAL", "SUN"), (15, 5, 10))
    assert check_federation(sites)[2] == ("bird", "car", "chair", "dog", "person")
    assert sites[0].cases["test"][-1].label == "person"
    other = tmp_path / "domainbed/VLCS"
    for site in ("Caltech101", "VOC2007"):
        for label in ("bird", "car"):
            for i in range(5):
                picture(other / site / label / f"{i}.jpg", i)
    assert counts(open_benchmark("vlcs", other)) == {"Caltech101": (6, 2, 2), "VOC2007": (6, 2, 2)}


def test_officehome_has_a_site_with_a_space_in_its_folder(tmp_path):
    root = tmp_path / "OfficeHomeDataset_10072016"
    for folder in ("Art", "Clipart", "Product", "Real World"):
        for label in ("Alarm_Clock", "Backpack"):
            for i in range(1, 6):
                picture(root / folder / label / f"{i:05d}.jpg", i)
    sites = open_benchmark("officehome", tmp_path)
    assert counts(sites) == dict.fromkeys(("Art", "Clipart", "Product", "Real_World"), (6, 2, 2))
    check_federation(sites)


# --- Archives ---------------------------------------------------------------------------------------------


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


def test_cifar_10_is_dealt_out_whole_and_the_test_set_in_equal_parts(tmp_path):
    written = write_cifar(tmp_path)
    sites = open_benchmark("cifar_10", tmp_path, clients=5, alpha=0.3)
    assert [site.name for site in sites] == [f"client_{i:03d}" for i in range(5)]
    assert counts(sites) == dict.fromkeys(counts(sites), (36, 4, 10))
    assert check_federation(sites) == ("classification", 3, tuple(f"class_{i}" for i in range(10)))
    for split, total in (("training", 180), ("validation", 20), ("test", 50)):
        assert len({case.name for site in sites for case in site.cases[split]}) == total
    for case in (sites[0].cases["training"][0], sites[3].cases["test"][5]):
        image = sites[0].load_image(case)
        assert image.dtype == torch.uint8
        expected = written[case.image.name][case.index].reshape(3, 32, 32)
        np.testing.assert_array_equal(image.numpy(), expected)
        np.testing.assert_allclose(sites[0].load_image(case, "scale"), expected / 255, rtol=1e-6)
        assert case.label == f"class_{case.index % 10}"
    assert open_benchmark("cifar_10", tmp_path, clients=5, seed=1)[0].cases != sites[0].cases
    assert open_benchmark("cifar_10", tmp_path, clients=5)[0].cases == sites[0].cases


def test_tiny_imagenet(tmp_path):
    root = tmp_path / "tiny-imagenet-200"
    ids = ("n01443537", "n01629819", "n02132136")
    rows = []
    for number, name in enumerate(ids):
        for i in range(12):
            picture(root / f"train/{name}/images/{name}_{i}.JPEG", i, mode="L" if i == 3 else "RGB", size=64)
        for i in range(4):
            file = f"val_{4 * number + i}.JPEG"
            picture(root / "val/images" / file, i, size=64)
            rows.append(f"{file}\t{name}\t0\t32\t44\t62")
    (root / "val/val_annotations.txt").write_text("\n".join(rows) + "\n")
    (root / "wnids.txt").write_text("\n".join(ids) + "\n")
    sites = open_benchmark("tiny_imagenet", tmp_path, clients=3, alpha=0.6, validation=0.25)
    assert counts(sites) == dict.fromkeys(counts(sites), (9, 3, 4))
    assert check_federation(sites) == ("classification", 3, ids)
    assert sites[0].load_image(sites[0].cases["training"][0]).shape == (3, 64, 64)
    for site in sites:
        assert all(case.name.split("/")[1].startswith("val_") for case in site.cases["test"])


def test_small_alpha_gives_few_classes_and_large_alpha_all():
    labels = np.arange(10_000) % 10

    def largest_share(alpha):
        parts = deal_by_dirichlet(labels, 20, alpha, seed=3)
        assert {len(part) for part in parts} == {500}
        assert len(np.unique(np.concatenate(parts))) == 10_000
        return np.mean([np.bincount(labels[part], minlength=10).max() / 500 for part in parts])

    # One class of ten has 0.1 to 0.13 of 500 images when all are equally likely, and all of them when the
    # draw is of one class alone, but for the last sites, which get what is left.
    assert largest_share(1e4) < 0.14
    assert 0.3 < largest_share(0.3) < 0.7
    assert largest_share(1e-6) > 0.8


@pytest.mark.parametrize(("sites", "alpha"), [(0, 1.0), (11, 1.0), (2, 0.0), (2, float("nan"))])
def test_deals_that_cannot_be(sites, alpha):
    with pytest.raises(ConfigError):
        deal_by_dirichlet(np.zeros(10, int), sites, alpha, seed=0)


def leaf(writers: dict[str, int], offset: int = 0) -> str:
    data = {
        name: {
            "x": [(np.full(784, ((i + offset) % 256) / 255)).tolist() for i in range(number)],
            "y": [(i + offset) % 62 for i in range(number)],
        }
        for name, number in writers.items()
    }
    return json.dumps({"users": list(writers), "num_samples": list(writers.values()), "user_data": data})


def test_femnist_keeps_leafs_own_division(tmp_path):
    for part, first, second in (("train", 20, 30), ("test", 3, 4)):
        folder = tmp_path / "data" / part
        folder.mkdir(parents=True)
        (folder / f"all_data_0_niid_0_keep_0_{part}_9.json").write_text(leaf({"f0000_14": first}, 7))
        both = leaf({"f0001_41": second, "f0009_00": 1}, 9)
        (folder / f"all_data_1_niid_0_keep_0_{part}_9.json").write_text(both)
    sites = open_benchmark("femnist", tmp_path)
    assert counts(sites) == {"f0000_14": (18, 2, 3), "f0001_41": (27, 3, 4)}  # the third has too few
    assert check_federation(sites)[2] == tuple(sorted(CHARACTERS))
    case = next(c for c in sites[1].cases["training"] if c.index == 5)
    assert case.label == CHARACTERS[14]
    assert sites[1].load_image(case).unique().tolist() == [14]
    assert [site.name for site in open_benchmark("femnist", tmp_path, writers=1)] == ["f0000_14"]
    with pytest.raises(ConfigError, match="3 writers were asked for, 2 have 10 images"):
        open_benchmark("femnist", tmp_path, writers=3)


def test_femnist_without_leafs_division_is_split_by_writer(tmp_path):
    (tmp_path / "all_data").mkdir()
    (tmp_path / "all_data/all_data_0.json").write_text(leaf({"f0000_14": 20, "f0001_41": 40}))
    assert counts(open_benchmark("femnist", tmp_path)) == {"f0000_14": (16, 2, 2), "f0001_41": (32, 4, 4)}


def test_emnist_by_writer(tmp_path):
    scipy_io = pytest.importorskip("scipy.io")
    rng = np.random.default_rng(0)

    def part(number):
        return {
            "images": rng.integers(0, 256, (number, 784), dtype=np.uint8),
            "labels": (np.arange(number, dtype=np.uint8) % 62)[:, None],
            "writers": (np.arange(number, dtype=np.uint16) % 3)[:, None] + 100,
        }

    train, test = part(60), part(30)
    (tmp_path / "matlab").mkdir()
    content = {"dataset": {"train": train, "test": test, "mapping": np.zeros((62, 2), np.uint8)}}
    scipy_io.savemat(tmp_path / "matlab/emnist-byclass.mat", content, do_compression=True)
    sites = open_benchmark("emnist", tmp_path)
    assert counts(sites) == dict.fromkeys(("writer_0100", "writer_0101", "writer_0102"), (24, 3, 3))
    case = next(case for site in sites for split in site.cases.values() for case in split if case.index == 70)
    assert case.label == CHARACTERS[10]
    # MATLAB wrote the columns one after the other.
    expected = test["images"][10].reshape(28, 28).T
    np.testing.assert_array_equal(sites[0].load_image(case)[1], expected)
    check_federation(sites)


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


def test_digits_in_their_authors_files(tmp_path):
    written = write_digits(tmp_path)
    names = ["MNIST", "MNIST_M", "USPS"]
    try:
        from scipy.io import savemat
    except ImportError:
        pass
    else:
        names = ["MNIST", "MNIST_M", "SVHN", "USPS", "SynthDigits"]
        for site, stem in (("SVHN", ""), ("SynthDigits", "synth_")):
            (tmp_path / site).mkdir()
            for part, number in (("train", 50), ("test", 20)):
                colour = np.full((32, 32, 3, number), 9, np.uint8) * np.arange(number, dtype=np.uint8)
                label = (np.arange(number, dtype=np.uint8) % 10)[:, None]
                if site == "SVHN":
                    label[label == 0] = 10
                savemat(tmp_path / f"{site}/{stem}{part}_32x32.mat", {"X": colour, "y": label})
    sites = {site.name: site for site in open_benchmark("digits", tmp_path)}
    assert counts(sites.values()) == dict.fromkeys(names, (40, 10, 20))
    assert check_federation(list(sites.values())) == ("classification", 3, tuple("0123456789"))
    for site in sites.values():
        for case in site.cases["training"]:
            number = int(case.image.stem) if site.name == "MNIST_M" else case.index
            assert case.label == str(number % 10)
    case = sites["MNIST"].cases["validation"][4]
    image = sites["MNIST"].load_image(case)
    for channel in image:
        np.testing.assert_array_equal(channel, written["MNIST"][case.index])
    case = sites["USPS"].cases["training"][3]
    image = sites["USPS"].load_image(case)[0].numpy().astype(int).ravel()
    assert abs(image - written["USPS"][case.index]).max() <= 1
    if "SVHN" in sites:
        case = sites["SVHN"].cases["test"][13]
        assert sites["SVHN"].load_image(case).unique().tolist() == [9 * 13 % 256]


def test_digits_as_fedbn_publishes_them(tmp_path):
    rng = np.random.default_rng(0)
    for site, shape in (("MNIST", (28, 28)), ("SVHN", (32, 32, 3))):
        folder = tmp_path / "digit_dataset" / site
        (folder / "partitions").mkdir(parents=True)
        for i in range(10):
            pair = rng.integers(0, 256, (7, *shape), dtype=np.uint8), np.arange(7)
            (folder / f"partitions/train_part{i}.pkl").write_bytes(pickle.dumps(pair, protocol=4))
        pair = rng.integers(0, 256, (5, *shape), dtype=np.uint8), np.arange(5)
        (folder / "test.pkl").write_bytes(pickle.dumps(pair, protocol=5))
    sites = open_benchmark("digits", tmp_path)
    assert counts(sites) == dict.fromkeys(("MNIST", "SVHN"), (56, 14, 5))
    assert check_federation(sites)[1] == 3
    np.testing.assert_array_equal(sites[1].load_image(sites[1].cases["test"][2]).permute(1, 2, 0), pair[0][2])


class Harmful:
    def __reduce__(self):
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Harmful()),
        pickle.dumps((np.array([Harmful()], dtype=object), np.zeros(1))),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"c_codecs\nencode\n(S'x'\nS'zlib'\ntR.",
        b"",
        b"\x80\x04",
    ],
)
def test_a_pickle_runs_nothing(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    write_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py/data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_3: cannot be read"):
        open_benchmark("cifar_10", tmp_path)
    (tmp_path / "amazon_train.pkl").write_bytes(content)
    with pytest.raises(DataError, match=r"site amazon, .*amazon_train\.pkl: cannot be read"):
        open_benchmark("office_caltech_10", tmp_path)
    assert not (tmp_path / "harmed").exists()


def test_an_archive_that_changed_is_noticed(tmp_path):
    write_cifar(tmp_path)
    site = open_benchmark("cifar_10", tmp_path, clients=2)[0]
    archives.read_archive.cache_clear()
    other = tmp_path / "other"
    write_cifar(other, batch=3)
    path = tmp_path / "cifar-10-batches-py/data_batch_1"
    path.write_bytes((other / "cifar-10-batches-py/data_batch_1").read_bytes())
    with pytest.raises(DataError, match=r"site client_000, .*data_batch_1: holds 3 images, number \d+ is"):
        site.check_files()
    path.unlink()
    archives.read_archive.cache_clear()
    with pytest.raises(DataError, match=r"site client_000, .*data_batch_1: a listed file is missing"):
        site.check_files()


# --- Volumes ----------------------------------------------------------------------------------------------

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


def window(volume: np.ndarray) -> np.ndarray:
    """The papers' intensities: clipped at the 99 % quantile, 0 to 255, fractions cut off."""
    high, low = np.quantile(volume, 0.99), volume.min()
    return np.floor((np.minimum(volume, high) - low) / (high - low) * 255)


def test_prostate_mri_is_split_by_patient_and_has_three_slices(tmp_path):
    import nibabel

    write_prostate(tmp_path)
    sites = open_benchmark("prostate_mri", tmp_path)
    assert counts(sites) == dict.fromkeys(PROSTATE, (3, 1, 1))
    assert check_federation(sites) == ("segmentation", 3, ("background", "prostate"))
    site = sites[3]
    case = site.cases["training"][0]
    image, label = site.load_case(case)
    expected = window(np.asarray(nibabel.load(case.image).dataobj))
    assert image.shape == (3, 16, 16, 6)
    np.testing.assert_array_equal(image[1], expected)
    np.testing.assert_array_equal(image[0, ..., 1:], expected[..., :-1])
    np.testing.assert_array_equal(image[2, ..., :-1], expected[..., 1:])
    np.testing.assert_array_equal(image[0, ..., 0], expected[..., 0])
    assert (image.min(), image.max()) == (0, 255)
    assert label.unique().tolist() == [0, 1]
    scaled, _ = site.load_case(case, "scale")
    np.testing.assert_allclose(scaled, image / 255)
    single = open_benchmark("prostate_mri", tmp_path, neighbours=False)
    assert check_federation(single)[1] == 1
    np.testing.assert_array_equal(single[3].load_image(case)[0], expected)


def test_prostate_mri_in_the_published_order_of_slices(tmp_path):
    number = write_prostate(tmp_path, patients=20, published=True)
    sites = open_benchmark("prostate_mri", tmp_path, split="published")
    assert [site.name for site in sites] == list(PROSTATE)
    assert counts(sites) == dict.fromkeys(PROSTATE, (48, 16, 16))
    site = sites[3]
    order = np.load(tmp_path / "ISBI_1.5-index.npy").tolist()
    slices = [(f"Case{2 * p:02d}", z) for p in range(20) for z in (1, 2, 3, 4)]
    listed = [case for split in site.cases.values() for case in split]
    assert [case.name for case in listed] == ["{}/{}".format(*slices[i]) for i in order]
    image, label = site.load_case(listed[5])
    volume = open_benchmark("prostate_mri", tmp_path)[3]
    patient = next(
        c for split in volume.cases.values() for c in split if c.name == listed[5].name.split("/")[0]
    )
    whole, whole_label = volume.load_case(patient)
    index = listed[5].index
    np.testing.assert_array_equal(image, whole[..., index : index + 1])
    np.testing.assert_array_equal(label, whole_label[..., index : index + 1])
    assert check_federation(sites) == ("segmentation", 3, ("background", "prostate"))
    # FedFA's code keeps at least 32 slices, and so the numbers of FedFA+ Table 4.
    mini = open_benchmark("mini_prostate_mri", tmp_path, split="published")
    assert counts(mini) == dict.fromkeys(PROSTATE, (32, 16, 16))
    assert mini[3].cases["training"] == site.cases["training"][:32]
    assert counts(open_benchmark("mini_prostate_mri", tmp_path)) == dict.fromkeys(PROSTATE, (2, 4, 4))
    np.save(tmp_path / "UCL-index.npy", np.arange(number - 1))
    with pytest.raises(DataError, match=r"site UCL, .*UCL-index\.npy: is a permutation of 79 .* have 80"):
        open_benchmark("prostate_mri", tmp_path, split="published")
    (tmp_path / "UCL-index.npy").unlink()
    with pytest.raises(DataError, match=r"UCL-index\.npy: not there.*github\.com/med-air/HarmoFL"):
        open_benchmark("prostate_mri", tmp_path, split="published")


@pytest.mark.skipif(
    not (SHARED / "data/splits").is_dir(), reason="the published permutations are not at hand"
)
def test_the_published_permutations_give_the_papers_counts():
    """FedFA+ Table 2 and, for a sixth, Table 4."""
    found = {}
    for name, alias in PROSTATE.items():
        order = json.loads((SHARED / f"data/splits/prostate_mri/{alias}-index.json").read_text())
        whole, mini = slice_splits(order, 1.0), slice_splits(order, 1 / 6)
        found[name] = (*(len(whole[split]) for split in whole), len(mini["training"]))
    assert found == {
        "BIDMC": (156, 52, 52, 32),
        "HK": (94, 31, 31, 32),
        "I2CVB": (280, 93, 93, 46),
        "BMC": (230, 76, 76, 38),
        "RUNMC": (246, 82, 82, 41),
        "UCL": (105, 35, 35, 32),
    }


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


def test_lgg_as_published_slices(tmp_path):
    write_lgg(tmp_path)
    sites = open_benchmark("lgg_multisite", tmp_path)
    assert counts(sites) == {"CS": (3, 1, 1), "DU": (6, 2, 2), "EZ": (0, 0, 1)}
    assert check_federation(sites) == ("segmentation", 1, ("background", "FLAIR abnormality"))
    image, label = sites[1].load_case(sites[1].cases["training"][0])
    assert image.shape == label.shape == (1, 32, 32, 11)
    assert image[0, 5, 5].tolist() == list(range(1, 12))  # by number, not by name
    assert label.sum(dim=(0, 1, 2)).tolist() == [0] * 9 + [15, 15]
    folder = sites[0].cases["test"][0].image
    next(folder.glob("*_3_mask.tif")).unlink()
    with pytest.raises(DataError, match=r"site CS, .*_3_mask\.tif: a slice has no mask"):
        check_federation(sites)


LGG = SHARED / "data/lgg_multisite"


@pytest.mark.skipif(not LGG.is_dir(), reason="the LGG volumes are not beside the project")
def test_lgg_as_prepared_volumes():
    sites = open_benchmark("lgg_multisite", LGG)
    assert [site.name for site in sites] == ["CS", "DU", "EZ", "FG", "HT"]
    assert [site.cases for site in sites] == [site.cases for site in find_sites(LGG)]


@pytest.mark.skipif(
    not (SHARED / "data/office_caltech_10").is_dir(), reason="Office-Caltech 10 is not beside the project"
)
def test_office_caltech_10_is_the_same_as_folder_and_as_benchmark():
    root = SHARED / "data/office_caltech_10"
    sites = open_benchmark("office_caltech_10", root)
    for site, folder in zip(sites, find_sites(root), strict=True):
        for split, cases in site.cases.items():
            assert [(case.name, case.label) for case in cases] == [
                (case.name, case.label) for case in folder.cases[split]
            ]


# --- All --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHMARKS)
def test_what_is_missing_is_named_with_its_source_and_layout(tmp_path, name):
    with pytest.raises(DataError) as caught:
        open_benchmark(name, tmp_path / "nowhere")
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'nowhere'}")
    assert f"not there, and {name} needs it. Get the files from " in message
    assert "http" in BENCHMARKS[name].source
    for text in (BENCHMARKS[name].source, BENCHMARKS[name].layout, f"below {tmp_path / 'nowhere'}."):
        assert text in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar", {}, "benchmark 'cifar' is not known; choose from office_caltech_10, "),
        ("pacs", {"folds": 3}, "pacs has no option 'folds'; it has fraction, unseen, split"),
        ("pacs", {"split": "random"}, "split 'random' is not known"),
        ("pacs", {"split": 3}, "pacs: split is 3, a str is needed"),
        ("pacs", {"unseen": "dslr"}, "no site 'dslr'; the sites are art_painting, cartoon, photo, sketch"),
        ("pacs", {"fraction": 0.0}, "fraction must be above 0"),
        ("cifar_10", {"clients": "ten"}, "cifar_10: clients is 'ten', a int is needed"),
        ("cifar_10", {"clients": True}, "clients is True"),
        ("prostate_mri", {"neighbours": 1}, "neighbours is 1, a bool is needed"),
        ("domainnet_10", {"fraction": 2}, "fraction must be above 0"),
    ],
)
def test_options_that_cannot_be(tmp_path, name, options, message):
    write_pacs(tmp_path)
    with pytest.raises(ConfigError, match=message):
        open_benchmark(name, tmp_path, **options)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_and_option_is_documented(name):
    page = (Path(__file__).parents[1] / "docs/data.md").read_text(encoding="utf-8")
    row = next(line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    for option in set(BENCHMARKS[name].options) - {"fraction", "unseen"}:
        assert f"`{option}`" in row or row.endswith("| the same |")


def test_fraction_unseen_and_limit_apply_to_every_benchmark(tmp_path):
    write_pacs(tmp_path)
    sites = open_benchmark("pacs", tmp_path, fraction=0.5, unseen="photo")
    assert counts(sites) == {
        "art_painting": (3, 2, 2),
        "cartoon": (3, 2, 2),
        "photo": (0, 0, 10),
        "sketch": (3, 2, 2),
    }
    assert {case.label for case in sites[0].cases["training"]} == {"dog", "house"}
    assert not sites[2].trains
    assert counts(open_benchmark("pacs", tmp_path, limit=1))["photo"] == (1, 1, 1)


def test_a_marker_makes_a_folder_the_data_of_a_federation(tmp_path):
    write_cifar(tmp_path / "files")
    folder = tmp_path / "federation"
    write_federation(folder, "cifar_10", tmp_path / "files", clients=4, alpha=0.6)
    assert json.loads((folder / MARKER).read_text()) == {
        "format": "medfedaug.federation",
        "version": 1,
        "benchmark": "cifar_10",
        "root": "../files",
        "options": {"clients": 4, "alpha": 0.6},
    }
    sites = find_sites(folder)
    assert counts(sites) == counts(open_benchmark("cifar_10", tmp_path / "files", clients=4, alpha=0.6))
    assert open_site(folder, "client_002").cases == sites[2].cases
    assert counts([open_site(folder, "client_002", limit=3)]) == {"client_002": (3, 3, 3)}
    with pytest.raises(DataError, match=r"site Basel, .*federation\.json: no such site; there are client_"):
        open_site(folder, "Basel")
    with pytest.raises(ConfigError, match="no option 'beta'"):
        write_federation(folder, "cifar_10", tmp_path / "files", beta=1)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "names no benchmark"),
        ("[]", 'expected "format"'),
        ('{"format": "medfedaug.federation", "version": 2}', "version is 2"),
        ('{"format": "medfedaug.federation", "version": 1}', 'expected "benchmark"'),
        ('{"format": "medfedaug.federation", "version": 1, "benchmark": "pacs", "options": 3}', "a mapping"),
        (
            '{"format": "medfedaug.federation", "version": 1, "benchmark": "pacs", "options": {"limit": 3}}',
            "options cannot name",
        ),
    ],
)
def test_markers_that_cannot_be_read_are_named(tmp_path, content, message):
    (tmp_path / MARKER).write_text(content)
    with pytest.raises(DataError, match=rf"{MARKER}: names no benchmark \(.*"):
        find_sites(tmp_path)
    with pytest.raises(DataError, match=message):
        open_site(tmp_path, "A")


def test_a_run_over_a_benchmark_opens_each_site_by_name_and_is_evaluated_again(tmp_path):
    write_cifar(tmp_path)
    write_federation(tmp_path, "cifar_10", tmp_path, clients=2)
    sites = find_sites(tmp_path)
    methods = ({"name": "fedrdn"}, {"name": "fedfa"})
    config = configure(sites, methods=methods, network="lenet5", rounds=1, threads=1, batch_size=16)
    server = run_in_process(config, tmp_path, [site.name for site in sites], "cpu")
    results = server.results()
    assert set(results["test"]["sites"]) == {"client_000", "client_001"}
    (tmp_path / "out").mkdir()
    write_run(tmp_path / "out", server)
    again = evaluate_model(tmp_path / "out/global_model.pt", tmp_path, device="cpu")
    assert again["mean"] == results["test"]["mean"]
