"""Find the sites in a folder, compute their statistics, and decode their files once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medfedaug.data.base import SiteFolder
from medfedaug.data.folders import MARKER, is_federation, open_folder, site_folders
from medfedaug.data.volumes import VolumeFolder
from medfedaug.errors import DataError
from medfedaug.utils.plugins import added_module
from medfedaug.utils.printable import counted
from medfedaug.utils.validation import first_of

if TYPE_CHECKING:
    from medfedaug.data.preparation.preparation import Preparation
    from medfedaug.statistics import ChannelStatistics

_READ: dict[Hashable, frozenset[int]] = {}
"""Classes in the label maps of a partial site, by case that this process has read."""


def open_site(
    path: str | Path, name: str | None = None, limit: int | None = None, check: bool = True
) -> SiteFolder:
    """Open a site's folder, which holds volumes with label maps or images in one folder per class."""
    path = Path(path)
    if not path.is_dir():
        raise DataError("no such folder", site=name, path=path)
    if is_federation(path):
        sites = _open_federation(path, limit)
        if name not in sites:
            problem = f"no such site; there are {first_of(list(sites), 6)}"
            raise DataError(problem, site=name, path=path / MARKER)
        return sites[name]
    return open_folder(path, name, limit, check)


def _open_federation(folder: Path, limit: int | None) -> dict[str, SiteFolder]:
    benchmarks = added_module("datasets.benchmarks", f"{folder / MARKER}")
    sites: dict[str, SiteFolder] = benchmarks.open_federation(folder, limit)
    return sites


def find_sites(data_dir: str | Path, limit: int | None = None) -> list[SiteFolder]:
    """Open the sites in ``data_dir``, sorted by name, or the sites of the benchmark that its marker names."""
    root = Path(data_dir)
    if is_federation(root):
        return list(_open_federation(root, limit).values())
    return [open_site(path, limit=limit) for path in site_folders(root)]


def site_statistics(
    site: SiteFolder, intensity: str = "raw", preparation: Preparation | None = None, over: str = "image"
) -> ChannelStatistics:
    """Compute the site's channel statistics (FedRDN Eq. 5-6) over its prepared training images.

    The statistics of an unseen site are of its test images.

    Args:
        intensity: ``"raw"`` or ``"scale"``, see `medfedaug.config.run.RunConfig.input_intensity`.
        preparation: the run's preparation. Resampling averages voxels, which makes standard deviations
            smaller.
        over: ``"image"`` or ``"foreground"``, see
            `medfedaug.data.preparation.preparation.Preparation.moments`.
    """
    from medfedaug.data.preparation.preparation import Preparation
    from medfedaug.statistics import average_moments

    cases, prepared = site.cases["training"] or site.cases["test"], preparation or Preparation()
    images = (site.prepared_image(case, intensity, prepared) for case in cases)
    return checked_statistics(site, lambda: average_moments(prepared.moments(x, over) for x in images))


def checked_statistics(site: SiteFolder, compute: Callable[[], ChannelStatistics]) -> ChannelStatistics:
    """Compute a site's statistics, and check that images can be normalised with them."""
    try:
        return compute().validate()
    except ValueError as error:
        raise site.error(str(error), site.path) from error


def check_voxels(sites: Iterable[SiteFolder]) -> None:
    """Decode every image and label map of the sites' own data, once for each version of a file."""
    for site in sites:
        if site.published:
            continue
        present = frozenset[int]()
        for case in site.listed_cases:
            key = (site.classes, *site.identity(case))
            if key not in _READ:
                site.load_image(case)
                label = site.load_label(case) if isinstance(site, VolumeFolder) else None
                labels = label.unique().tolist() if label is not None and site.partial else ()
                _READ[key] = frozenset(labels)
            present |= _READ[key]
        annotated = site.annotated() if site.partial else ()
        missing = [name for i, name in enumerate(site.classes) if name in annotated and i not in present]
        if missing:
            hint = "Take it out of labelled where nobody looked for it, or list a case that shows it."
            raise site.error(f"lists {missing[0]!r} as outlined, but no label map has it", hint=hint)


def describe_federation(task: str, kind: str, classes: Sequence[str], patients: Sequence[int]) -> str:
    """Return one line about a federation: task, kind of images, classes, sites and patients."""
    named = first_of(list(classes), 6)
    sites, people = counted(len(patients), "site"), counted(sum(patients), "patient")
    return f"{task}, {kind}, {len(classes)} classes ({named}), {sites}, {people}"


def num_patients(site: SiteFolder) -> int:
    """Return the number of patients; a case without a patient's name stands for one."""
    return len({case.owner for cases in site.cases.values() for case in cases})
