"""Scores by class and surface against brute force in float64, and on their way into results.json."""

import itertools
import math

import numpy as np
import pytest
import torch
from monai.metrics import compute_hausdorff_distance, compute_surface_dice
from scipy.stats import t as student_t

from medfedaug.metrics.classification import ClassifiedImages
from medfedaug.metrics.label_maps import LabelMaps, voxel_edges
from medfedaug.metrics.registry import METRICS, metric_names, over_sites
from medfedaug.metrics.segmentation import LabelMapScores
from medfedaug.metrics.significance import mean_interval
from medfedaug.tasks import EvaluationCase, SegmentationTask
from medfedaug.tasks.classification import image_scores


class Nearest(torch.nn.Module):
    """Class k where the image is nearest to k: a network whose prediction is known."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x):
        return torch.cat([-((x - k) ** 2) for k in range(self.classes)], dim=1)


def surface(mask: np.ndarray) -> np.ndarray:
    """The voxels of a structure with a face on the outside, (N, D)."""
    found = []
    for index in np.argwhere(mask):
        for axis, step in itertools.product(range(mask.ndim), (-1, 1)):
            beside = index.copy()
            beside[axis] += step
            if not 0 <= beside[axis] < mask.shape[axis] or not mask[tuple(beside)]:
                found.append(index)
                break
    return np.array(found, np.float64)


def percentile(values: np.ndarray, share: float) -> float:
    ordered = np.sort(values)
    place = share * (len(ordered) - 1)
    low, part = int(place), place - int(place)
    return float(ordered[low] * (1 - part) + ordered[min(low + 1, len(ordered) - 1)] * part)


def by_hand(predicted: np.ndarray, truth: np.ndarray, edges, tolerance: float) -> tuple[float, float]:
    one, two = (surface(mask) * np.array(edges, np.float64) for mask in (predicted, truth))
    apart = np.sqrt(((one[:, None] - two[None]) ** 2).sum(-1))
    there, back = apart.min(1), apart.min(0)
    close = (there <= tolerance).sum() + (back <= tolerance).sum()
    return max(percentile(there, 0.95), percentile(back, 0.95)), close / (len(one) + len(two))


def surface_scores(predicted, truth, edges, tolerance):
    """HD95 and NSD of one structure, by the metrics themselves."""
    affine = torch.diag(torch.tensor([*edges, *[1.0] * (4 - len(edges))], dtype=torch.float64))
    masks = (predicted[None].long(), truth[None].long())
    maps = LabelMaps(*masks, ("background", "structure"), affine, tolerance)
    return tuple(METRICS[name].scores(maps).classes[0] for name in ("hd95", "nsd"))


def class_scores(logits, targets, classes, owners=()):
    return image_scores(
        ClassifiedImages(logits, targets, classes, owners=owners), metric_names("classification")
    )


def blob(shape, centre, radii) -> np.ndarray:
    grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"))
    offset = (grid - np.reshape(centre, (-1, *[1] * len(shape)))) / np.reshape(radii, (-1, *[1] * len(shape)))
    return (offset**2).sum(0) <= 1


@pytest.mark.parametrize(
    ("shape", "edges"),
    [((14, 12, 6), (1.0, 1.0, 1.0)), ((13, 9, 7), (0.7, 1.3, 5.0)), ((17, 11), (0.4, 2.5)), ((9, 8), (1, 1))],
)
def test_surfaces_are_those_of_brute_force(shape, edges):
    rng = np.random.default_rng(0)
    middle = np.array(shape) / 2
    for trial in range(6):
        truth = blob(shape, middle + rng.uniform(-1, 1, len(shape)), middle * rng.uniform(0.4, 0.8))
        predicted = blob(shape, middle + rng.uniform(-2, 2, len(shape)), middle * rng.uniform(0.3, 1.1))
        if trial > 2:  # scattered, as of an untrained network
            predicted = predicted ^ (rng.random(shape) < 0.1)
        for tolerance in (0.0, 1.0, 2.5):
            expected = by_hand(predicted, truth, edges, tolerance)
            found = surface_scores(torch.tensor(predicted), torch.tensor(truth), edges, tolerance)
            assert found == pytest.approx(expected, rel=1e-6)
            one, two = (torch.tensor(mask)[None, None].float() for mask in (predicted, truth))
            theirs = {"include_background": True, "spacing": edges}
            hausdorff = compute_hausdorff_distance(one, two, percentile=95, **theirs)
            assert found[0] == pytest.approx(float(hausdorff), rel=1e-5)
            assert found[1] == pytest.approx(float(compute_surface_dice(one, two, [tolerance], **theirs)))


def test_without_truth_there_is_no_score_and_what_was_missed_has_no_distance():
    some, none = torch.ones(4, 4, 2, dtype=torch.bool), torch.zeros(4, 4, 2, dtype=torch.bool)
    assert surface_scores(some, none, (1, 1, 1), 1) == (None, None)
    assert surface_scores(none, none, (1, 1, 1), 1) == (None, None)
    assert surface_scores(none, some, (1, 1, 1), 1) == (None, 0.0)
    assert surface_scores(some, some, (1, 1, 1), 0) == (0.0, 1.0)


def test_edges_of_an_oblique_voxel():
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    affine = np.eye(4)
    affine[:3, :3] = turn @ np.diag([0.5, 0.75, 6.0])
    assert voxel_edges(torch.tensor(affine)) == pytest.approx((0.5, 0.75, 6.0))
    assert voxel_edges(None) == (1.0, 1.0, 1.0)


def label_cases(classes: int = 3) -> list[EvaluationCase]:
    """Four volumes, image as predicted: whole, without class 2, with class 2 missed, without foreground."""
    rng = np.random.default_rng(1)
    affine = torch.diag(torch.tensor([0.8, 0.8, 4.0, 1.0], dtype=torch.float64))
    cases = []
    for index in range(4):
        truth = np.zeros((18, 16, 6), np.uint8)
        for k in range(1, classes):
            truth[blob(truth.shape, (5 * k, 8, 3), rng.uniform(1.5, 4, 3))] = k
        seen = np.roll(truth, 1, axis=0)
        if index == 1:
            truth[truth == 2] = 0
        if index == 2:
            seen[seen == 2] = 0
        if index == 3:
            truth[:] = 0
        image, label = torch.tensor(seen)[None].float(), torch.tensor(truth)[None]
        cases.append(EvaluationCase(f"p{index}", image, label, affine))
    return cases


def test_scores_by_class_are_means_over_the_cases_that_have_them():
    cases = label_cases()
    task = SegmentationTask(3, classes=("background", "edema", "core"), surface_tolerance=1.5)
    plain = task.evaluate(Nearest(3), cases, lambda data: data)
    scores = task.evaluate(Nearest(3), cases, lambda data: data, full=True)
    assert plain == {key: scores[key] for key in ("dice", "cases")}
    values: dict[str, dict[str, list[float]]] = {
        name: {"dice": [], "hd95": [], "nsd": []} for name in ("edema", "core")
    }
    by_case: dict[str, dict[str, list[float]]] = {name: {} for name in ("dice", "hd95", "nsd")}
    for case in cases:
        for k, name in enumerate(("edema", "core"), start=1):
            p, t = case.image[0].numpy() == k, case.label[0].numpy() == k
            if not t.any():
                continue
            found = {"dice": 2 * (p & t).sum() / (p.sum() + t.sum()), "nsd": 0.0}
            if p.any():
                found["hd95"], found["nsd"] = by_hand(p, t, (0.8, 0.8, 4.0), 1.5)
            for metric, value in found.items():
                values[name][metric].append(value)
                by_case[metric].setdefault(case.name, []).append(value)
    assert [len(values["core"][m]) for m in ("dice", "hd95", "nsd")] == [2, 1, 2]
    for name, missed in (("edema", 0), ("core", 1)):
        expected = {metric: np.mean(found) for metric, found in values[name].items()}
        for metric, found in values[name].items():
            if len(found) > 1:
                half = student_t.ppf(0.975, len(found) - 1) * np.std(found, ddof=1) / np.sqrt(len(found))
                largest = np.inf if metric == "hd95" else 1
                expected[f"{metric}_low"] = max(0, expected[metric] - half)
                expected[f"{metric}_high"] = min(largest, expected[metric] + half)
        expected["missed"] = missed
        entry = {key: scores["classes"][name].get(key) for key in expected}  # without those of other metrics
        assert entry == pytest.approx(expected)
    for metric, found in by_case.items():
        expected = {case.name: np.mean(found[case.name]) if case.name in found else None for case in cases}
        assert (scores["cases"] if metric == "dice" else scores["case_metrics"][metric]) == pytest.approx(
            expected
        )
        assert scores[metric] == pytest.approx(np.mean([v for v in expected.values() if v is not None]))
    assert (scores["missed"], scores["unit"]) == (1, "mm")


def test_predicted_volumes_are_relative_to_what_is_outlined():
    cases = label_cases()
    task = SegmentationTask(3, classes=("background", "edema", "core"))
    scores = task.evaluate(Nearest(3), cases, lambda data: data, full=True)
    predicted, outlined = (
        sum(int((volume == 2).sum()) for volume in volumes)
        for volumes in zip(*((case.image, case.label) for case in cases), strict=True)
    )
    assert scores["classes"]["core"]["volume_ratio"] == pytest.approx(predicted / outlined)


def test_an_image_of_one_slice_has_the_surface_of_its_plane():
    """Taken for a volume, every pixel of it would be surface."""
    truth, seen = np.zeros((2, 20, 24, 1), np.uint8)
    truth[4:14, 5:16], seen[6:14, 5:19] = 1, 1
    task = SegmentationTask(2, surface_tolerance=1.0)
    case = EvaluationCase("a", torch.tensor(seen)[None].float(), torch.tensor(truth)[None])
    scores = task.evaluate(Nearest(2), [case], lambda data: data, full=True)
    expected = by_hand(seen[..., 0] > 0, truth[..., 0] > 0, (1, 1), 1.0)
    assert (scores["hd95"], scores["nsd"]) == pytest.approx(expected)
    assert scores["nsd"] < 1
    assert scores["unit"] == "px"
    scaled = EvaluationCase("b", case.image, case.label, torch.diag(torch.tensor([0.5, 0.5, 9.0, 1.0])))
    found = task.evaluate(Nearest(2), [scaled], lambda data: data, full=True)
    assert (found["hd95"], found["unit"]) == (pytest.approx(expected[0] / 2), "mm")
    both = task.evaluate(Nearest(2), [case, scaled], lambda data: data, full=True)
    assert (both["hd95"], both["unit"], both["classes"]["1"]["hd95"]) == (None, "mixed", None)


def test_auc_and_balanced_accuracy_are_means_over_the_classes_that_are_there():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 4, generator=generator)
    logits[:10] = logits[10:20]  # ties
    targets = torch.randint(0, 3, (40,), generator=generator)  # nobody has class 3
    shares = logits.double().softmax(dim=1).numpy()
    recalls, areas = [], []
    for k in range(3):
        own = targets.numpy() == k
        recalls.append((shares[own].argmax(1) == k).mean())
        wins = [float(a > b) + 0.5 * (a == b) for a in shares[own, k] for b in shares[~own, k]]
        areas.append(np.mean(wins))
    found = class_scores(logits, targets, "abcd")
    assert found["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    assert found["auc"] == pytest.approx(np.mean(areas))
    assert [found["classes"][name]["accuracy"] for name in "abc"] == pytest.approx(recalls)
    assert [found["classes"][name]["auc"] for name in "abc"] == pytest.approx(areas)
    assert found["classes"]["d"] == {"accuracy": None, "auc": None}
    alone = class_scores(logits[:5], torch.ones(5, dtype=torch.long), "abcd")
    assert alone["auc"] is None
    assert alone["balanced_accuracy"] == alone["classes"]["b"]["accuracy"]
    assert (
        "accuracy_low"
        not in class_scores(logits[:1], torch.ones(1, dtype=torch.long), "abcd")["classes"]["b"]
    )


def test_the_images_of_a_confident_network_have_ranks():
    """Class 0 is ahead everywhere, by more where it is the truth."""
    logits = torch.tensor([[30.0, 0.0], [25.0, 0.0], [20.0, 0.0], [18.0, 0.0]])
    found = class_scores(logits, torch.tensor([0, 0, 1, 1]), ["a", "b"])
    assert [found["classes"][name]["auc"] for name in "ab"] == [1.0, 1.0]


def test_intervals_of_classes_are_over_patients():
    """Two thirds of all images are right; those of a patient are alike."""
    hits, owners = torch.tensor([1, 1, 1, 0, 0, 1, 1, 1, 0]), list("aaabbcccd")
    logits = torch.stack([1.0 - hits, hits.float()], dim=1)
    ones = torch.ones(9, dtype=torch.long)
    found = class_scores(logits, ones, "xy", owners)["classes"]["y"]
    mean = 6 / 9
    sums = [3 * (1 - mean), -2 * mean, 3 * (1 - mean), -mean]
    half = student_t.ppf(0.975, 3) * np.sqrt(4 / 3 * np.sum(np.square(sums))) / 9
    expected = (max(0, mean - half), min(1, mean + half))
    assert (found["accuracy_low"], found["accuracy_high"]) == pytest.approx(expected)
    assert "accuracy_low" not in class_scores(logits, ones, "xy", ["a"] * 9)["classes"]["y"]
    generator = np.random.default_rng(0)
    scores, several = generator.random(12), np.repeat(range(6), 2)
    means = scores.reshape(6, 2).mean(axis=1)
    assert mean_interval(scores.tolist(), patients=several.tolist()) == pytest.approx(
        mean_interval(means.tolist())
    )
    scorer = LabelMapScores(("background", "core"), 1.0, metric_names("segmentation"), full=True)
    truth = torch.zeros(1, 24, 6, 3)
    truth[:, 2:18] = 1
    dice = []
    for shift, owner in zip((0, 1, 4, 5, 2, 3), "aabbcc", strict=True):
        said = truth.roll(shift, dims=1)
        scorer.add(f"{shift}", said, truth, None, owner)
        dice.append(float(2 * (said * truth).sum() / (said.sum() + truth.sum())))
    core = scorer.result()["classes"]["core"]
    expected = mean_interval(dice, 1.0, patients="aabbcc")
    assert (core["dice_low"], core["dice_high"]) == pytest.approx(expected)
    assert expected[0] < mean_interval(dice, 1.0)[0] - 0.05


def test_worst_site_and_disparity():
    sites = {
        "A": {"dice": 0.5, "hd95": 9.0, "unit": "mm"},
        "B": {"dice": 0.8, "hd95": 4.0, "unit": "mm"},
        "C": {"dice": 0.2, "hd95": None, "unit": "px"},
    }
    found = over_sites(sites, ["dice", "hd95"])
    assert found["mean"] == pytest.approx({"dice": 0.5, "hd95": 6.5})
    assert found["worst"] == {"dice": {"site": "C", "value": 0.2}, "hd95": {"site": "A", "value": 9.0}}
    spread = math.sqrt((0.0**2 + 0.3**2 + 0.3**2) / 3)
    assert found["disparity"]["dice"] == pytest.approx({"std": spread, "range": 0.6})
    assert found["disparity"]["hd95"] == pytest.approx({"std": 2.5, "range": 5.0})
    sites["C"]["hd95"] = 3.0  # pixels, which have no mean with millimetres
    assert over_sites(sites, ["hd95"]) == {
        "mean": {"hd95": None},
        "worst": {"hd95": None},
        "disparity": {"hd95": None},
    }
    assert over_sites({"A": sites["A"]}, ["dice"])["disparity"] == {"dice": None}
