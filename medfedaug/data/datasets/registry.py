"""The papers' data sets by name, read in the form in which their owners publish them.

>>> sorted(BENCHMARKS)[:3]
['cifar_10', 'digits', 'domainnet_10']

A benchmark is opened with the folder that holds its files, or through a folder with a `MARKER` file that
names benchmark, folder and options: every command takes such a folder as ``--data``, and every process of a
federation opens its own site from it by name.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from medfedaug.data.base import SiteFolder, spread
from medfedaug.data.datasets import domains, handwriting, label_skew, lgg, prostate, retina
from medfedaug.data.folders import MARKER, own_data
from medfedaug.errors import ConfigError, DataError
from medfedaug.utils.files import parse_versioned, write_versioned
from medfedaug.utils.validation import check_choice

__all__ = [
    "BENCHMARKS",
    "MARKER",
    "OWN_DATA",
    "Benchmark",
    "check_options",
    "find_benchmark",
    "find_root",
    "is_federation",
    "is_there",
    "open_benchmark",
    "open_federation",
    "read_federation",
    "write_federation",
]

_KIND, _VERSION = "federation", 1


@dataclass(frozen=True)
class Benchmark:
    """A published data set.

    Args:
        open: from the folder and options to the sites; raises `FileNotFoundError` for what is not there.
        description: in one line.
        source: where its owners publish it.
        layout: what the folder holds, in one line.
    """

    open: Callable[..., list[SiteFolder]]
    description: str
    source: str
    layout: str

    @property
    def options(self) -> dict[str, Any]:
        """The options of `open_benchmark` for this benchmark, with their defaults."""
        own = list(inspect.signature(self.open).parameters.values())[1:]
        return {"fraction": 1.0, "unseen": "", **{option.name: option.default for option in own}}


_PROSTATE_SOURCE = (
    "https://liuquande.github.io/SAML and, for split=published, "
    "https://github.com/med-air/HarmoFL/tree/main/data/prostate (the permutations)"
)
_PROSTATE_LAYOUT = (
    "{BIDMC,HK,I2CVB,BMC,RUNMC,UCL}/Case<n>.nii.gz and Case<n>_segmentation.nii.gz "
    "(ISBI_1.5 may stand for BMC, ISBI for RUNMC); for split=published also <site>-index.npy"
)

BENCHMARKS: dict[str, Benchmark] = {
    "office_caltech_10": Benchmark(
        domains.office_caltech_10,
        "Office-Caltech 10: photographs of ten classes from four sources",
        "https://github.com/med-air/FedBN (office_caltech_10_dataset.zip)",
        "{amazon,caltech,dslr,webcam}/<class>/*.jpg and <site>_{train,test}.pkl "
        "(or splits/<site>_{train,test}.json)",
    ),
    "domainnet_10": Benchmark(
        domains.domainnet_10,
        "DomainNet-10: ten classes of DomainNet in six styles",
        "https://ai.bu.edu/M3SDA and https://github.com/med-air/FedBN (domainnet_dataset.zip: lists)",
        "{clipart,infograph,painting,quickdraw,real,sketch}/<class>/* and <site>_{train,test}.pkl "
        "(or splits/<site>_{train,test}.json)",
    ),
    "pacs": Benchmark(
        domains.pacs,
        "PACS: seven classes as art painting, cartoon, photo and sketch",
        "https://domaingeneralization.github.io/#data",
        "{art_painting,cartoon,photo,sketch}/<class>/*; for split=published also "
        "<site>_{train,crossval}_kfold.txt",
    ),
    "vlcs": Benchmark(
        domains.vlcs,
        "VLCS: five classes from Caltech, LabelMe, Pascal and Sun",
        "https://github.com/fmcarlucci/JigenDG#vlcs",
        "{CALTECH,LABELME,PASCAL,SUN}/{train,crossval,test}/{0,1,2,3,4}/* or <site>/<class>/*",
    ),
    "officehome": Benchmark(
        domains.officehome,
        "OfficeHome: 65 classes as art, clipart, product and real world",
        "https://www.hemanthdv.org/officeHomeDataset.html",
        "{Art,Clipart,Product,Real World}/<class>/*.jpg",
    ),
    "digits": Benchmark(
        handwriting.digits,
        "Digits: MNIST, MNIST-M, SVHN, USPS and SynthDigits, those that are there",
        "http://yann.lecun.com/exdb/mnist, http://yaroslav.ganin.net (MNIST-M, SynthDigits), "
        "http://ufldl.stanford.edu/housenumbers, "
        "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets (usps), "
        "or https://github.com/med-air/FedBN (digit_dataset.zip)",
        "MNIST/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz], "
        "MNIST_M/mnist_m_{train,test}/*.png and mnist_m_{train,test}_labels.txt, "
        "SVHN/{train,test}_32x32.mat, USPS/usps.bz2 and usps.t.bz2, "
        "SynthDigits/synth_{train,test}_32x32.mat, "
        "or <site>/partitions/train_part{0..9}.pkl and <site>/test.pkl",
    ),
    "femnist": Benchmark(
        handwriting.femnist,
        "FEMNIST: 62 handwritten characters, a site a writer",
        "https://github.com/TalwalkarLab/leaf/tree/master/data/femnist "
        "(./preprocess.sh -s niid --sf 1.0 -k 0 -t sample)",
        "data/{train,test}/*.json or data/all_data/*.json",
    ),
    "emnist": Benchmark(
        handwriting.emnist,
        "EMNIST ByClass: 62 handwritten characters, a site a writer",
        "https://www.nist.gov/itl/products-and-services/emnist-dataset (MATLAB format)",
        "emnist-byclass.mat",
    ),
    "cifar_10": Benchmark(
        label_skew.cifar_10,
        "CIFAR-10 dealt to sites with class proportions of their own",
        "https://www.cs.toronto.edu/~kriz/cifar.html (python version)",
        "cifar-10-batches-py/{batches.meta,data_batch_1,...,data_batch_5,test_batch}, "
        "or as image files: {train,test}/<class>/*",
    ),
    "tiny_imagenet": Benchmark(
        label_skew.tiny_imagenet,
        "Tiny-ImageNet, 200 classes, dealt to sites with class proportions of their own",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "tiny-imagenet-200/{wnids.txt,train/<wnid>/images/*.JPEG,val/images/*.JPEG,val/val_annotations.txt}",
    ),
    "prostate_mri": Benchmark(
        prostate.prostate_mri,
        "ProstateMRI: prostate segmentation in T2-weighted MRI of six sites",
        _PROSTATE_SOURCE,
        _PROSTATE_LAYOUT,
    ),
    "mini_prostate_mri": Benchmark(
        prostate.mini_prostate_mri,
        "ProstateMRI with a sixth of the training cases",
        _PROSTATE_SOURCE,
        _PROSTATE_LAYOUT,
    ),
    "lgg_multisite": Benchmark(
        lgg.lgg_multisite,
        "LGG: FLAIR abnormality in brain MRI of five institutions",
        "https://www.kaggle.com/datasets/mateuszbuda/lgg-mri-segmentation",
        "kaggle_3m/TCGA_<institution>_<patient>_<date>/*.tif, or <site>/dataset.json with volumes",
    ),
    "retina_vessels": Benchmark(
        retina.retina_vessels,
        "Retinal vessels: photographs from five cameras with masks, one camera without blue",
        "https://drive.grand-challenge.org (DRIVE), https://cecas.clemson.edu/~ahoover/stare (STARE), "
        "https://blogs.kingston.ac.uk/retinal/chasedb1 (CHASEDB1), "
        "https://people.duke.edu/~sf59/Estrada_TMI_2015_dataset.htm (AVWIDE, VEVIO)",
        "{AVWIDE,CHASEDB1,DRIVE,STARE,VEVIO}/dataset.json with images and masks as PNG, "
        'and "patient" in each row',
    ),
}

OWN_DATA = "own_data"
"""The name, in a marker and in results, of a folder of sites that is no published data set."""

_OWN = Benchmark(
    own_data, "Sites' folders of one's own", "nobody", "<site>/dataset.json, or <site>/<class>/*"
)


def find_benchmark(name: str) -> Benchmark:
    """The published data set of a name, or what stands for data of one's own (`OWN_DATA`).

    Raises:
        ConfigError: for another name.
    """
    if name == OWN_DATA:
        return _OWN
    check_choice("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]


def find_root(root: str | Path, benchmark: str) -> Path:
    """The folder of a data set's files: ``root``, or the folder in it that has the data set's name."""
    root = Path(root)
    return root / benchmark if (root / benchmark).is_dir() else root


def is_there(name: str, root: str | Path) -> bool:
    """Return whether a benchmark's files are there and can be used."""
    try:
        return bool(open_benchmark(name, find_root(root, name)))
    except DataError:
        return False


