"""Recognise and open the folders of sites."""

import os
from dataclasses import replace
from pathlib import Path
from shlex import quote

from medfedaug.data.base import SiteFolder
from medfedaug.data.dataset_json import find_layout
from medfedaug.data.images import ImageFolder, visible_folders
from medfedaug.data.io.formats import is_photograph
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError

MANIFEST = "phantom.json"
"""File with the arguments of a phantom, beside its sites."""

MARKER = "federation.json"
"""File of a folder that stands for a published data set (`medfedaug.research.datasets.benchmarks`)."""


def is_federation(folder: Path) -> bool:
    """Return whether a folder's marker makes it the data folder of a benchmark."""
    return (folder / MARKER).is_file()


def is_site(path: Path) -> bool:
    """Return whether a folder holds a ``dataset.json``, readable or not, or folders of images."""
    return os.path.lexists(path / "dataset.json") or find_layout(path) is not None or _has_images(path)


def _has_images(path: Path) -> bool:
    return any(is_photograph(file) for folder in visible_folders(path) for file in folder.iterdir())


def open_folder(
    path: Path, name: str | None = None, limit: int | None = None, check: bool = True
) -> SiteFolder:
    """Open a site's folder; see `medfedaug.data.sites.open_site`."""
    if os.path.lexists(path / "dataset.json"):
        site = VolumeFolder.open(path, name=name, limit=limit, check=check)
        return replace(site, benchmark="phantom") if (path.parent / MANIFEST).exists() else site
    if layout := find_layout(path):  # or label maps would be the images of a class
        problem = f"holds {' and '.join(layout)}, and no dataset.json"
        hint = f"List its cases first: run `medfedaug init {quote(str(path))}`."
        raise DataError(problem, site=name or path.resolve().name, path=path, hint=hint)
    if _has_images(path):
        return ImageFolder.open(path, name=name, limit=limit, check=check)
    problem = "holds neither a dataset.json nor images in a folder per class"
    hint = "An empty site takes no part: remove the folder or fill it."
    raise DataError(problem, site=name or path.resolve().name, path=path, hint=hint)


def site_folders(root: Path) -> list[Path]:
    """List the folders of the sites in ``root``, sorted by name."""
    if not root.is_dir():
        raise DataError("no such folder", path=root)
    visible = sorted(p for p in root.iterdir() if not p.name.startswith("."))
    for path in visible:
        if path.is_symlink() and not path.exists():
            hint = "Mount the folder that it names, or remove the link."
            raise DataError("a broken link", site=path.name, path=path, hint=hint)
    folders = [path for path in visible if path.is_dir() and is_site(path)]
    if not folders:
        if is_site(root):
            parent = root.resolve().parent
            raise DataError("is a site itself", path=root, hint=f"Name the folder that holds it: {parent}")
        raise DataError(
            "no site found",
            path=root,
            hint="Each site is a folder with a dataset.json, or with one folder of images per class; "
            f"a benchmark is named in {MARKER}; `medfedaug phantom --out DIR` makes an example.",
        )
    return folders
