"""
Layers
======

Before and after, on the features of a convolution with random weights. Each dot is an image: the mean and the
deviation of one channel of its features. In evaluation all of these layers do nothing.
"""

# %%
import tempfile

import matplotlib.pyplot as plt
import nibabel
import torch

from medfedaug.data.phantom import make_phantom
from medfedaug.functional import across_site_variance, feature_statistics, student_t_modulation
from medfedaug.models import FFALayer
from medfedaug.models.adaptation import adapt_batch_norm, interpolating
from medfedaug.statistics import channel_statistics
from medfedaug.transforms import FedRDN

CHANNELS, SHOWN = 6, 3
with tempfile.TemporaryDirectory() as folder:
    images = {
        site.name: torch.stack(
            [
                torch.from_numpy(nibabel.load(file).get_fdata()[None, ..., 6]).float()
                for file in sorted((site / "images").iterdir())
            ]
        )
        for site in make_phantom(f"{folder}/data", sites=3, patients=8, shape=(96, 96, 12))
    }
pairs = {site: channel_statistics(found) for site, found in images.items()}
torch.manual_seed(5)
convolution = torch.nn.Sequential(torch.nn.Conv2d(1, CHANNELS, 5, padding=2), torch.nn.ReLU())
with torch.no_grad():
    features = {
        site: convolution(torch.stack([FedRDN(pairs, site=site)(one) for one in found]))
        for site, found in images.items()
    }
batch = features["site_A"]


def show(views):
    """A feature of one image, and the mean and deviation of that feature over all images."""
    _, panels = plt.subplots(2, len(views), figsize=(2.3 * len(views), 4.6), layout="constrained")
    top = float(batch[1, SHOWN].max())
    for column, (title, view) in enumerate(views.items()):
        panels[0, column].imshow(view[1, SHOWN].detach().T, cmap="gray", vmin=0, vmax=top, origin="lower")
        panels[0, column].set_title(title, fontsize=9)
        panels[0, column].axis("off")
        panel = panels[1, column]
        for before in features.values():
            mean, std = feature_statistics(before)
            panel.scatter(mean[:, SHOWN], std[:, SHOWN], s=10, alpha=0.3)
        mean, std = feature_statistics(view.detach())
        panel.scatter(mean[:, SHOWN], std[:, SHOWN], s=14, color="black")
        panel.set_xlabel("mean", fontsize=8)
        panel.tick_params(labelsize=7)
    panels[1, 0].set_ylabel("deviation", fontsize=8)
    for panel in panels[1, 1:]:
        panel.sharex(panels[1, 0])
        panel.sharey(panels[1, 0])


# %%
# FFALayer
# --------
# `FFALayer` moves mean and deviation of each channel at random (FedFA). Without γ it does so by as much as
# the images of the batch differ; with γ from the server, by more where the sites differ more. Black: the
# batch of the first site after the layer; in colour: the three sites before.

by_site = [feature_statistics(found) for found in features.values()]
gamma = [
    student_t_modulation(across_site_variance(torch.stack([pair[i].mean(dim=0) for pair in by_site])))
    for i in (0, 1)
]
alone, federated = FFALayer(CHANNELS, prob=1.0), FFALayer(CHANNELS, prob=1.0)
federated.set_gamma(*gamma)
print("γ of the mean, by channel:", [round(float(value), 2) for value in gamma[0]])
torch.manual_seed(1)
views = {"before": batch, "without γ": alone(batch)}
torch.manual_seed(1)
views["with γ"] = federated(batch)
show(views)

# %%
# AdaptiveBatchNorm
# -----------------
# `adapt_batch_norm` lets the batch norms of a network interpolate between the federation's statistics (α = 0)
# and those of the image itself (α = 1), as FedFD-A does at inference. `insert_instance_adapters` adds the
# small networks that choose α for each image.

norm = adapt_batch_norm(torch.nn.Sequential(torch.nn.BatchNorm2d(CHANNELS)))
norm.train()
with torch.no_grad():
    for _ in range(60):
        norm(torch.cat(list(features.values())))
norm.eval()
views = {"before": batch}
for alpha in (0.0, 0.5, 1.0):

    def between(_norm, own, federation, alpha=alpha):
        return tuple(torch.lerp(theirs, mine, alpha) for mine, theirs in zip(own, federation, strict=True))

    with torch.no_grad(), interpolating(norm, between):
        views[f"α = {alpha:g}"] = norm(batch)
show(views)
