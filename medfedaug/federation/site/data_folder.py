"""Find and open a site's data."""

import os
from pathlib import Path

from medfedaug.config.machine import DATA_VARIABLE
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.data.sites import is_federation, is_site, open_site
from medfedaug.errors import DataError


def resolve_data_folder(site: str, data_dir: str | Path | None = None) -> Path:
    """Return the folder of a site's data, which the site defines, never the job.

    Args:
        site: the site's name.
        data_dir: the site's folder, a parent of a folder of the site's name, or the folder of a benchmark
            (`medfedaug.research.datasets.benchmarks`); by default the environment variable
            ``MEDFEDAUG_DATA``.

    Raises:
        DataError: when the folder is missing.
    """
    root = data_dir or os.environ.get(DATA_VARIABLE)
    if not root or not Path(root).exists():
        hint = f"Mount or correct it: {DATA_VARIABLE} or site configure --data names it."
        raise DataError(
            "no data folder" if not root else "the data folder is missing", site=site, path=root, hint=hint
        )
    if is_federation(Path(root)):
        return Path(root)
    # The subfolder first: a folder of sites looks like one site with the sites as classes.
    for folder in (Path(root) / site, Path(root)):
        if folder.is_dir() and is_site(folder):
            return folder
    raise DataError("no data of a site", site=site, path=root, hint=f"{DATA_VARIABLE} names its folder.")


def open_own_data(site: str, config: RunConfig, data_dir: str | Path | None = None) -> SiteFolder:
    """Open a site's data for a run, and check their files."""
    folder = open_site(resolve_data_folder(site, data_dir), name=site, limit=config.limit)
    folder = folder.with_channels(config.channel_names).with_classes(config.classes)
    check_channels(folder, config)
    return folder


def check_channels(folder: SiteFolder, config: RunConfig) -> None:
    """Check the files of a site's data (`SiteFolder.check_files`), and their number of channels."""
    channels = folder.check_files()
    if channels != config.in_channels:
        raise DataError(
            f"images have {channels} channels, the federation expects {config.in_channels}",
            site=folder.name,
            path=folder.path,
        )
