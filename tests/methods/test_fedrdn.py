"""FedRDN through a federation: whose statistics are exchanged, and of which images."""

import json

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image
from reference import UNEVEN, assert_models, assert_tested, descend, federated_averaging, pixels, statistics
from running import TINY_OPTIONS
from torch import nn

from medfedaug.methods import FedRDN
from medfedaug.methods.base import ServerContext, SiteContext
from medfedaug.statistics import ChannelStatistics, load_statistics

SIZE = 16


def resized(plane: np.ndarray) -> np.ndarray:
    """Shrink a plane, (H, W), by Pillow."""
    return np.asarray(
        Image.fromarray(plane).resize((SIZE, SIZE), Image.Resampling.BILINEAR), dtype=np.float64
    )


def photographs(root, site: str) -> list[np.ndarray]:
    """The training images of a site, the first 60 % of its list, as the network sees them, (3, H, W)."""
    listed = json.loads((root / f"splits/{site}_train.json").read_text())
    names = [name for name, _ in listed[: int(0.6 * len(listed))]]
    files = [np.asarray(Image.open(root / name)) for name in names]
    return [np.stack([resized(pixels[..., c]) for c in range(3)]) for pixels in files]


def volumes(root, site: str) -> list[np.ndarray]:
    """The training volumes of a site, (1, H, W, D)."""
    cases = json.loads((root / site / "dataset.json").read_text())["training"]
    values = [nibabel.load(root / site / case["image"]).get_fdata().astype(np.float32) for case in cases]
    return [
        np.stack([resized(volume[..., i]) for i in range(volume.shape[-1])], axis=-1)[None]
        for volume in values
    ]


def equation_5(images: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Means over the images of their own mean and deviation, by channel."""
    flat = [image.reshape(len(image), -1) for image in images]
    return np.mean([x.mean(1) for x in flat], axis=0), np.mean([x.std(1) for x in flat], axis=0)


@pytest.mark.parametrize("kind", ["photographs", "volumes"])
def test_sites_exchange_the_statistics_of_the_prepared_images(kind, run, make_photos, make_site, tmp_path):
    sites, options = ("A", "B"), ["--image-size", SIZE]
    if kind == "photographs":
        root = make_photos("A").parent
        make_photos("B")
        (root / "splits").mkdir()
        for site in sites:
            files = [[f"{site}/{label}/{i}.png", label] for i in range(5) for label in ("cat", "dog")]
            (root / f"splits/{site}_train.json").write_text(json.dumps(files[:8]))
            (root / f"splits/{site}_test.json").write_text(json.dumps(files[8:]))
        options += ["--network", "lenet5"]
        expected = {site: equation_5(photographs(root, site)) for site in sites}
    else:
        root = make_site("A", shape=(40, 32, 4)).parent
        make_site("B", shape=(40, 32, 4))
        options += TINY_OPTIONS
        expected = {site: equation_5(volumes(root, site)) for site in sites}
    out = tmp_path / "out"
    command = [
        "--methods",
        "fedrdn",
        "--intensity",
        "raw",
        "--rounds",
        1,
        "--engine",
        "inprocess",
        "--no-report",
    ]
    run.ok("simulate", "--data", root, "--out", out, *command, *options)
    exchanged = load_statistics(out / "statistics.json")
    # Pillow rounds 8-bit pixels; the files themselves have a deviation that is half as large again or more.
    for site, (mean, std) in expected.items():
        np.testing.assert_allclose(exchanged[site].mean, mean, rtol=2e-3)
        np.testing.assert_allclose(exchanged[site].std, std, rtol=2e-3)
    command = ["statistics", "--data", root, "--out", tmp_path / "s.json", "--image-size", SIZE]
    assert run(*command)[0] == 0
    assert load_statistics(tmp_path / "s.json") == exchanged


SIZES = {"A": 5, "B": 10, "C": 15, "D": 5}


@pytest.mark.parametrize("average", [False, True], ids=["fedrdn", "fedrdn_v"])
def test_training_draws_whole_pairs_and_testing_uses_local_statistics(federate, average):
    """Eq. 5 to 8: and of the variant, the average pair throughout."""
    name = "fedrdn_v" if average else "fedrdn"
    run = federate(name, plan=UNEVEN, sizes=SIZES, holdout=("D",), local_epochs=4)
    sites = ("A", "B", "C")
    pairs = {site: statistics(pixels(run, site)) for site in SIZES}
    everybodys = [sum(pairs[site][k] for site in sites) / 3 for k in (0, 1)]
    drawn = set()
    for (site, _), batches in run.batches.items():
        images = pixels(run, site)
        choices = [everybodys] if average else [pairs[other] for other in sites]
        # Each image by the pair of one of the sites: both halves of the same.
        result = batches.assert_images(*((images - mean) / std for mean, std in choices))
        drawn |= {(site, choice) for choice in result}
    assert len(drawn) == (3 if average else 9)

    def train(site, round_, network):
        descend(network, run.batches[site, round_], 0.05)

    rounds = federated_averaging(run, train)
    assert_models(run, rounds)
    model = rounds[run.server.selected_round - 1].model
    for site in SIZES:
        mean, std = everybodys if average else pairs[site]
        assert_tested(run, site, model, lambda images, mean=mean, std=std: (images - mean) / std)


def test_a_site_that_joins_late_is_drawn_from_then_on(federate):
    plan = [("A", "B"), ("A", "B"), ("A", "B", "C"), ("A", "B", "C")]
    run = federate("fedrdn", plan=plan, rounds=4, local_epochs=6, batch_size=3)
    pairs = [statistics(pixels(run, site)) for site in "ABC"]
    for (site, round_), batches in run.batches.items():
        images = pixels(run, site)
        result = batches.assert_images(*((images - mean) / std for mean, std in pairs))
        assert set(result) == ({0, 1} if round_ < 3 else {0, 1, 2})


def test_a_site_that_joined_no_exchange_uses_its_local_statistics():
    own = ChannelStatistics([3.0], [2.0], 1)
    site = FedRDN().at_site(SiteContext("late", nn.Identity(), lambda over: own))
    (evaluation,) = site.transforms(training=False)
    assert float(torch.as_tensor(evaluation({"image": torch.full((1, 2, 2), 7.0)})["image"])[0, 0, 0]) == 2.0


@pytest.mark.parametrize("std", [0.0, -1.0, 1e30])
def test_fedrdn_refuses_a_deviation_that_cannot_divide(std):
    server = FedRDN().before_training(ServerContext(nn.Identity(), in_channels=1))
    with pytest.raises(ValueError, match="standard deviation"):
        server.check({"mean": torch.zeros(1), "std": torch.tensor([std]), "count": torch.ones(1)})
