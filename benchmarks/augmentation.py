"""Flips and rotations of a batch with one interpolation, compared with MONAI's transforms image by image.

python benchmarks/augmentation.py --device cuda
"""

from __future__ import annotations

import math

import torch
from measure import alternately, begin, parser, report
from monai.transforms import Compose, RandFlipd, RandRotated

from medfedaug.sampling.augmentation import FlipRotate

SHAPES = [(3, 64, 64), (3, 128, 128), (3, 256, 256), (1, 384, 384)]
BATCH = 32


def main() -> None:
    """Measure every shape."""
    arguments = parser(__doc__, repeats=15)
    arguments.add_argument("--device", default="cpu", help="of the images (default cpu)")
    arguments.add_argument("--tiny", action="store_true", help="small shapes, for a quick test")
    options, _ = begin(arguments)
    single = Compose(
        [
            RandFlipd("image", prob=0.5, spatial_axis=1),
            RandRotated("image", range_x=math.pi / 6, prob=1.0, mode="bilinear", padding_mode="zeros"),
        ]
    )
    batch = FlipRotate(math.pi / 6, axis=1)

    def one_by_one(samples):
        return [single(sample) for sample in samples]

    for shape in [(1, 16, 16)] if options.tiny else SHAPES:
        samples = [{"image": torch.rand(shape, device=options.device)} for _ in range(BATCH)]

        def run(augment, samples=samples):
            images = [sample["image"] for sample in augment(samples)]
            return float(torch.stack(images).sum())  # this waits for the GPU

        seconds = alternately(
            {"image by image": lambda run=run: run(one_by_one), "batch at once": lambda run=run: run(batch)},
            options.repeats,
        )
        report(
            f"{BATCH} images of {' x '.join(map(str, shape))}",
            seconds,
            {("image by image", "batch at once"): (">=", 1.0)},
        )


if __name__ == "__main__":
    main()
