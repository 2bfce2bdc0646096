"""Count the planted errors that `medfedaug inspect` finds, and its false alarms on data without any.

    python benchmarks/planted_errors.py --data NAME=DIR [NAME=DIR ...]

Each case of a site is damaged in turn, in memory, and compared with the intact others of its site; an error
of a whole site damages all cases. A detection is a finding about the damaged case (or the site, or the pair);
a false alarm is a case of the clean data with any finding. The limits were chosen on the phantom.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from measure import hardware
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from medfedaug.data.base import SPLITS
from medfedaug.data.folders import site_folders
from medfedaug.data.quality.case_comparison import (
    FEWEST,
    CaseMeasures,
    measure_case,
    near_copies,
    odd_cases,
    odd_site,
    small_picture,
)
from medfedaug.data.sites import open_site
from medfedaug.data.volumes import VolumeFolder

Pair = tuple[Tensor, Tensor]


def inverted(image: Tensor, label: Tensor) -> Pair:
    """Invert the image."""
    return image.amax() - image + image.amin(), label


def foreign(image: Tensor, label: Tensor) -> Pair:
    """Change the weighting: the order of tissues is reversed, and air stays dark."""
    top = image.float().flatten(1).quantile(0.995, dim=1) if image[0].numel() < 2**24 else image.amax()
    top = torch.as_tensor(top).reshape(-1, *[1] * (image.ndim - 1))
    signal = image > 0.05 * top
    return torch.where(
        signal, (1.05 * top - image.float()).clamp_min(0) ** 1.5 / top.clamp_min(1e-9) ** 0.5, 0.0
    ), label


def rescaled(image: Tensor, label: Tensor) -> Pair:
    """Enlarge the image by 1 %, and brighten it by 1 %."""
    size = [round(1.01 * n) for n in image.shape[1:3]]
    stack = image.float().reshape(*image.shape[:3], -1).permute(3, 0, 1, 2)
    large = interpolate(stack, size=size, mode="bilinear").permute(1, 2, 3, 0)
    return 1.01 * large.reshape(len(image), *size, *image.shape[3:]), label


def moved(image: Tensor, label: Tensor) -> Pair:
    """Move the image right and up by 2 % of its size."""
    return image.roll([round(0.02 * n) for n in image.shape[1:3]], dims=(1, 2)), label


def encoded(image: Tensor, label: Tensor) -> Pair:
    """Encode each plane of the image as JPEG of quality 60."""
    low, high = image.amin(), image.amax()
    planes = ((image - low) / (high - low) * 255).round().byte().reshape(*image.shape[:3], -1)
    read = planes.clone()
    for channel in range(planes.shape[0]):
        for index in range(planes.shape[3]):
            file = io.BytesIO()
            Image.fromarray(planes[channel, ..., index].numpy()).save(file, "JPEG", quality=60)
            read[channel, ..., index] = torch.from_numpy(np.array(Image.open(file)))
    return read.float().reshape(image.shape), label


COPIES: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "copy that is 1 % larger and brighter": rescaled,
    "copy that is moved by 2 %": moved,
    "copy that was saved as JPEG": encoded,
}
ERRORS: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "label map flipped left to right": lambda image, label: (image, label.flip(1)),
    "label map shifted by one voxel": lambda image, label: (image, label.roll(1, dims=1)),
    "label map shifted by three voxels": lambda image, label: (image, label.roll(3, dims=1)),
    "label map all foreground": lambda image, label: (image, torch.ones_like(label)),
    "image of a foreign modality": foreign,
    "image inverted": inverted,
}
OF_ALL = {
    "label map flipped left to right",
    "label map shifted by one voxel",
    "label map shifted by three voxels",
}


def cases_of(site: VolumeFolder) -> list[Pair]:
    """Return images and label maps of all splits."""
    return [site.load_case(case) for split in SPLITS for case in site.cases[split]]


def measured(pairs: Sequence[Pair]) -> list[CaseMeasures]:
    """Measure the cases with a label."""
    return [measures for pair in pairs if (measures := measure_case(*pair)) is not None]


def about(cases: Sequence[CaseMeasures], index: int) -> bool:
    """Return whether a finding is about a case."""
    return any(odd == index for odd, *_ in odd_cases(cases))


def exchanged(pairs: Sequence[Pair]) -> Iterator[tuple[int, CaseMeasures | None]]:
    """Yield each case with the label map of the next one on a grid of the same size."""
    for index, (image, label) in enumerate(pairs):
        others = [o for o in (*pairs[index + 1 :], *pairs[:index]) if o[1].shape[1:3] == label.shape[1:3]]
        if others:
            other = others[0][1]
            if other.ndim == 4 and other.shape[3] != label.shape[3]:
                size = label.shape[1:]
                other = interpolate(other[None].float(), size=size, mode="nearest")[0].to(label.dtype)
            yield index, measure_case(image, other)


def rows_of(name: str, folder: Path) -> Iterator[tuple[str, str, int, int]]:
    """Yield error, data set, number of detections and number of trials."""
    sites = [
        site
        for path in site_folders(folder)
        if isinstance(site := open_site(path, check=False), VolumeFolder)
    ]
    counts: dict[str, list[int]] = {}

    def count(error: str, detected: bool) -> None:
        entry = counts.setdefault(error, [0, 0])
        entry[0] += detected
        entry[1] += 1

    for site in sites:
        pairs = cases_of(site)
        clean = measured(pairs)
        if len(clean) < FEWEST:
            continue
        alarms = {index for index, *_ in odd_cases(clean)}
        for index in range(len(clean)):
            count("none: cases with a false alarm", index in alarms)
        count("none: sites with a false alarm", any(odd_site(clean)))
        copies = {i for pair in near_copies([case.picture for case in clean]) for i in pair}
        for index in range(len(clean)):
            count("none: cases that are called copies", index in copies)
        for error, plant in ERRORS.items():
            broken = [measure_case(*plant(*pair)) for pair in pairs]
            for index, one in enumerate(broken):
                if one is not None:
                    count(error, about([*clean[:index], one, *clean[index + 1 :]], index))
            if error in OF_ALL:
                count(f"{error}, all of a site", any(odd_site([one for one in broken if one is not None])))
        for index, one in exchanged(pairs):
            if one is not None:
                count(
                    "label map of another patient", about([*clean[:index], one, *clean[index + 1 :]], index)
                )
        for error, plant in COPIES.items():
            for image, label in pairs:
                again = small_picture(plant(image, label)[0])
                copies_found = near_copies([*(case.picture for case in clean), again])
                count(error, any(pair[1] == len(clean) for pair in copies_found))
    for error, (detected, tried) in counts.items():
        yield error, name, detected, tried


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", nargs="+", required=True, metavar="NAME=DIR")
    folders = dict(text.split("=", 1) for text in parser.parse_args().data)
    torch.set_num_threads(1)
    table: dict[str, dict[str, str]] = {}
    for name, folder in folders.items():
        for error, data, detected, tried in rows_of(name, Path(folder)):
            table.setdefault(error, {})[data] = f"{detected} of {tried} ({detected / tried:.0%})"
    print(hardware())
    print("| error | " + " | ".join(folders) + " |")
    print("|---|" + "---|" * len(folders))
    for error, cells in table.items():
        print(f"| {error} | " + " | ".join(cells.get(name, "–") for name in folders) + " |")


if __name__ == "__main__":
    main()
