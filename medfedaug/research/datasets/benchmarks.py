"""The papers' data sets by name, read in the form in which their owners publish them.

>>> sorted(BENCHMARKS)[:3]
['domainnet_10', 'lgg_multisite', 'office_caltech_10']

A benchmark is opened with the folder of its files, or through a folder with a `MARKER` file that names
benchmark, folder and options. Every command takes such a folder as ``--data``, and every process of a
federation opens its own site from it by name.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Any, TypeVar

from annotated_types import Interval
from pydantic import TypeAdapter

from medfedaug.config.options import check_value
from medfedaug.data.base import SiteFolder, spread
from medfedaug.data.sites import MARKER, open_folder, site_folders
from medfedaug.errors import DataError, data_errors, translated
from medfedaug.research.datasets.published import COMMON_OPTIONS, FOLDS, Benchmark, in_fold
from medfedaug.utils.files import parse_versioned, write_versioned
from medfedaug.utils.validation import check_choice, check_keys

_KIND, _VERSION = "federation", 1
_FRACTION = TypeAdapter(Annotated[float, Interval(gt=0, le=1)])
_Any = TypeVar("_Any")


def _registered() -> dict[str, Benchmark]:
    """Merge the mappings `BENCHMARKS` of all files of this package."""
    files = iter_modules([str(Path(__file__).parent)])
    modules = [import_module(f"{__package__}.{file.name}") for file in files]
    return {k: value for module in modules for k, value in getattr(module, "BENCHMARKS", {}).items()}


BENCHMARKS = _registered()
"""The published data sets, by name."""

OWN_DATA = "own_data"
"""Name, in a marker and in results, for a folder of sites that is not a published data set."""

_OWN = Benchmark(
    lambda root: [*map(open_folder, site_folders(root))],
    "Folders of hospitals",
    "nobody",
    "<site>/dataset.json, or <site>/<class>/*",
    in_folds=True,
)


def find_benchmark(name: str) -> Benchmark:
    """Return the published data set of a name, or the entry for custom data (`OWN_DATA`)."""
    if name == OWN_DATA:
        return _OWN
    check_choice("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]


def find_root(root: str | Path, benchmark: str) -> Path:
    """Return the folder of a data set's files: the folder of its name in ``root``, or ``root``."""
    root = Path(root)
    return root / benchmark if (root / benchmark).is_dir() else root


def is_available(name: str, root: str | Path) -> bool:
    """Return whether a benchmark's files exist and can be used."""
    with suppress(DataError):
        return bool(open_benchmark(name, find_root(root, name)))
    return False


def open_benchmark(
    name: str, root: str | Path, *, limit: int | None = None, **options: Any
) -> list[SiteFolder]:
    """Open the sites of a benchmark.

    Args:
        limit: most cases of each split and site.
        **options: options of the benchmark's function, and the common ones (`OPTION_TEXTS`).

    Raises:
        ConfigError: for an unknown name, option or value.
        DataError: for missing files, with their address and the expected layout.
    """
    benchmark, root = check_options(name, options), Path(root)
    specific = [option for option in options if option in inspect.signature(benchmark.open).parameters]

    def missing(path: str | Path) -> DataError:
        where = f"Get the files from {benchmark.source} and put them below {root}"
        hint = f"{where}. Expected there: {benchmark.layout}."
        return DataError(f"is missing, and {name} needs it", path=path, hint=hint)

    with translated(FileNotFoundError, NotADirectoryError, to=lambda error: missing(error.filename)):
        sites = benchmark.open(root, **{option: options.pop(option) for option in specific})
    if not sites:
        raise missing(root)
    if benchmark.in_folds:
        folds = [options.pop(option, default) for option, default in FOLDS.items()]
        sites = [in_fold(site, *folds) for site in sites]
    for site in sites:
        site.check_splits()
    if name != OWN_DATA:
        sites = [replace(site, benchmark=name) for site in sites]
    return [site.limited(limit) for site in _arranged(sites, **{**COMMON_OPTIONS, **options})]


def check_options(name: str, options: Mapping[str, Any]) -> Benchmark:
    """Return the benchmark of a name, and check its options."""
    benchmark = find_benchmark(name)
    defaults = benchmark.options
    check_keys(f"{name} has no option", options, defaults)
    for option, value in options.items():
        check_value(
            f"{name}: {option}",
            value,
            _FRACTION if option == "fraction" else TypeAdapter(type(defaults[option])),
        )
    return benchmark


def _arranged(sites: list[SiteFolder], fraction: float, unseen: str) -> list[SiteFolder]:
    if unseen:
        check_choice("unseen: site", unseen, [site.name for site in sites])
    arranged = []
    for site in sites:
        cases = dict(site.cases)
        if site.name == unseen:
            everything = tuple(case for split in cases.values() for case in split)
            cases = {"training": (), "validation": (), "test": everything}
        if training := cases["training"]:
            cases["training"] = spread(training, max(1, round(fraction * len(training))))
        arranged.append(replace(site, cases=cases))
    return arranged


def write_federation(folder: str | Path, name: str, root: str | Path, **options: Any) -> Path:
    """Write a marker that makes ``folder`` the data folder of a benchmark; return the marker's path."""
    check_options(name, options)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    root = os.path.relpath(Path(root).resolve(), folder.resolve())
    write_versioned(folder / MARKER, _KIND, _VERSION, {"benchmark": name, "root": root, "options": options})
    return folder / MARKER


def read_federation(folder: str | Path) -> tuple[str, Path, dict[str, Any]]:
    """Read a folder's marker: the benchmark, the folder of its files, and all its options."""
    name, root, options = _from_marker(folder, _parse_marker)
    return name, root, {**find_benchmark(name).options, **options}


def open_federation(folder: str | Path, limit: int | None = None) -> dict[str, SiteFolder]:
    """Open the sites, by name, of the benchmark that a folder's marker names; a process lists files once."""
    return _from_marker(folder, partial(_open_marker, limit=limit))


def _from_marker(folder: str | Path, parse: Callable[[Path, str], _Any]) -> _Any:
    path = Path(folder).resolve() / MARKER
    with data_errors("names no benchmark", OSError, ValueError, path=path):
        return parse(path, path.read_text(encoding="utf-8"))


@lru_cache(maxsize=4)
def _open_marker(path: Path, text: str, limit: int | None) -> dict[str, SiteFolder]:
    name, root, options = _parse_marker(path, text)
    return {site.name: site for site in open_benchmark(name, root, limit=limit, **options)}


def _parse_marker(path: Path, text: str) -> tuple[str, Path, dict[str, Any]]:
    content = parse_versioned(text, _KIND, _VERSION)
    options = content.get("options", {})
    if "benchmark" not in content or not isinstance(options, dict):
        raise ValueError('expected "benchmark" and a mapping "options"')
    check_options(str(content["benchmark"]), options)
    root = Path(os.path.normpath(path.parent / str(content.get("root", "."))))
    return str(content["benchmark"]), root, options
