"""Handwriting: FEMNIST and EMNIST with one site per writer, and Digits with one site per collection."""

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from medfedaug.data.base import SPLITS, Case, SiteFolder, base_folder, spread
from medfedaug.data.images import ImageFolder
from medfedaug.data.splits import shuffled, split_by_class, split_in_order
from medfedaug.errors import ConfigError, DataError
from medfedaug.research.datasets.archives import (
    ArchiveSite,
    Reader,
    read_archive,
    read_emnist,
    read_idx,
    read_libsvm,
    read_mat,
)
from medfedaug.research.datasets.published import Benchmark

# Digits, capitals, small letters: FedScale's and EMNIST's numbering of the 62 classes.
_CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_DIGITS = _CHARACTERS[:10]

_LISTS = "client_data_mapping"  # of FedScale


def femnist(root: Path, writers: int = 0, min_images: int = 10) -> list[SiteFolder]:
    """FEMNIST as FedScale writes it: a site is a writer.

    The writers of ``client_data_mapping/train.csv`` are split 80/10/10; writers of the other lists do not
    train, and are tested with all their images.

    Args:
        root: FedScale's folder.
        writers: number of training writers, evenly from all; 0 for all.
        min_images: writers with fewer are left out.
    """
    lists = {path.stem: _listed(root, path) for path in sorted((root / _LISTS).glob("*.csv"))}
    if "train" not in lists:
        raise FileNotFoundError(2, "no such file", str(root / _LISTS / "train.csv"))
    training = _split(lists.pop("train"))
    tested = [
        ImageFolder(name, root, _CHARACTERS, {"training": (), "validation": (), "test": tuple(cases)})
        for by_writer in lists.values()
        for name, cases in by_writer.items()
    ]
    return [*_writers(ImageFolder, root, training, writers, min_images), *tested]


def _listed(root: Path, path: Path) -> dict[str, list[Case]]:
    """Read the cases of a list, by list and writer: another list may have the same numbers of writers."""
    by_writer: dict[str, list[Case]] = defaultdict(list)
    labels = range(len(_CHARACTERS))
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        try:
            for row in islice(rows, 1, None):
                writer, image, label = row[0], row[1], labels.index(int(row[-1]))
                if not os.path.abspath(root / image).startswith(os.path.abspath(root)):
                    raise DataError(f"names {image}, which is not below {root}", site=writer, path=path)
                by_writer[f"{path.stem}_{writer}"].append(Case(image, root / image, _CHARACTERS[label]))
        except (IndexError, ValueError, csv.Error) as error:
            message = "client_id,sample_path,label_name,label_id with a label from 0 to 61 is needed"
            raise DataError(f"line {rows.line_num}: {message}", path=path) from error
    return by_writer


def emnist(root: Path, writers: int = 0, min_images: int = 10) -> list[SiteFolder]:
    """EMNIST ByClass in MATLAB's format, which names the writers: a site is a writer, split 80/10/10.

    Args:
        root: the folder with ``emnist-byclass.mat``, or with ``matlab``.
        writers: number of writers, evenly from all; 0 for all.
        min_images: writers with fewer are left out.
    """
    path = base_folder(root, "matlab") / "emnist-byclass.mat"
    archive = read_archive(read_emnist, path)
    by_owner: dict[str, list[Case]] = defaultdict(list)
    for owner, case in zip(archive.owners, archive.cases(path, _CHARACTERS), strict=True):
        by_owner[owner].append(case)
    kind = partial(ArchiveSite, reader=read_emnist)
    return _writers(kind, path.parent, _split(by_owner), writers, min_images)


def _split(by_writer: Mapping[str, Sequence[Case]]) -> dict[str, dict[str, list[Case]]]:
    """Split each writer's cases, shuffled by the writer's name."""
    return {
        name: split_in_order(shuffled(cases, "split", name), (0.8, 0.1)) for name, cases in by_writer.items()
    }


def _writers(
    kind: Callable[..., SiteFolder],
    root: Path,
    splits: dict[str, dict[str, list[Case]]],
    writers: int,
    min_images: int,
) -> list[SiteFolder]:
    names = [
        name
        for name, split in sorted(splits.items())
        if all(split.values()) and sum(map(len, split.values())) >= min_images
    ]
    if writers:
        if not 1 <= writers <= len(names):
            raise ConfigError(f"{writers} writers are more than the {len(names)} with {min_images} images")
        names = [*spread(names, writers)]
    return [
        kind(name, root, _CHARACTERS, {key: tuple(splits[name][key]) for key in SPLITS}) for name in names
    ]


