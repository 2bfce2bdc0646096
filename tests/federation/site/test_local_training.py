"""What protocols need of local training: steps, weight decay, augmentation."""

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sweeps import planned

from medfedaug.config.plan import Plan
from medfedaug.config.run import RunConfig
from medfedaug.federation import SiteTrainer
from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.methods.census import Census
from medfedaug.tasks import make_task


def trained(office: Path, **changes) -> dict[str, torch.Tensor]:
    runs = planned(office, "fedavg", seeds=1)
    config = replace(
        runs[0].config, task="classification", in_channels=3, classes=("bird", "tiger"), **changes
    )
    trainer = SiteTrainer(config, office / "amazon", "cpu")
    trainer.open("amazon")
    start = {key: value.clone() for key, value in trainer.network.state_dict().items()}
    trainer.train(1)
    return {**{f"start {k}": v for k, v in start.items()}, **trainer.network.state_dict()}


def same(a, b) -> bool:
    return all(torch.equal(a[key], b[key]) for key in a)


def test_steps_in_place_of_epochs(office):
    # Six images in batches of four: two steps an epoch.
    assert same(trained(office, local_steps=4), trained(office, local_epochs=2))
    assert same(trained(office, local_steps=2, local_epochs=7), trained(office, local_epochs=1))
    assert not same(trained(office, local_steps=3), trained(office, local_epochs=2))


def test_weight_decay_is_an_l2_term_of_the_gradient(office):
    plain, decayed = (trained(office, local_steps=1, weight_decay=w) for w in (0.0, 0.5))
    key = next(key for key in plain if key.endswith("weight") and not key.startswith("start"))
    expected = plain[key] - 0.01 * 0.5 * plain[f"start {key}"]
    torch.testing.assert_close(decayed[key], expected)


@pytest.mark.parametrize(
    ("dims", "orientation", "axis"),
    [(3, None, 0), (3, "RAS", 0), (3, "PLI", 1), (3, "ASR", 2), (2, "LAS", 0), (2, "AIL", None)],
)
def test_what_is_mirrored_is_the_axis_that_the_plan_turns_to_left_or_right(dims, orientation, axis):
    """Sagittal slices are those of the mirrored volume, too: of these none is mirrored."""
    plan = Plan(spatial_dims=dims, orientation=orientation)
    image = torch.rand(1, *[4] * dims)
    for name in ("flip", "flip_rotate"):
        task = make_task(RunConfig(augmentation=name, plan=plan), normalised=True)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            augment = task.augmentation()
        assert [f"augmentation {name} mirrors left and right" in str(w.message) for w in told] == (
            [True] if axis is None else []
        )
        augment.max_angle = 0.0
        augment.set_random_state(0)
        drawn = [augment([{"image": image, "label": image}])[0]["image"] for _ in range(8)]
        expected = [True, False] if axis is not None else [True]
        assert {torch.equal(x, image) for x in drawn} == {*expected}
        mirrored = image if axis is None else image.flip(axis + 1)
        assert all(torch.equal(x, image) or torch.equal(x, mirrored) for x in drawn)


@pytest.mark.parametrize(("task", "axis"), [("segmentation", 1), ("classification", 2)])
def test_left_and_right_are_exchanged(task, axis):
    augment = make_task(RunConfig(task=task, augmentation="flip"), normalised=True).augmentation()
    image = torch.rand(1, 4, 4)
    (out,) = augment([{"image": image, "label": image if task == "segmentation" else torch.tensor(1)}])
    assert torch.equal(out["image"], image.flip(axis) if augment.flips[0] else image)
    augment.set_random_state(0)
    drawn = [augment([{"image": image, "label": image}])[0]["image"] for _ in range(8)]
    assert {torch.equal(x, image) for x in drawn} == {True, False}
    assert make_task(RunConfig(task=task), normalised=True).augmentation() is None


@pytest.mark.parametrize(
    ("share", "weights", "count"), [(1.0, [3, 4], 7), (0.5, [3, 2], 5), (1e-9, [3, 4e-9], 3)]
)
def test_the_weight_of_a_case_without_outlines_is_a_part_of_its_samples(share, weights, count):
    """The patients behind the number of samples have these weights: with hardly any, nobody else counts."""
    training = object.__new__(LocalTraining)
    training.config = SimpleNamespace(unlabelled_weight=share)
    cases = [SimpleNamespace(annotated=None), SimpleNamespace(annotated=())]
    training.folder = SimpleNamespace(cases={"training": cases}, partial=True)
    samples = SimpleNamespace(by_case=lambda: [range(3), range(4)])
    assert training.weights_of_cases(samples) == pytest.approx(weights)
    assert training.count(samples) == count
    behind = Census(["A", "B"]).of_cases(training.weights_of_cases(samples))
    assert int(behind.number) == (1 if share < 0.01 else 2)
