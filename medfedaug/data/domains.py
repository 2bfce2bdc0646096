"""Benchmarks of photographs, one domain a site: Office-Caltech 10, DomainNet-10, PACS, VLCS, OfficeHome.

Every function takes the folder with the published files and returns its sites; `medfedaug.data.benchmarks`
lists them, says where the files come from, and checks what is returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from medfedaug.checks import check_choice
from medfedaug.data.archives import load_arrays
from medfedaug.data.base import Case, SiteFolder, base_folder, unreadable
from medfedaug.data.images import ImageFolder, class_cases, published_split
from medfedaug.data.splits import split_by_class
from medfedaug.errors import ConfigError, DataError
from medfedaug.files import parse_json

__all__ = ["domainnet_10", "office_caltech_10", "officehome", "pacs", "vlcs"]

_OFFICE = ("amazon", "caltech", "dslr", "webcam")
_DOMAINNET = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
_PACS = ("art_painting", "cartoon", "photo", "sketch")
_VLCS = ("bird", "car", "chair", "dog", "person")

# Listed in PACS's published splits under a name that its archive does not have.
_PACS_ERRATA = frozenset({"sketch/dog/n02103406_4068-1.png"})


def office_caltech_10(root: Path) -> list[SiteFolder]:
    """Four sites; the first 60 % of FedBN's training lists train, the rest validates, the test lists test."""
    root = base_folder(root, "office_caltech_10")
    lists = {name: [_listed(root, name, part) for part in ("train", "test")] for name in _OFFICE}
    return [_site(root / name, name, published_split(*both)) for name, both in lists.items()]


def domainnet_10(root: Path, fraction: float = 0.4) -> list[SiteFolder]:
    """Six sites of ten classes with FedBN's lists.

    Of each training list of n images the first ``int(0.8 · fraction · n)`` train and the last
    ``int(0.2 · n)`` validate. The default gives the numbers of FedFA+ Table 2 and FedRDN Table 6 (672 and 420
    of clipart's 2,103); 1.0 uses all.

    Args:
        root: the folder.
        fraction: of the images that could train, above 0 and at most 1.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"fraction must be above 0 and at most 1, got {fraction}")
    root = base_folder(root, "DomainNet")
    sites = []
    for name in _DOMAINNET:
        train, test = (_listed(root, name, part) for part in ("train", "test"))
        training, held = train[: int(0.8 * fraction * len(train))], int(0.2 * len(train))
        split = {"training": training, "validation": train[len(train) - held :], "test": test}
        sites.append(_site(root / name, name, split))
    return sites


def pacs(root: Path, split: str = "seeded") -> list[SiteFolder]:
    """Four sites of seven classes.

    Args:
        root: the folder.
        split: ``"seeded"``: each class 60/20/20. ``"published"``: the authors' ``*_train_kfold.txt`` trains;
            of ``*_crossval_kfold.txt`` every other image validates, the rest tests, since the authors'
            protocol has no test images at a site that trains.
    """
    folder = base_folder(base_folder(root, "PACS", "pacs_data"), "kfold", "pacs_data")
    if split == "seeded":
        return [_seeded(_existing(folder / name), name) for name in _PACS]
    check_choice("split", split, ("seeded", "published"))
    lists = next((p.parent for p in sorted(root.rglob("photo_train_kfold.txt"))), folder)
    sites = []
    for name in _PACS:
        train, held = (_kfold(folder, lists / f"{name}_{part}_kfold.txt") for part in ("train", "crossval"))
        parts = {"training": train, "validation": held[::2], "test": held[1::2]}
        sites.append(_site(folder / name, name, parts))
    return sites


def vlcs(root: Path) -> list[SiteFolder]:
    """Four sites of five classes.

    ``<site>/{train,crossval,test}/<0 to 4>/*`` train, validate and test; ``<site>/<class>/*``, as DomainBed
    has it, is split 60/20/20 by class.
    """
    root = base_folder(root, "VLCS")
    folders = sorted(p for p in _existing(root).iterdir() if p.is_dir() and not p.name.startswith("."))
    sites: list[SiteFolder] = []
    for folder in folders:
        if not (folder / "train").is_dir():
            sites.append(_seeded(folder, folder.name))
            continue
        split = {}
        for key, part in (("training", "train"), ("validation", "crossval"), ("test", "test")):
            split[key] = [
                Case(f"{part}/{label}/{case.image.name}", case.image, label)
                for number, label in enumerate(_VLCS)
                for case in class_cases(_existing(folder / part / str(number)), label)
            ]
        sites.append(ImageFolder(folder.name, folder, _VLCS, {k: tuple(v) for k, v in split.items()}))
    if not sites:
        raise FileNotFoundError(2, "no such folder", str(root / "CALTECH"))
    return sites


def officehome(root: Path) -> list[SiteFolder]:
    """Four sites of 65 classes, each split 60/20/20 by class: nothing is published."""
    root = base_folder(root, "OfficeHomeDataset_10072016", "office_home")
    real = base_folder(root, "Real World", "RealWorld", "Real_World")
    if real == root:
        raise FileNotFoundError(2, "no such folder", str(root / "Real World"))
    folders = [root / "Art", root / "Clipart", root / "Product", real]
    return [_seeded(_existing(folder), folder.name.replace(" ", "_")) for folder in folders]


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise FileNotFoundError(2, "no such folder", str(folder))
    return folder


def _seeded(folder: Path, name: str) -> SiteFolder:
    labels = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return _site(
        folder,
        name,
        split_by_class(name, [case for label in labels for case in class_cases(folder / label, label)]),
    )


def _site(folder: Path, name: str, split: Mapping[str, Sequence[Case]]) -> SiteFolder:
    classes = tuple(sorted({str(case.label) for cases in split.values() for case in cases}))
    return ImageFolder(name, folder, classes, {key: tuple(cases) for key, cases in split.items()})


def _listed(root: Path, site: str, part: str) -> list[Case]:
    """A list of FedBN: a pickle of (paths, classes) beside the sites' folders, or JSON in ``splits``."""
    path = root / f"{site}_{part}.pkl"
    if not path.exists() and (root / "splits").is_dir():
        path = root / "splits" / f"{site}_{part}.json"
    try:
        entries: Any = (
            parse_json(path.read_text())
            if path.suffix == ".json"
            else list(zip(*load_arrays(path), strict=True))
        )
        # Paths begin where FedBN's archive was unpacked; the last three parts are site, class and file.
        parts = [(PurePosixPath(str(image)).parts[-3:], str(label)) for image, label in entries]
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged pickle fails anywhere
        raise unreadable(site, path, error) from error
    return [Case("/".join(image), root.joinpath(*image), label) for image, label in parts]


def _kfold(folder: Path, path: Path) -> list[Case]:
    """A list of PACS: ``site/class/file number`` a line."""
    cases = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        image, _, label = line.strip().rpartition(" ")
        parts = PurePosixPath(image).parts
        if not image:
            continue
        if len(parts) != 3 or not label.isdigit():
            raise DataError(f"line {number} is not 'site/class/file number'", path=path)
        if image not in _PACS_ERRATA:
            cases.append(Case("/".join(parts[1:]), folder.joinpath(*parts), parts[1]))
    return cases
