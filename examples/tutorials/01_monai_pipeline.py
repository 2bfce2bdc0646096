"""
A MONAI pipeline
================

You have a pipeline in MONAI, images of several sites, and want a network that does not mind which site an
image comes from. Two things go into the pipeline: the transform `FedRDNd`, in place of the normalisation, and
the FFA layers, around the network.
"""

# %%
# Before you begin
# ----------------
# ``pip install ./medfedaug`` into the environment of your pipeline. No server is needed. Three lines of a
# training script change:
#
# .. code-block:: diff
#
#    +from medfedaug import models, transforms
#
#    -            mt.NormalizeIntensityd("image"),
#    +            transforms.FedRDNd("image", "statistics.json", site=site),
#
#    -    network = BasicUNet(2, 1, 2, features)
#    +    network = models.insert_ffa(BasicUNet(2, 1, 2, features))
#
# ``medfedaug statistics --data DATA --out statistics.json`` makes the file, where ``DATA`` has one folder for
# each site. ``site`` is ``None`` in training, and at test the site that the images come from. This page does
# it step by step, and ends with a plain MONAI checkpoint.

# %%
# Data
# ----
# Two phantom sites stand for yours: heads with a lesion, taken by two scanners.

import matplotlib.pyplot as plt
import monai.transforms as mt
import torch
from monai.data import DataLoader, Dataset, load_decathlon_datalist
from monai.losses import DiceCELoss
from monai.networks.nets import BasicUNet
from monai.utils import set_determinism
from shell import run, workspace

from medfedaug.data.phantom import make_phantom
from medfedaug.models import ffa_layers, insert_ffa
from medfedaug.runs.finished_run import FinishedRun
from medfedaug.statistics import channel_statistics, save_statistics
from medfedaug.transforms import FedRDNd

here = workspace()
torch.set_num_threads(1)
set_determinism(0)
sites = {
    folder.name: folder for folder in make_phantom(here / "data", sites=2, patients=8, shape=(48, 48, 8))
}


def slices(site, split):
    """All slices with a lesion: dictionaries with an image and a label map, (1, H, W) each."""
    load = mt.Compose([mt.LoadImaged(["image", "label"]), mt.EnsureChannelFirstd(["image", "label"])])
    cases = [load(case) for case in load_decathlon_datalist(sites[site] / "dataset.json", True, split)]
    return [
        {key: case[key][..., z] for key in ("image", "label")}
        for case in cases
        for z in case["label"].flatten(0, 2).any(dim=0).nonzero().flatten().tolist()
    ]


training = {site: slices(site, "training") for site in sites}

# %%
# The statistics of the sites
# ---------------------------
# FedRDN needs the mean and the deviation of each channel, as averages over each site's training images, as
# they reach the transform: loaded and resampled, but not augmented. In a federation the sites send them to
# each other; here they are all at hand. One image at a time is in memory.

statistics = {site: channel_statistics(case["image"] for case in cases) for site, cases in training.items()}
save_statistics(here / "statistics.json", statistics)
for site, pair in statistics.items():
    print(f"{site}: mean {pair.mean.item():.0f}, deviation {pair.std.item():.0f}, {pair.count} images")

# %%
# The transform
# -------------
# In training, without ``site``, a random site is drawn for every image at every call. At test, with ``site``,
# the image is normalised with the pair of the site that it comes from.

train = mt.Compose(
    [mt.RandFlipd(["image", "label"], prob=0.5, spatial_axis=0), FedRDNd("image", here / "statistics.json")]
)
test = {site: FedRDNd("image", here / "statistics.json", site=site) for site in sites}

case = training["site_A"][0]
views = {"as stored": case, **{f"pair of {site}": test[site](case) for site in sites}}
figure, panels = plt.subplots(1, len(views), figsize=(7.5, 2.6), layout="constrained")
for panel, (title, view) in zip(panels, views.items(), strict=True):
    limits = {} if title == "as stored" else {"vmin": -1, "vmax": 4}
    panel.imshow(view["image"][0].T, cmap="gray", origin="lower", **limits)
    panel.set_title(title, fontsize=10)
    panel.axis("off")

# %%
# The layers
# ----------
# `insert_ffa` puts a layer after each stage of the encoder. In training the layers move the statistics of the
# features at random; in evaluation they do nothing, and the checkpoint is that of the plain network.

network = insert_ffa(BasicUNet(2, 1, 2, (8, 8, 16, 32, 64, 8), norm="instance"))
print(list(ffa_layers(network)))

# %%
# Training and test
# -----------------
# The loop is yours; nothing in it changes. Here it trains on one site, and is tested on both.

loader = DataLoader(Dataset(training["site_A"], train), batch_size=8, shuffle=True)
criterion = DiceCELoss(to_onehot_y=True, softmax=True, batch=True)
optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)


def epoch():
    network.train()
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = criterion(network(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


for number in range(1, 21):
    loss = epoch()
    if number % 5 == 0:
        print(f"epoch {number}: loss {loss:.3f}")


@torch.no_grad()
def dice(site):
    network.eval()
    cases = [test[site](case) for case in slices(site, "test")]
    predicted = network(torch.stack([case["image"] for case in cases])).argmax(dim=1)
    truth = torch.stack([case["label"][0] for case in cases])
    return 2 * ((predicted == 1) & (truth == 1)).sum() / ((predicted == 1).sum() + (truth == 1).sum())


for site in sites:
    print(f"{site}: Dice {dice(site):.2f}")

# %%
# γ from a federation
# -------------------
# By themselves the layers know how much the images of a *batch* differ, and augment by that much. How much
# the *sites* differ, channel by channel, is γ; only a federation can compute it. A run with ``fedfa`` leaves
# its γ beside the model, and `FinishedRun.gamma` has it by stage, for the layers of a network of the same
# shape.

run(
    "medfedaug simulate --data data --methods fedfa --rounds 2 --engine inprocess --no-pictures "
    """--out runs/fedfa --network-args '{"features": [8, 8, 16, 32, 64, 8], "norm": "instance"}'"""
)

# %%

layers = ffa_layers(network)
for stage, (gamma_mean, gamma_std) in FinishedRun.open(here / "runs/fedfa").gamma.items():
    layers[stage].set_gamma(gamma_mean, gamma_std)
    print(f"{stage}: γ of the mean from {gamma_mean.min():.2f} to {gamma_mean.max():.2f}")
print(f"one more epoch, with γ: loss {epoch():.3f}")

# %%
# The checkpoint is that of a plain network.

torch.save(network.state_dict(), here / "model.pt")
plain = BasicUNet(2, 1, 2, (8, 8, 16, 32, 64, 8), norm="instance")
print(plain.load_state_dict(torch.load(here / "model.pt", weights_only=True)))

# %%
# Next: the same as a MONAI Bundle is in ``examples/bundle``, and a Bundle in a federation is
# :doc:`a tutorial of its own </tutorials/04_own_bundle>`. All transforms and layers are in the
# :doc:`gallery </gallery/index>`.
