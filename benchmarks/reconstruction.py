"""Measure what promise A leaves open: whoever chooses the weights of a job reads images from the updates.

A hospital with a kit's default rules (10 patients, no `--epsilon`) trains one epoch on 24 photographs. The
first layer of the weights that it receives compares the brightness of the two halves of an image with many
thresholds (Fowl et al., ICLR 2022). Two rows of its gradient differ by the images between two thresholds,
often one photograph, although 24 patients are behind each number. `docs/threats.md` has the result.

    PYTHONPATH=tests/support python benchmarks/reconstruction.py
"""

import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import torch
from hospitals import Hospital
from PIL import Image

from medfedaug.config.run import RunConfig
from medfedaug.federation import FederationServer
from medfedaug.federation.messages.messages import Request

SIDE, ROWS = 16, 256


def main() -> None:
    """Print the correlation of each photograph with the nearest reconstruction."""
    with tempfile.TemporaryDirectory() as folder:
        found = correlations(Path(folder))
    print(f"{len(found)} photographs in one update; correlation with the reconstruction:")
    print(f"best {found[0]:.4f}, median {np.median(found):.4f}, above 0.99: {sum(c > 0.99 for c in found)}")


def correlations(folder: Path, **settings: object) -> list[float]:
    """Return the correlation of each training photograph with the nearest reconstruction, the best first."""
    truth = photographs(folder / "data/A")
    site = Hospital(folder / "kits/A", folder / "data/A", **settings)
    config = RunConfig(
        task="classification",
        network="monai.networks.nets.ResNet",
        network_args={
            "block": "basic",
            "layers": [1, 1, 1, 1],
            "block_inplanes": [2 * ROWS + 2] * 4,
            "conv1_t_size": 2 * SIDE - 1,
            "conv1_t_stride": SIDE,
            "no_max_pool": True,
            "shortcut_type": "B",
            "norm": ["group", {"num_groups": 1}],
        },
        in_channels=3,
        classes=("c0", "c1"),
        rounds=1,
        batch_size=4,
        optimizer="sgd",
        learning_rate=1.0,
        image_size=SIDE,
        intensity="scale",
        augmentation="none",
    )
    site.start(config, "job-1")
    server = FederationServer(config, lambda event: None)
    weights = crafted({key: value.clone() for key, value in server.state.items()})
    prepared = site.answer(Request("prepare", run=server.run))
    reply = site.answer(Request("train", 1, weights=weights, run=server.run))
    if prepared.error or reply.error:
        raise RuntimeError(prepared.error or reply.error)
    images = reconstructed(weights, reply.weights)
    rows = [np.abs(np.corrcoef(photo, images)[0, 1:]) for photo in truth.values()]
    return sorted((float(np.nanmax(row)) for row in rows), reverse=True)[: reply.num_samples]


def crafted(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Let each row of the first layer compare the two halves of an image with a ratio of its own."""
    half = SIDE // 2
    for key, value in weights.items():
        value.zero_()
        if key == "conv1.weight":
            image = value[..., SIDE - 1 :, SIDE - 1 :]
            image[:ROWS, ..., :half] = 1.0 / SIDE**2
            image[:ROWS, ..., half:] = -torch.linspace(0.85, 1.15, ROWS)[:, None, None, None] / SIDE**2
            # Group norm divides by the brightness of these, and takes off a mean of 0.
            image[2 * ROWS] = 100.0 / SIDE**2
            image[ROWS : 2 * ROWS], image[2 * ROWS + 1] = -image[:ROWS], -image[2 * ROWS]
        elif "downsample" in key and value.ndim == 4:  # later layers pass the rows on
            value[range(len(value)), range(len(value))] = 1.0
        elif "downsample" in key and "bias" in key:
            value.fill_(10.0)
        elif key == "bn1.weight" or "downsample" in key:
            value.fill_(1.0)
        elif key == "fc.weight":  # the same gradient for each row
            value[0, :ROWS], value[1, :ROWS] = 1.0, -1.0
    return weights


def reconstructed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> np.ndarray:
    """Return an image for each pair of neighbouring rows: their steps differ by the images between them."""
    step = (after["conv1.weight"] - before["conv1.weight"]).double()[..., SIDE - 1 :, SIDE - 1 :].flatten(1)
    images = step[: ROWS - 1] - step[1:ROWS]
    return images[images.std(dim=1) > 0].numpy()


def photographs(folder: Path) -> dict[tuple[int, int], np.ndarray]:
    """Write 20 random photographs of each of two classes, one of each patient."""
    rng, truth = np.random.default_rng(1), {}
    for label, number in product(range(2), range(20)):
        (folder / f"c{label}").mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"c{label}" / f"p{number:03d}.png")
        truth[label, number] = pixels.transpose(2, 0, 1).reshape(-1) / 255.0
    return truth


if __name__ == "__main__":
    main()
