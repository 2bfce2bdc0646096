"""Segmentation: which slices train, what the loss is, and Dice per patient, against NumPy in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from medfedaug.config.run import RunConfig
from medfedaug.data.sites import open_site
from medfedaug.errors import DataError
from medfedaug.federation import SiteTrainer
from medfedaug.federation.site.samples import TrainingSamples
from medfedaug.tasks import EvaluationCase, SegmentationTask, make_task


class Threshold(nn.Module):
    """Class k where the image is nearest to k: a network whose prediction is known."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes
        self.sizes: set[tuple[int, ...]] = set()

    def forward(self, x):
        self.sizes.add(tuple(x.shape[2:]))
        return torch.cat([-((x - k) ** 2) for k in range(self.classes)], dim=1)


def dice(predicted: np.ndarray, truth: np.ndarray, classes: int) -> float:
    scores = []
    for k in range(1, classes):
        p, t = predicted == k, truth == k
        if t.any():
            scores.append(2 * np.logical_and(p, t).sum() / (p.sum() + t.sum()))
    return float(np.mean(scores))


def test_training_takes_the_slices_with_foreground(make_site):
    site = open_site(make_site("A", cases=(2, 1, 1)))
    task = SegmentationTask(2)
    samples = TrainingSamples.of(task, site, site.cases["training"])
    expected = []
    for case in site.cases["training"]:
        image, label = site.load_case(case)
        expected += [(image[..., z], label[..., z]) for z in range(4) if bool(label[..., z].any())]
    assert len(samples) == len(expected) == 4
    for sample, (image, label) in zip(samples, expected, strict=True):
        assert torch.equal(sample["image"], image)
        assert torch.equal(sample["label"], label)
        # Kept are the two slices of each volume, and not the volume.
        assert sample["image"].untyped_storage().nbytes() == 2 * 16 * 16 * 4


def test_no_foreground_at_all_is_an_error(make_site):
    from benchmark_files import write_volume

    folder = make_site("A", cases=(1, 1, 1))
    write_volume(folder / "labels/0.nii.gz", np.zeros((16, 16, 4), np.uint8))
    trainer = SiteTrainer(RunConfig(), folder, "cpu")
    trainer.open("A")
    with pytest.raises(DataError, match=r"site A.*no training slice"):
        trainer.prepare()


def test_dice_is_per_patient_volume_without_background():
    rng = np.random.default_rng(0)
    size, classes, cases = (30, 17), 3, []
    for index in range(3):
        truth = rng.integers(0, classes, (*size, 5))
        seen = np.where(rng.random(truth.shape) < 0.7, truth, rng.integers(0, classes, truth.shape))
        if index == 1:
            truth[truth == classes - 1] = 0  # a patient without one of the classes
        image, label = torch.tensor(seen)[None].float(), torch.tensor(truth)[None].to(torch.uint8)
        cases.append(EvaluationCase(str(index), image, label))
    task, network = SegmentationTask(classes), Threshold(classes)
    scores = task.evaluate(network, cases, lambda data: data, batch_size=2)
    expected = {
        case.name: dice(case.image[0].numpy(), case.label[0].numpy(), classes)
        if bool(case.label.any())
        else None
        for case in cases
    }
    assert scores["cases"] == pytest.approx(expected)
    known = [value for value in expected.values() if value is not None]
    assert scores["dice"] == pytest.approx(np.mean(known))
    assert all(n % 16 == 0 for shape in network.sizes for n in shape)


def test_collate_pads_to_what_the_network_takes():
    def sample(*size):
        return {"image": torch.ones(1, *size), "label": torch.ones(1, *size, dtype=torch.uint8)}

    task = SegmentationTask(2)
    for sizes, expected in (
        ([(32, 32), (32, 32)], (32, 32)),
        ([(30, 17)], (32, 32)),
        ([(16, 32), (32, 16)], (32, 32)),
        ([(20, 20), (50, 20)], (64, 32)),
    ):
        batch = task.collate([sample(*size) for size in sizes])
        assert tuple(batch["image"].shape) == (len(sizes), 1, *expected)
        assert batch["label"].shape == batch["image"].shape
        assert float(batch["image"].sum()) == float(batch["label"].sum()) == sum(a * b for a, b in sizes)
        assert type(batch["image"]) is torch.Tensor


def test_by_method_plain_images_are_scaled_and_normalised_ones_are_left_to_the_method():
    by_method = RunConfig(intensity="by_method")
    assert make_task(by_method, normalised=False).intensity == "scale"
    assert make_task(by_method, normalised=True).intensity == "raw"


@pytest.mark.parametrize("intensity", ["raw", "scale"])
@pytest.mark.parametrize("normalised", [False, True])
def test_one_word_means_the_same_for_every_method(intensity, normalised):
    assert make_task(RunConfig(intensity=intensity), normalised=normalised).intensity == intensity


def test_slices_are_resized_for_the_network_and_back():
    """Scored on the volume's own grid: blocks larger than a pixel of the network survive the way."""
    task, network = SegmentationTask(2, image_size=16), Threshold(2)
    truth = torch.zeros(1, 32, 48, 3)
    truth[:, 8:24, 12:36, :2] = 1.0
    predicted = task.logits(network, truth, batch_size=2).argmax(dim=0, keepdim=True)
    assert network.sizes == {(16, 16)}
    assert predicted.shape == truth.shape
    wrong = (predicted != truth).float()
    assert (
        0 < wrong.mean() < 0.01
    )  # at the edges, where a pixel of the network is half one and half the other
    case = EvaluationCase("a", truth, truth.to(torch.uint8))
    scores = task.evaluate(network, [case], lambda d: d)
    assert scores["dice"] == pytest.approx(dice(predicted.numpy(), truth.numpy(), 2))


def test_what_methods_do_to_an_image_they_do_at_the_networks_size_in_evaluation_too():
    task, network, seen = SegmentationTask(2, image_size=16), Threshold(2), []

    def transform(sample):
        seen.append(tuple(sample["image"].shape))
        return sample

    truth = torch.zeros(1, 32, 48, 3)
    truth[:, 8:24, 12:36] = 1.0
    case = EvaluationCase("a", truth, truth.to(torch.uint8))
    ((_, predicted),) = task.outputs(network, [case], transform)
    assert torch.equal(predicted, task.logits(network, truth).argmax(dim=0, keepdim=True))
    assert torch.equal(task.predict_case(network, case, transform).label, predicted)
    assert seen == [(1, 16, 16, 3)] * 2


def test_training_slices_have_the_chosen_size(make_site):
    site = open_site(make_site("A", cases=(2, 1, 1)))
    task = make_task(RunConfig(image_size=8, intensity="raw"), normalised=True)
    whole, small = (TrainingSamples.of(t, site, site.cases["training"]) for t in (SegmentationTask(2), task))
    for before, after in zip(whole, small, strict=True):
        assert after["image"].shape == after["label"].shape == (1, 8, 8)
        assert after["label"].dtype == torch.uint8
        assert set(after["label"].unique().tolist()) <= set(before["label"].unique().tolist())
        # Shrinking averages: the mean stays, where picking every second pixel would keep the noise.
        assert float(after["image"].mean()) == pytest.approx(float(before["image"].mean()), rel=0.01)
        assert after["image"].std() < 0.6 * before["image"].std()
