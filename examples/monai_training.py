"""Train a U-Net on one site's slices with MONAI, and score it on the test patients of every site.

`monai_training.py` is plain MONAI; `monai_training_medfedaug.py` is the same script with FedRDN and FFA.

    medfedaug phantom --out data --sites 2
    medfedaug statistics --data data --out data/statistics.json
    python examples/monai_training.py data --site site_A
"""

import argparse
from pathlib import Path

import monai.transforms as mt
import torch
from monai.data import DataLoader, Dataset, load_decathlon_datalist
from monai.losses import DiceCELoss
from monai.metrics import DiceMetric
from monai.networks.nets import BasicUNet
from monai.networks.utils import one_hot
from monai.utils import set_determinism

FEATURES = (8, 16, 32, 64, 128, 8)


def volumes(folder, split):
    """The patients of a split: image and label, (1, H, W, D) each."""
    load = mt.Compose([mt.LoadImaged(["image", "label"]), mt.EnsureChannelFirstd(["image", "label"])])
    return [load(case) for case in load_decathlon_datalist(folder / "dataset.json", True, split)]


def pipeline(root, site):
    """Transforms of a slice: of a test site, or augmentation for training where `site` is None."""
    augmentation = [mt.RandFlipd(["image", "label"], prob=0.5, spatial_axis=0)] if site is None else []
    return mt.Compose(
        [
            *augmentation,
            mt.NormalizeIntensityd("image"),
            mt.DivisiblePadd(["image", "label"], k=16, method="end", allow_missing_keys=True),
        ]
    )


def train(network, root, site, epochs):
    """Slices with a lesion, Dice plus cross-entropy, Adam."""
    slices = [
        {key: case[key][..., index] for key in ("image", "label")}
        for case in volumes(root / site, "training")
        for index in case["label"].flatten(0, 2).any(dim=0).nonzero().flatten().tolist()
    ]
    loader = DataLoader(Dataset(slices, pipeline(root, None)), batch_size=8, shuffle=True)
    criterion = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    network.train()
    for epoch in range(epochs):
        losses = []
        for batch in loader:
            loss = criterion(network(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")


@torch.no_grad()
def test(network, root, site):
    """Mean Dice of the test patients, each a whole volume."""
    network.eval()
    metric, transform = DiceMetric(include_background=False), pipeline(root, site)
    for case in volumes(root / site, "test"):
        height, width, depth = case["image"].shape[1:]
        batch = torch.stack([transform({"image": case["image"][..., i]})["image"] for i in range(depth)])
        predicted = network(batch).argmax(dim=1)[:, :height, :width].movedim(0, -1)
        metric(one_hot(predicted[None, None], 2), one_hot(case["label"][None], 2))
    return metric.aggregate().item()


def main():
    """Read the command line, train, test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("root", type=Path, help="folder of sites")
    parser.add_argument("--site", default="site_A", help="the site to train on")
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    set_determinism(0)
    network = BasicUNet(2, 1, 2, FEATURES, norm="batch")
    train(network, options.root, options.site, options.epochs)
    for listing in sorted(options.root.glob("*/dataset.json")):
        print(f"{listing.parent.name}: Dice {test(network, options.root, listing.parent.name):.4f}")


if __name__ == "__main__":
    main()