def digits(root: Path, synthetic: bool = True) -> list[SiteFolder]:
    """MNIST, MNIST-M, SVHN, USPS and SynthDigits, a site for each that is present.

    In the authors' files. Each class of the training images is split 80/20 into training and validation, and
    the test images test.

    Args:
        root: the folder.
        synthetic: whether SynthDigits is a site.
    """
    root = base_folder(root, "digit_dataset")
    names = [name for name in _COLLECTIONS if synthetic or name != "SynthDigits"]
    sites = [site for name in names if (site := _digits(root / name)) is not None]
    if not sites:
        raise FileNotFoundError(2, "no collection", str(root / "MNIST"))
    return sites


def _digits(folder: Path) -> SiteFolder | None:
    """Open a collection as its authors publish it; return ``None`` for a missing one."""
    published = _COLLECTIONS[folder.name]
    if published is None:
        return _mnist_m(folder)
    reader, *names = published
    train, test = ([*filter(Path.is_file, map(folder.joinpath, variants))][:1] for variants in names)
    if not train:
        return None
    files = {"training": train[0], "test": (test or [folder / names[1][0]])[0]}
    cases = {split: read_archive(reader, path).cases(path, _DIGITS) for split, path in files.items()}
    cases.update(_with_validation(folder.name, cases["training"]))
    return ArchiveSite(
        folder.name, folder, _DIGITS, {key: tuple(cases[key]) for key in SPLITS}, reader=reader
    )


def _with_validation(site: str, cases: Sequence[Case]) -> dict[str, list[Case]]:
    split = split_by_class(site, cases, (0.8, 0.2))
    return {key: list(split[key]) for key in ("training", "validation")}


def _mnist_m(folder: Path) -> SiteFolder | None:
    folder = base_folder(folder, "mnist_m")
    if not (folder / "mnist_m_train_labels.txt").is_file():
        return None
    cases = {}
    for split, part in (("training", "mnist_m_train"), ("test", "mnist_m_test")):
        rows = [line.split() for line in (folder / f"{part}_labels.txt").read_text().splitlines()]
        cases[split] = [Case(f"{part}/{name}", folder / part / name, label) for name, label in rows]
    cases.update(_with_validation("MNIST_M", cases["training"]))
    return ImageFolder("MNIST_M", folder, _DIGITS, {key: tuple(cases[key]) for key in SPLITS})


_IDX = ("{}-images-idx3-ubyte", "{}-images-idx3-ubyte.gz", "{}-images.idx3-ubyte")
# By collection its reader, and possible names of its training and test images; MNIST-M has folders.
_COLLECTIONS: dict[str, tuple[Reader, Sequence[str], Sequence[str]] | None] = {
    "MNIST": (read_idx, [name.format("train") for name in _IDX], [name.format("t10k") for name in _IDX]),
    "MNIST_M": None,
    "SVHN": (read_mat, ["train_32x32.mat"], ["test_32x32.mat"]),
    "USPS": (read_libsvm, ["usps.bz2"], ["usps.t.bz2"]),
    "SynthDigits": (read_mat, ["synth_train_32x32.mat"], ["synth_test_32x32.mat"]),
}


BENCHMARKS = {
    "digits": Benchmark(
        digits,
        "Digits: MNIST, MNIST-M, SVHN, USPS and SynthDigits, where present",
        "http://yann.lecun.com/exdb/mnist, http://yaroslav.ganin.net (MNIST-M, SynthDigits), "
        "http://ufldl.stanford.edu/housenumbers, "
        "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets (usps)",
        "MNIST/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz], "
        "MNIST_M/mnist_m_{train,test}/*.png and mnist_m_{train,test}_labels.txt, "
        "SVHN/{train,test}_32x32.mat, USPS/usps.bz2 and usps.t.bz2, "
        "SynthDigits/synth_{train,test}_32x32.mat",
    ),
    "femnist": Benchmark(
        femnist,
        "FEMNIST: 62 handwritten characters, a site a writer",
        "https://github.com/SymbioticLab/FedScale (femnist.tar.gz)",
        "client_data_mapping/*.csv and the listed files",
    ),
    "emnist": Benchmark(
        emnist,
        "EMNIST ByClass: 62 handwritten characters, a site a writer",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset (MATLAB format)",
        "emnist-byclass.mat",
    ),
}
