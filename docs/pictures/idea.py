"""Draw the picture of the methods: differences between sites, and the effects of FedRDN and FFA.

python docs/pictures/idea.py docs/pictures/idea.png

All of it is computed: phantom sites, their statistics, γ by the equations of FedFA+, and the features
of a convolution with random weights.
"""

import sys
import tempfile
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
import nibabel
import numpy as np
import torch
from PIL import Image

from medfedaug import functional as F
from medfedaug.data.phantom import make_phantom
from medfedaug.models import FFALayer
from medfedaug.statistics import channel_statistics
from medfedaug.transforms import FedRDN

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")
CHANNELS, SHOWN = 6, 3


def slices() -> dict[str, torch.Tensor]:
    """Return the middle slices of each site's patients, (N, 1, H, W), as its scanner stores them."""
    with tempfile.TemporaryDirectory() as folder:
        sites = make_phantom(Path(folder, "data"), sites=4, patients=8, shape=(96, 96, 12), seed=0)
        return {
            site.name.replace("site_", "site "): torch.stack(
                [
                    torch.from_numpy(np.asarray(nibabel.load(file).dataobj, np.float32)[None, ..., 6])
                    for file in sorted((site / "images").iterdir())
                ]
            )
            for site in sites
        }


def show(panel, image, low, high, title="", colour=None, cmap="gray"):
    """Show a slice in a window of grey levels, or of colours."""
    panel.imshow(image.numpy().T, cmap=cmap, vmin=low, vmax=high, origin="lower", interpolation="bilinear")
    panel.set_title(title, fontsize=9)
    panel.set(xticks=[], yticks=[])
    for spine in panel.spines.values():
        spine.set(visible=colour is not None, edgecolor=colour, linewidth=2)


def histogram(panel, samples, span):
    """Draw the histograms of samples by site, without the air."""
    for colour, values in zip(COLOURS, samples, strict=True):
        heights, edges = np.histogram(values, 48, span, density=True)
        panel.stairs(heights, edges, color=colour, linewidth=1.4)
        panel.stairs(heights, edges, color=colour, fill=True, alpha=0.12)
    panel.set(yticks=[], xlim=span)
    panel.tick_params(labelsize=7)
    panel.spines[["left", "right", "top"]].set_visible(False)


def main(out: str) -> None:
    """Draw the picture."""
    images = slices()
    pairs = {site: channel_statistics(stack) for site, stack in images.items()}
    heads = {site: stack[stack > stack.mean()].numpy() for site, stack in images.items()}
    figure, panels = plt.subplots(
        3, 5, figsize=(9, 5.9), layout="constrained", gridspec_kw={"width_ratios": [1, 1, 1, 1, 1.5]}
    )
    names = list(images)
    patient = 1

    high = float(np.percentile(np.concatenate(list(heads.values())), 97))
    for panel, site, colour in zip(panels[0], names, COLOURS, strict=False):
        show(panel, images[site][patient, 0], 0, high, site, colour)
    histogram(panels[0, 4], heads.values(), (0, high * 1.2))
    panels[0, 4].set_title("intensities, as stored", fontsize=9)

    image = images[names[0]][patient]
    for panel, site, colour in zip(panels[1], names, COLOURS, strict=False):
        show(panel, FedRDN(pairs, site=site)(image)[0], -1, 4, f"with {site}'s pair", colour)
    drawn = [
        np.concatenate([(values - float(pair.mean)) / float(pair.std) for pair in pairs.values()])
        for values in heads.values()
    ]
    histogram(panels[1, 4], drawn, (-2, 8))
    panels[1, 4].set_title("as the network sees them", fontsize=9)

    torch.manual_seed(5)
    convolution = torch.nn.Sequential(torch.nn.Conv2d(1, CHANNELS, 5, padding=2), torch.nn.ReLU())
    with torch.no_grad():
        features = {
            site: convolution(torch.stack([FedRDN(pairs, site=site)(image) for image in stack]))
            for site, stack in images.items()
        }
    moments = {site: F.feature_statistics(maps) for site, maps in features.items()}
    gammas = [
        F.student_t_modulation(
            F.across_site_variance(torch.stack([m[i].mean(dim=0) for m in moments.values()]))
        )
        for i in (0, 1)
    ]
    layer = FFALayer(CHANNELS, prob=1.0)
    layer.set_gamma(*gammas)
    batch = features[names[0]]
    plain = batch[patient, SHOWN]
    top = float(plain.max())
    show(panels[2, 0], plain, 0, top, "a feature", COLOURS[0])
    moved = []
    for seed in range(60):
        torch.manual_seed(seed)
        moved.append(layer(batch))
    changes = sorted((one[patient, SHOWN] - plain for one in moved), key=torch.sum)
    widest = max(float(one.abs().max()) for one in changes)
    for panel, one, draw in zip(
        panels[2, 1:4],
        (changes[0], changes[len(changes) // 2], changes[-1]),
        ("lowest", "median", "highest"),
        strict=True,
    ):
        show(panel, one, -widest, widest, f"FFA's change: {draw}", COLOURS[0], cmap="RdBu_r")
    panels[2, 2].set_xlabel(f"of {len(moved)} draws; blue lowers the feature, red raises it", fontsize=8)
    cloud = [F.feature_statistics(one) for one in moved]
    scatter = panels[2, 4]
    scatter.scatter(
        torch.cat([mean[:, SHOWN] for mean, _ in cloud]),
        torch.cat([std[:, SHOWN] for _, std in cloud]),
        s=3,
        color=COLOURS[0],
        alpha=0.12,
        linewidths=0,
    )
    for colour, (mean, std) in zip(COLOURS, moments.values(), strict=True):
        scatter.scatter(mean[:, SHOWN], std[:, SHOWN], s=16, color=colour, edgecolors="white", linewidths=0.4)
    scatter.set_title("its mean and deviation", fontsize=9)
    scatter.set_xlabel("mean", fontsize=8)
    scatter.set_ylabel("deviation", fontsize=8)
    scatter.tick_params(labelsize=7)
    scatter.spines[["right", "top"]].set_visible(False)
    rows = ("Sites differ", "FedRDN:\none image, all pairs", "FFA:\nfeatures move")
    for panel, text in zip(panels[:, 0], rows, strict=True):
        panel.set_ylabel(text, fontsize=10, fontweight="bold")
    drawn_at = BytesIO()
    figure.savefig(drawn_at, dpi=110)
    Image.open(drawn_at).convert("RGB").quantize(192).save(out, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1])
