"""Draw the picture of the README from the runs of `make demo`: image, truth and two predictions.

python docs/pictures/odd_scanner.py demo docs/pictures/odd_scanner.png

The rows are the test patients of the hospital with the odd scanner, all of them.
"""

import json
import sys
import tempfile
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
import nibabel
import numpy as np
from PIL import Image

import medfedaug as mfa

SITE = "site_C"
RUNS = {"fedavg": "plain averaging", "fedrdn": "with FedRDN"}
TRUTH, PREDICTED = "#00e000", "#ff7f0e"


def voxels(file: Path) -> np.ndarray:
    """Return the voxels of a volume."""
    return np.asarray(nibabel.load(file).dataobj)


def predictions(demo: Path, image: Path) -> dict[str, np.ndarray]:
    """Return the label map that each run gives an image."""
    found = {}
    for run in RUNS:
        with tempfile.TemporaryDirectory() as work:
            mfa.load_run(demo / run).predict(image, work, site=SITE, device="cpu")
            (file,) = Path(work).rglob("*.nii.gz")
            found[run] = voxels(file)
    return found


def main(demo: Path, out: str) -> None:
    """Draw the picture."""
    site = demo / "data" / SITE
    cases = json.loads((site / "dataset.json").read_text())["test"]
    figure, panels = plt.subplots(len(cases), 4, figsize=(7.6, 2.05 * len(cases)), layout="constrained")
    for panel, title in zip(panels[0], ("image", "truth", *RUNS.values()), strict=True):
        panel.set_title(title, fontsize=10)
    for row, case in zip(panels, cases, strict=True):
        image, truth = voxels(site / case["image"]), voxels(site / case["label"]) > 0
        shown = int(truth.sum(axis=(0, 1)).argmax())
        maps = [None, truth, *(label > 0 for label in predictions(demo, site / case["image"]).values())]
        for panel, label in zip(row, maps, strict=True):
            panel.imshow(image[..., shown].T, cmap="gray", vmin=0, vmax=np.percentile(image, 99.5))
            width, height, _ = image.shape  # without the air around the head
            panel.set(
                xticks=[], yticks=[], xlim=(width / 8, width * 7 / 8), ylim=(height * 15 / 16, height / 16)
            )
            if label is None:
                continue
            if label[..., shown].any():
                colour = TRUTH if label is truth else PREDICTED
                panel.contour(label[..., shown].T, levels=[0.5], colors=[colour], linewidths=1.4)
            if label is not truth:
                dice = 2 * (label & truth).sum() / (label.sum() + truth.sum())
                panel.set_xlabel(f"Dice {dice:.2f}", fontsize=9)
    drawn = BytesIO()
    figure.savefig(drawn, dpi=100)
    Image.open(drawn).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(out, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