def open_benchmark(
    name: str, root: str | Path, *, limit: int | None = None, **options: Any
) -> list[SiteFolder]:
    """The sites of a benchmark.

    Args:
        name: a key of `BENCHMARKS`, or `OWN_DATA`.
        root: the folder that holds the published files.
        limit: at most this many cases per split and site.
        **options: those of the benchmark's function, and for every benchmark ``fraction``, the share of
            each site's training cases to use (evenly from the list), and ``unseen``, a site that does not
            train and is tested with all its cases, as in domain generalisation.

    Raises:
        ConfigError: for a name, option or value that is not known.
        DataError: for missing files, with the address to get them from and the layout that is expected, and
            for files that cannot be used.
    """
    benchmark, root = check_options(name, options), Path(root)
    own = [option for option in options if option in inspect.signature(benchmark.open).parameters]
    try:
        sites = benchmark.open(root, **{option: options.pop(option) for option in own})
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"not there, and {name} needs it",
            path=error.filename,
            hint=f"Get the files from {benchmark.source} and put them below {root}. "
            f"Expected there: {benchmark.layout}.",
        ) from error
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror})", path=error.filename) from error
    for site in sites:
        site.check_splits()
    if name != OWN_DATA:
        sites = [replace(site, benchmark=name) for site in sites]
    return [site.limited(limit) for site in _arranged(sites, **options)]


