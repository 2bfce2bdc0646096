"""
Transforms
==========

Before and after, on a slice of a phantom site. `FedRDN` is a MONAI transform; `FedRDNd` is its dictionary
version.
"""

# %%
import tempfile

import matplotlib.pyplot as plt
import nibabel
import torch

from medfedaug.data.phantom import make_phantom
from medfedaug.statistics import channel_statistics
from medfedaug.transforms import FedRDN

with tempfile.TemporaryDirectory() as folder:
    images = {
        site.name: [
            torch.from_numpy(nibabel.load(file).get_fdata()[None, ..., 6]).float()
            for file in sorted((site / "images").iterdir())
        ]
        for site in make_phantom(f"{folder}/data", sites=3, patients=4, shape=(96, 96, 12))
    }
image = images["site_A"][1]


def show(views, limits=None):
    """Pictures side by side, in one window of grey levels or each in its own."""
    _, panels = plt.subplots(1, len(views), figsize=(2.3 * len(views), 2.6), layout="constrained")
    for panel, (title, view) in zip(panels, views.items(), strict=True):
        low, high = limits or (float(view.min()), float(view.max()))
        panel.imshow(view[0].T, cmap="gray", vmin=low, vmax=high, origin="lower")
        panel.set_title(title, fontsize=9)
        panel.axis("off")


# %%
# FedRDN
# ------
# `FedRDN` normalises with the pair of a random site in training, and of the image's own site at test. All
# pictures have one window.

pairs = {site: channel_statistics(found) for site, found in images.items()}
own, average = FedRDN(pairs, site="site_A"), FedRDN(pairs, average=True)
drawn = FedRDN(pairs)
drawn.set_random_state(0)
show(
    {
        "at test: own pair": own(image),
        "in training": drawn(image),
        "in training, again": drawn(image),
        "average=True (FedRDN-V)": average(image),
    },
    (-1, 4),
)
