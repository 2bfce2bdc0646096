"""Photographs, one domain per site: Office-Caltech 10, DomainNet-10, PACS, OfficeHome.

Every function takes the folder with the published files and returns its sites;
`medfedaug.research.datasets.benchmarks` lists them with the sources of the files, and checks the sites.
"""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from medfedaug.data.base import Case, SiteFolder, reading, split_by_class
from medfedaug.data.images import ImageFolder, cases_of_classes, published_split, visible_folders
from medfedaug.research.datasets.published import Benchmark, base_folder
from medfedaug.utils.files import parse_json
from medfedaug.utils.validation import check_choice

_OFFICE = ("amazon", "caltech", "dslr", "webcam")
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_PACS = ("art_painting", "cartoon", "photo", "sketch")

# Shares of each class for training and validation; the rest is for the test.
_SHARES = {"seeded": (0.6, 0.2), "domainbed": (0.8, 0.1)}


def office_caltech_10(root: Path) -> list[SiteFolder]:
    """Four sites; the first 60 % of FedBN's training lists train, the rest validates, the test lists test."""
    root = base_folder(root, "office_caltech_10")
    lists = {name: [_listed(root, name, part) for part in ("train", "test")] for name in _OFFICE}
    return [_site(root / name, name, published_split(*both)) for name, both in lists.items()]


def domainnet_10(root: Path, fraction: float = 0.4, split: str = "published") -> list[SiteFolder]:
    """Six sites of ten classes with FedBN's lists.

    Args:
        fraction: of the possible training images, above 0 and at most 1.
        split: ``"published"``: the first ``int(0.8 · fraction · n)`` of a training list of n images train,
            and the last ``int(0.2 · n)`` validate. The default fraction gives the numbers of FedFA+ Table 2
            and FedRDN Table 6 (672 and 420 of clipart's 2,103). ``"domainbed"``: the first ``fraction`` of
            the training list, which has 80 % of a site's images, trains; every other image of the test list
            validates, the rest test.
    """
    check_choice("split", split, ("published", "domainbed"))
    root = base_folder(root, "DomainNet")
    sites = []
    for name in _DOMAINNET:
        train, test = (_listed(root, name, part) for part in ("train", "test"))
        if split == "domainbed":
            training, validation, test = train[: int(fraction * len(train))], test[::2], test[1::2]
        else:
            held = int(0.2 * len(train))
            training, validation = train[: int(0.8 * fraction * len(train))], train[len(train) - held :]
        sites.append(_site(root / name, name, {"training": training, "validation": validation, "test": test}))
    return sites


def pacs(root: Path, split: str = "seeded") -> list[SiteFolder]:
    """Four sites of seven classes.

    Args:
        split: ``"seeded"``: each class is split 60/20/20. ``"domainbed"``: 80/10/10, with as many training
            images as in DomainBed, which uses the other 20 % for validation and tests at other sites.
    """
    check_choice("split", split, tuple(_SHARES))
    folder = base_folder(base_folder(root, "PACS", "pacs_data"), "kfold", "pacs_data")
    return [_seeded(folder / name, name, split) for name in _PACS]


def officehome(root: Path, split: str = "seeded") -> list[SiteFolder]:
    """Four sites of 65 classes. No split is published.

    Args:
        split: ``"seeded"``: each class is split 60/20/20; ``"domainbed"``: 80/10/10, as for `pacs`.
    """
    check_choice("split", split, tuple(_SHARES))
    root = base_folder(root, "OfficeHomeDataset_10072016", "office_home")
    real = base_folder(root, "Real World", "RealWorld", "Real_World")
    folders = [root / "Art", root / "Clipart", root / "Product", real]
    return [_seeded(folder, folder.name.replace(" ", "_"), split) for folder in folders]


def _seeded(folder: Path, name: str, split: str) -> SiteFolder:
    cases = cases_of_classes(folder, [path.name for path in visible_folders(folder)])
    return _site(folder, name, split_by_class(name, cases, _SHARES[split]))


def _site(folder: Path, name: str, split: Mapping[str, Sequence[Case]]) -> SiteFolder:
    classes = tuple(sorted({str(case.label) for cases in split.values() for case in cases}))
    return ImageFolder(name, folder, classes, {key: tuple(cases) for key, cases in split.items()})


def _listed(root: Path, site: str, part: str) -> list[Case]:
    """Read a list of FedBN: a pickle of (paths, classes), or JSON in the folder ``splits``."""
    path = root / f"{site}_{part}.pkl"
    if not path.exists() and (root / "splits").is_dir():
        path = root / "splits" / f"{site}_{part}.json"
    path.stat()  # a missing file has an error of its own
    with reading(site, path):
        is_json = path.suffix == ".json"
        entries: Any = parse_json(path.read_text()) if is_json else zip(*load_arrays(path), strict=True)
        # Paths begin at FedBN's folder; the last three parts are site, class and file.
        parts = [(PurePosixPath(str(image)).parts[-3:], str(label)) for image, label in entries]
    return [Case("/".join(image), root.joinpath(*image), label) for image, label in parts]


BENCHMARKS = {
    "office_caltech_10": Benchmark(
        office_caltech_10,
        "Office-Caltech 10: photographs of ten classes from four sources",
        "https://github.com/med-air/FedBN (office_caltech_10_dataset.zip)",
        "{amazon,caltech,dslr,webcam}/<class>/*.jpg and <site>_{train,test}.pkl "
        "(or splits/<site>_{train,test}.json)",
    ),
    "domainnet_10": Benchmark(
        domainnet_10,
        "DomainNet-10: ten classes of DomainNet in six styles",
        "https://ai.bu.edu/M3SDA and https://github.com/med-air/FedBN (domainnet_dataset.zip: lists)",
        "{clipart,infograph,painting,quickdraw,real,sketch}/<class>/* and <site>_{train,test}.pkl "
        "(or splits/<site>_{train,test}.json)",
    ),
    "pacs": Benchmark(
        pacs,
        "PACS: seven classes as art painting, cartoon, photo and sketch",
        "https://domaingeneralization.github.io/#data",
        "{art_painting,cartoon,photo,sketch}/<class>/*",
    ),
    "officehome": Benchmark(
        officehome,
        "OfficeHome: 65 classes as art, clipart, product and real world",
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "{Art,Clipart,Product,Real World}/<class>/*.jpg",
    ),
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads only arrays, numbers, text and containers, since a pickle can run any code."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy._core", "numpy.core")  # the name before NumPy 2
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"holds {module}.{name}; only arrays are read")
        return _ALLOWED[module, name]


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"holds text encoded as {encoding}")
    return text.encode(encoding)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(1).__reduce__()[0],
    ("numpy.core.multiarray", "scalar"): np.float64(0).__reduce__()[0],
    ("numpy.core.numeric", "_frombuffer"): np.zeros(1).__reduce_ex__(5)[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


def load_arrays(path: Path) -> Any:
    """Read a pickle of arrays, numbers, text and their containers.

    Raises:
        pickle.UnpicklingError: for any other content.
        OSError: when it cannot be opened.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "list.pkl"
        >>> _ = path.write_bytes(pickle.dumps(print))
        >>> load_arrays(path)
        Traceback (most recent call last):
        _pickle.UnpicklingError: holds builtins.print; only arrays are read
    """
    with open(path, "rb") as file:
        # Python 2 wrote bytes for text.
        return _ArrayUnpickler(file, encoding="latin1").load()
