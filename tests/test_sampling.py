"""Flips and turns of a batch, against MONAI's one image at a time."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from monai.transforms import Compose, Flip, Rotate

from medfedaug.config.plan import Plan
from medfedaug.data.sites import find_sites
from medfedaug.methods import parse_methods
from medfedaug.research.datasets.benchmarks import OWN_DATA, write_federation
from medfedaug.sampling import ConcatenatedDataset, FlipRotate, MonaiAugmentation, TrainingDataset
from medfedaug.simulate import configure
from medfedaug.tasks import make_task

LABELLED = (("image", "bilinear"), ("label", "nearest"))


def sample(height: int, width: int, value: float = 0.0) -> dict:
    torch.manual_seed(height)
    image = torch.rand(2, height, width) + value
    return {"image": image, "label": (image[:1] > 0.5 + value).to(torch.uint8)}


@pytest.mark.parametrize("axis", [0, 1])
def test_as_monai_does_it_image_by_image(axis):
    samples = [sample(20, 20), sample(16, 24), sample(20, 20), sample(15, 21)]
    augment = FlipRotate(math.pi / 6, axis, LABELLED)
    augment.set_random_state(1)
    augmented = augment(samples)
    assert len(set(augment.flips.tolist())) == 2
    for before, after, flip, angle in zip(samples, augmented, augment.flips, augment.angles, strict=True):
        for key, mode in LABELLED:
            image = Flip(spatial_axis=axis)(before[key]) if flip else before[key]
            expected = Rotate(float(angle), keep_size=True, mode=mode, padding_mode="zeros")(image.float())
            difference = (after[key].float() - expected.as_tensor()).abs()
            # A pixel whose source lies half way between two may go to either.
            assert (difference > 1e-3).float().mean() <= (0.0 if mode == "bilinear" else 0.01)
        assert after["label"].dtype == torch.uint8
        assert after["image"].shape == before["image"].shape


def test_draws_are_those_of_the_seed_and_of_the_paper():
    augment = FlipRotate(math.pi / 6)
    augment.set_random_state(5)
    augment.randomize(4000)
    replay = np.random.RandomState(5)
    assert augment.flips.tolist() == (replay.uniform(size=4000) < 0.5).tolist()
    angles = replay.uniform(-math.pi / 6, math.pi / 6, size=4000)
    np.testing.assert_allclose(augment.angles.numpy(), angles, rtol=1e-6)


def test_flips_alone_interpolate_nothing_and_change_no_input():
    one = sample(5, 7)
    kept = one["image"].clone()
    augment = FlipRotate(0.0, axis=1, modes=LABELLED)
    augment.set_random_state(1)
    for _ in range(4):
        (out,) = augment([one])
        expected = one["image"].flip(2) if augment.flips[0] else one["image"]
        assert torch.equal(out["image"], expected)
        assert torch.equal(out["label"], one["label"].flip(2) if augment.flips[0] else one["label"])
    assert torch.equal(one["image"], kept)


class Whole(list):
    """Samples of which no part is drawn."""

    def draw(self, index, random):
        return self[index]


def training(samples, seed=0):
    return TrainingDataset(Whole(samples), Compose(), FlipRotate(0.0, modes=LABELLED), Compose(), seed)


def test_together_each_site_has_its_own_draws_and_the_order_is_kept():
    parts = [[sample(4, 4, float(i)) for i in chosen] for chosen in (range(3), range(3, 5))]
    together = ConcatenatedDataset([training(part, seed) for seed, part in enumerate(parts)])
    samples = together.__getitems__([4, 0, 3, 2])
    assert [int(s["image"].min()) for s in samples] == [4, 0, 3, 2]
    alone = training(parts[1], 1).__getitems__([1, 0])
    assert torch.equal(samples[0]["image"], alone[0]["image"])
    assert torch.equal(samples[2]["image"], alone[1]["image"])


def volumes(count, dims=3):
    torch.manual_seed(0)
    samples = []
    for _ in range(count):
        image = torch.rand(1, 12, 10, 8)
        image[:, 3:7, 3:7, 2:6] += 1
        samples.append({"image": image / image.max(), "label": (image > 1).to(torch.uint8)})
    return samples if dims == 3 else [{key: v[..., 4] for key, v in sample.items()} for sample in samples]


def test_volumes_are_flipped_and_rotated_slice_by_slice_as_photographs_are():
    samples, augment = volumes(3), FlipRotate(0.5, axis=0, modes=LABELLED)
    augment.set_random_state(4)
    whole = augment(samples)
    for z in range(samples[0]["image"].shape[-1]):
        augment.set_random_state(4)
        planes = augment([{key: value[..., z] for key, value in one.items()} for one in samples])
        for volume, plane in zip(whole, planes, strict=True):
            assert torch.equal(volume["image"][..., z], plane["image"])
            assert torch.equal(volume["label"][..., z], plane["label"])


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", ["intensity", "full"])
def test_sets_of_monais_transforms_follow_the_seed_and_move_labels_along(name, dims):
    samples = volumes(12, dims)
    before = [one["image"].clone() for one in samples]
    augment = MonaiAugmentation(name, dims, ("image", "label"))
    first = augment.set_random_state(3)(samples)
    again = augment.set_random_state(3)(samples)
    other = augment.set_random_state(4)(samples)
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a["image"], b["image"]) for a, b in zip(first, other, strict=True))
    assert all(torch.equal(a, one["image"]) for a, one in zip(before, samples, strict=True))
    moved = [not torch.equal(a["label"], b["label"]) for a, b in zip(first, samples, strict=True)]
    assert any(moved) == (name == "full")
    for out, one in zip(first, samples, strict=True):
        assert out["image"].shape == one["image"].shape
        assert out["label"].dtype == torch.uint8
        assert set(out["label"].unique().tolist()) <= {0, 1}
        assert type(out["image"]) is torch.Tensor


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("name", ["intensity", "full"])
def test_the_scale_of_intensities_makes_no_difference(name, dims):
    """Hounsfield units are augmented as strongly as an image scaled to [0, 1]."""
    samples = volumes(12, dims)
    stored = [{**one, "image": one["image"] * 3000 - 1000} for one in samples]
    augment = MonaiAugmentation(name, dims, ("image", "label"))
    scaled = augment.set_random_state(3)(samples)
    units = augment.set_random_state(3)(stored)
    for a, b in zip(units, scaled, strict=True):
        torch.testing.assert_close((a["image"] + 1000) / 3000, b["image"], rtol=0, atol=2e-3)
        assert torch.equal(a["label"], b["label"])


def test_a_channel_that_a_site_lacks_stays_empty():
    samples = [{"image": torch.cat([one["image"], torch.zeros(1, 12, 10, 8)])} for one in volumes(8)]
    augmented = MonaiAugmentation("full", 3, ("image",)).set_random_state(1)(samples)
    assert all(bool((one["image"][1] == 0).all()) for one in augmented)
    pairs = zip(augmented, samples, strict=True)
    assert not any(torch.equal(a["image"][0], b["image"][0]) for a, b in pairs)


def test_a_flat_volume_is_turned_in_its_plane_alone():
    """A marker in one slice stays in it; in a cube it leaves it."""
    for size, stays in (((24, 24, 6), True), ((16, 16, 16), False)):
        image = torch.zeros(1, *size)
        image[..., 3] = 1
        augment = MonaiAugmentation("full", 3, ("image", "label"), mirrored=())
        label = (image > 0).to(torch.uint8)
        augmented = augment.set_random_state(0)([{"image": image, "label": label}] * 20)
        left = [bool(one["label"][..., [i for i in range(size[2]) if i != 3]].any()) for one in augmented]
        moved = [not torch.equal(one["label"], label) for one in augmented]
        assert any(moved)
        assert any(left) != stays


@pytest.mark.parametrize(
    ("classes", "plan", "expected"),
    [
        (("background", "tumour"), {}, (0, 1)),
        (("background", "tumour"), {"spatial_dims": 3}, (0, 1, 2)),
        (("background", "left_kidney", "right_kidney"), {"spatial_dims": 3}, ()),
        (("background", "Kidney Right"), {"spatial_dims": 3, "orientation": "ASR"}, (0, 1)),
        (("background", "Kidney Right"), {"orientation": "RAS"}, (1,)),
    ],
)
def test_where_classes_have_a_side_left_and_right_are_not_swapped(classes, plan, expected, tiny_config):
    config = tiny_config(augmentation="full", classes=classes, plan=Plan(**plan))
    task = make_task(config, normalised=False)
    assert task.mirrored == expected
    flips = task.augmentation().flips.transforms
    assert tuple(flip.flipper.spatial_axis for flip in flips) == expected


def test_own_segmentation_data_are_augmented_unless_asked_otherwise(make_site, phantom_dir, photo_config):
    root = make_site("A").parent
    make_site("B")
    chosen = {"methods": parse_methods("fedavg")}
    assert configure(find_sites(root), **chosen).augmentation == "full"
    assert configure(find_sites(root), **chosen, augmentation="none").augmentation == "none"
    assert configure(find_sites(phantom_dir), **chosen).augmentation == "none"
    assert photo_config().augmentation == "none"
    published = root.parent / "published"
    write_federation(published, OWN_DATA, root)
    assert configure(find_sites(published), **chosen).augmentation == "full"
    sites = [replace(site, benchmark="lgg_multisite") for site in find_sites(root)]
    assert configure(sites, **chosen).augmentation == "none"
