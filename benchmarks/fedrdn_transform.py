"""FedRDNd compared with MONAI's NormalizeIntensityd, on slices and volumes.

    python benchmarks/fedrdn_transform.py

Both get the same MetaTensor. NormalizeIntensityd is measured in two ways: without statistics it computes mean
and standard deviation of the image; with fixed statistics it only applies them, as FedRDNd does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from measure import alternately, begin, parser, report
from monai.data import MetaTensor
from monai.transforms import NormalizeIntensityd

from medfedaug.transforms import FedRDNd

SHAPES = [(1, 240, 240), (1, 384, 384), (3, 384, 384), (1, 96, 96, 96), (4, 160, 192, 128)]


def calls(transform: Callable[[Mapping[str, Any]], Any], sample: dict[str, Any], number: int) -> Callable:
    """Repeat a call, since one call on a slice is too short for a measurement."""

    def run() -> None:
        for _ in range(number):
            transform(sample)

    return run


def main() -> None:
    """Measure every shape."""
    arguments = parser(__doc__, repeats=25)
    arguments.add_argument("--tiny", action="store_true", help="small shapes, for a quick test")
    options, _ = begin(arguments)
    for shape in [(1, 16, 16)] if options.tiny else SHAPES:
        channels, sites = shape[0], "ABCDEF"
        sample = {"image": MetaTensor(torch.rand(shape))}
        pair = [[0.4] * channels, [0.2] * channels]
        fixed = NormalizeIntensityd("image", subtrahend=pair[0], divisor=pair[1], channel_wise=True)
        work = {
            "NormalizeIntensityd": NormalizeIntensityd("image", channel_wise=True),
            "NormalizeIntensityd, given": fixed,
            "FedRDNd": FedRDNd("image", dict.fromkeys(sites, pair)),
        }
        number = 5 if options.tiny else max(1, 2_000_000 // sample["image"].numel())
        seconds = alternately(
            {name: calls(transform, sample, number) for name, transform in work.items()}, options.repeats
        )
        report(
            f"{' x '.join(map(str, shape))}, {number} call(s)",
            seconds,
            {
                ("FedRDNd", "NormalizeIntensityd"): ("<=", 1.1),
                ("FedRDNd", "NormalizeIntensityd, given"): ("<=", 1.1),
            },
        )


if __name__ == "__main__":
    main()