def check_options(name: str, options: Mapping[str, Any]) -> Benchmark:
    """The benchmark of a name, after checking that it has these options.

    Raises:
        ConfigError: for a name, option or value that is not known.
    """
    benchmark = find_benchmark(name)
    defaults = benchmark.options
    for option, value in options.items():
        if option not in defaults:
            raise ConfigError(f"{name} has no option {option!r}; it has {', '.join(defaults)}")
        kind = type(defaults[option])
        # `true` is a number to Python.
        fits = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
        if not fits or isinstance(value, bool) != (kind is bool):
            raise ConfigError(f"{name}: {option} is {value!r}, a {kind.__name__} is needed")
    if not 0 < options.get("fraction", 1.0) <= 1:
        raise ConfigError(f"fraction must be above 0 and at most 1, got {options['fraction']}")
    return benchmark


def _arranged(sites: list[SiteFolder], fraction: float = 1.0, unseen: str = "") -> list[SiteFolder]:
    names = [site.name for site in sites]
    if unseen and unseen not in names:
        raise ConfigError(f"no site {unseen!r}; the sites are {', '.join(names)}")
    arranged = []
    for site in sites:
        cases = dict(site.cases)
        if site.name == unseen:
            everything = tuple(case for split in cases.values() for case in split)
            cases = {"training": (), "validation": (), "test": everything}
        training = cases["training"]
        if training:
            cases["training"] = spread(training, max(1, round(fraction * len(training))))
        arranged.append(replace(site, cases=cases))
    return arranged


def write_federation(folder: str | Path, name: str, root: str | Path, **options: Any) -> Path:
    """Write a marker that makes ``folder`` the data folder of a benchmark.

    Args:
        folder: receives the marker; it may be ``root`` itself.
        name: a key of `BENCHMARKS`, or `OWN_DATA`.
        root: the folder that holds the published files; kept relative to ``folder``.
        **options: as for `open_benchmark`.

    Returns:
        The marker's path.

    Raises:
        ConfigError: for a name or option that is not known.
    """
    check_options(name, options)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    root = os.path.relpath(Path(root).resolve(), folder.resolve())
    write_versioned(folder / MARKER, _KIND, _VERSION, {"benchmark": name, "root": root, "options": options})
    return folder / MARKER


def is_federation(folder: Path) -> bool:
    """Return whether a folder's marker makes it the data folder of a benchmark."""
    return (folder / MARKER).is_file()


def read_federation(folder: str | Path) -> tuple[str, Path, dict[str, Any]]:
    """Read a folder's marker: the benchmark, the folder of its files, and all its options.

    Raises:
        DataError: for a marker that cannot be used, naming it.
        ConfigError: for a benchmark or option that is not known.
    """
    path = Path(folder).resolve() / MARKER
    try:
        name, root, options = _parse_marker(path, path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"names no benchmark ({error})", path=path) from error
    return name, root, {**check_options(name, options).options, **options}


def open_federation(folder: str | Path, limit: int | None = None) -> dict[str, SiteFolder]:
    """The sites, by name, of the benchmark that a folder's marker names.

    A process that opens all of thousands of sites, one after the other, lists the files once.

    Raises:
        DataError: for a marker that cannot be used, naming it; and as `open_benchmark`.
        ConfigError: as `open_benchmark`.
    """
    path = Path(folder).resolve() / MARKER
    try:
        return _open_marker(path, path.read_text(encoding="utf-8"), limit)
    except (OSError, ValueError) as error:
        raise DataError(f"names no benchmark ({error})", path=path) from error


@lru_cache(maxsize=4)
def _open_marker(path: Path, text: str, limit: int | None) -> dict[str, SiteFolder]:
    name, root, options = _parse_marker(path, text)
    return {site.name: site for site in open_benchmark(name, root, limit=limit, **options)}


def _parse_marker(path: Path, text: str) -> tuple[str, Path, dict[str, Any]]:
    content = parse_versioned(text, _KIND, _VERSION)
    options = content.get("options", {})
    if "benchmark" not in content or not isinstance(options, dict):
        raise ValueError('expected "benchmark" and a mapping "options"')
    if {"name", "root", "limit"} & set(options):
        raise ValueError("options cannot name the benchmark, its root or a limit")
    root = Path(os.path.normpath(path.parent / str(content.get("root", "."))))
    return str(content["benchmark"]), root, options
