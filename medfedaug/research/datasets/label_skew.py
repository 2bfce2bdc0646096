"""CIFAR-10 and Tiny-ImageNet, dealt to sites with different class proportions."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from medfedaug.config.run import derive_seed
from medfedaug.data.base import Case, SiteFolder, base_folder, unreadable
from medfedaug.data.images import ImageFolder, cases_of_classes, class_cases
from medfedaug.data.splits import deal_by_dirichlet
from medfedaug.errors import ConfigError
from medfedaug.research.datasets.archives import ArchiveSite, load_arrays, read_archive, read_cifar
from medfedaug.research.datasets.published import Benchmark


def cifar_10(
    root: Path, clients: int = 100, alpha: float = 0.3, validation: float = 0.1, seed: int = 0
) -> list[SiteFolder]:
    """Deal CIFAR-10 to sites by class, and its test images in equal parts.

    Args:
        root: the folder of the Python version, or one of image files, ``train/CLASS/*`` and
            ``test/CLASS/*``, as in many copies. Copies in JPEG differ slightly from the published images.
        clients: number of sites.
        alpha: see `medfedaug.data.splits.deal_by_dirichlet`; 0.3 and 0.6 in FedFA+.
        validation: share of a site's images that choose the round instead of training. The papers have none.
        seed: of the deal.

    Returns:
        The sites ``client_000``, ... with random parts of the test set of one size, so that the mean over
        sites is the accuracy on the whole test set.
    """
    if (root / "train").is_dir() and (root / "test").is_dir():
        classes = tuple(sorted(folder.name for folder in (root / "train").iterdir() if folder.is_dir()))
        train, test = (
            [replace(case, name=f"{part}/{case.name}") for case in cases_of_classes(root / part, classes)]
            for part in ("train", "test")
        )
        parts = _deal("cifar_10", train, test, clients, alpha, validation, seed)
        return [ImageFolder(name, root, classes, split) for name, split in parts]
    root = base_folder(root, "cifar-10-batches-py")
    try:
        classes = tuple(str(name) for name in load_arrays(root / "batches.meta")["label_names"])
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle fails anywhere
        raise unreadable("", root / "batches.meta", error) from error

    def images(*names: str) -> list[Case]:
        return [
            case
            for path in (root / name for name in names)
            for case in read_archive(read_cifar, path).cases(path, classes)
        ]

    train, test = images(*(f"data_batch_{i}" for i in range(1, 6))), images("test_batch")
    parts = _deal("cifar_10", train, test, clients, alpha, validation, seed)
    return [ArchiveSite(name, root, classes, split, reader=read_cifar) for name, split in parts]


def tiny_imagenet(
    root: Path, clients: int = 100, alpha: float = 0.3, validation: float = 0.1, seed: int = 0
) -> list[SiteFolder]:
    """Deal Tiny-ImageNet like `cifar_10`; its validation images test, since its test set has no labels."""
    root = base_folder(root, "tiny-imagenet-200")
    classes = tuple((root / "wnids.txt").read_text().split())
    train = [case for name in classes for case in class_cases(root / "train" / name / "images", name)]
    test = []
    for line in (root / "val" / "val_annotations.txt").read_text().splitlines():
        file, label = line.split("\t")[:2]
        test.append(Case(f"val/{file}", root / "val" / "images" / file, label))
    parts = _deal("tiny_imagenet", train, test, clients, alpha, validation, seed)
    return [ImageFolder(name, root, classes, split) for name, split in parts]


def _deal(
    benchmark: str,
    train: Sequence[Case],
    test: Sequence[Case],
    clients: int,
    alpha: float,
    validation: float,
    seed: int,
) -> list[tuple[str, dict[str, tuple[Case, ...]]]]:
    if not 0 < validation < 1:
        raise ConfigError(f"validation must be between 0 and 1, got {validation}")
    _, labels = np.unique([str(case.label) for case in train], return_inverse=True)
    parts = deal_by_dirichlet(labels, clients, alpha, seed)
    rng = np.random.default_rng(derive_seed(benchmark, "test", seed))
    tests = np.array_split(rng.permutation(len(test)), clients)
    width = max(3, len(str(clients - 1)))
    sites = []
    for number, (part, test_part) in enumerate(zip(parts, tests, strict=True)):
        part = rng.permutation(part)
        held = max(1, round(validation * len(part)))
        split = {
            "training": tuple(train[i] for i in sorted(part[held:])),
            "validation": tuple(train[i] for i in sorted(part[:held])),
            "test": tuple(test[i] for i in sorted(test_part)),
        }
        sites.append((f"client_{number:0{width}d}", split))
    return sites


BENCHMARKS = {
    "cifar_10": Benchmark(
        cifar_10,
        "CIFAR-10 dealt to sites with different class proportions",
        "https://www.cs.toronto.edu/~kriz/cifar.html (python version)",
        "cifar-10-batches-py/{batches.meta,data_batch_1,...,data_batch_5,test_batch}, "
        "or as image files: {train,test}/<class>/*",
    ),
    "tiny_imagenet": Benchmark(
        tiny_imagenet,
        "Tiny-ImageNet, 200 classes, dealt to sites with different class proportions",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "tiny-imagenet-200/{wnids.txt,train/<wnid>/images/*.JPEG,val/images/*.JPEG,val/val_annotations.txt}",
    ),
}
