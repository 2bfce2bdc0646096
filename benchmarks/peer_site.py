"""A site of `benchmarks/peers.py` in MONAI alone: for NVFlare's recipe, for Flower and for a plain loop.

Slices, network, loss, optimiser and scores are those of ``medfedaug simulate`` by default.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from monai.data import CacheDataset, load_decathlon_datalist
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import BasicUNet
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, ScaleIntensityd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

__all__ = ["FEATURES", "NETWORK", "MonaiSite", "average", "network"]

FEATURES = [32, 32, 64, 128, 256, 32]
NETWORK = {"features": json.loads(os.environ.get("PEER_FEATURES", str(FEATURES))), "norm": "instance"}


def network() -> nn.Module:
    """Build the network of all sites."""
    return BasicUNet(spatial_dims=2, in_channels=1, out_channels=2, **NETWORK)


def average(states: Mapping[str, tuple[dict[str, Tensor], int]]) -> dict[str, Tensor]:
    """Return the mean of the sites' models, by number of samples."""
    whole = sum(count for _, count in states.values())
    keys = next(iter(states.values()))[0]
    return {key: sum(state[key] * (count / whole) for state, count in states.values()) for key in keys}


class MonaiSite:
    """A site's data, network and training.

    Args:
        folder: the site's folder, with a ``dataset.json``.
    """

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        keys = ("image", "label")
        load = Compose(
            [LoadImaged(keys), EnsureChannelFirstd(keys, channel_dim="no_channel"), ScaleIntensityd("image")]
        )
        self.name, self.volumes = folder.name, {}
        for split in ("training", "validation", "test"):
            listed = load_decathlon_datalist(folder / "dataset.json", data_list_key=split, base_dir=folder)
            cases = CacheDataset(listed, load, num_workers=0, progress=False)
            self.volumes[split] = [(one["image"].as_tensor(), one["label"].as_tensor()) for one in cases]
        slices = [self._slices(*case) for case in self.volumes["training"]]
        images, labels = (torch.cat(parts) for parts in zip(*slices, strict=True))
        self.samples = len(images)
        self.loader = DataLoader(TensorDataset(images, labels), 16, shuffle=True)
        self.net, self.round = network(), 0
        self.criterion = DiceCELoss(to_onehot_y=True, softmax=True, include_background=False, batch=True)

    @staticmethod
    def _slices(image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        kept = label.flatten(0, 2).gt(0).any(0)
        return image[..., kept].permute(3, 0, 1, 2), label[..., kept].permute(3, 0, 1, 2)

    def train(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Validate the received model, and train it for an epoch."""
        self.net.load_state_dict(state)
        self.mark("begin")
        if self.round:
            self.score("validation")
        optimiser = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.net.train()
        for images, labels in self.loader:
            optimiser.zero_grad()
            self.criterion(self.net(images), labels).backward()
            optimiser.step()
        self.round += 1
        self.mark("end")
        return {key: value.detach().clone() for key, value in self.net.state_dict().items()}

    @torch.no_grad()
    def score(self, split: str) -> float:
        """Return the mean Dice over patients."""
        self.net.eval()
        metric = DiceMetric(include_background=False, num_classes=2)
        for image, label in self.volumes[split]:
            logits = torch.cat([self.net(part) for part in image.permute(3, 0, 1, 2).split(16)])
            predicted = logits.argmax(1).permute(1, 2, 0)[None, None]
            metric(predicted, label[None])
        return float(metric.aggregate())

    def finish(self, state: Mapping[str, Tensor]) -> None:
        """Score the last model."""
        self.net.load_state_dict(state)
        self.score("validation")
        self.score("test")
        self.mark("tested")

    def mark(self, what: str) -> None:
        """Append the time to the file of marks."""
        with Path(os.environ["PEER_MARKS"]).open("a") as file:
            entry = {"site": self.name, "round": self.round, "samples": self.samples}
            file.write(json.dumps({"what": what, "time": time.time(), **entry}) + "\n")
