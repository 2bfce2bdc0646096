"""The pass that computes a site's channel statistics, compared with only reading the same files.

    python benchmarks/statistics_pass.py
    python benchmarks/statistics_pass.py --data DIR      your own folder of sites

Reading includes decompression, decoding, channel first and float32. By default the files are a phantom of 12
volumes of 160 x 160 x 32 voxels.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from measure import alternately, begin, parser, report

from medfedaug.data.base import SiteFolder
from medfedaug.data.datasets.phantom import make_phantom
from medfedaug.data.sites import find_sites
from medfedaug.statistics import channel_statistics


def reading(site: SiteFolder) -> Callable[[], None]:
    """Read all training images of a site, one at a time."""

    def run() -> None:
        for case in site.cases["training"]:
            site.load_image(case)

    return run


def statistics(site: SiteFolder) -> Callable[[], None]:
    """Read the images, and compute the statistics."""

    def run() -> None:
        channel_statistics(map(site.load_image, site.cases["training"]))

    return run


def main() -> None:
    """Measure one site after another."""
    arguments = parser(__doc__, repeats=7)
    arguments.add_argument("--data", type=Path, help="folder of sites; by default a phantom")
    arguments.add_argument("--limit", type=int, help="largest number of cases of each split and site")
    arguments.add_argument("--shape", type=int, nargs=3, default=(160, 160, 32), help="of the phantom")
    arguments.add_argument("--patients", type=int, default=20, help="of the phantom, 12 of 20 to train")
    options, _ = begin(arguments)
    with tempfile.TemporaryDirectory() as folder:
        root = options.data or Path(folder) / "data"
        if options.data is None:
            make_phantom(root, sites=1, patients=options.patients, shape=options.shape)
        for site in find_sites(root, limit=options.limit):
            if not site.trains:
                continue
            cases = site.cases["training"]
            shape = tuple(site.load_image(cases[0]).shape)
            seconds = alternately({"reading": reading(site), "statistics": statistics(site)}, options.repeats)
            report(
                f"{site.name}: {len(cases)} images, the first {' x '.join(map(str, shape))}",
                seconds,
                {("statistics", "reading"): ("<=", 1.1)},
            )


if __name__ == "__main__":
    main()
