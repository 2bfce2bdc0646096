"""Losses by name and class path, and the learning rate over the rounds."""

import math

import pytest
import torch
from monai.losses import DiceCELoss, HausdorffDTLoss
from torch import nn

from medfedaug.errors import ConfigError
from medfedaug.federation.in_process import run_in_process
from medfedaug.federation.site.local_training import LocalTraining
from medfedaug.tasks.losses import _LOSSES, build_loss

SITES = ["site_A", "site_B"]
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(3, 3, 4, 5, generator=GENERATOR)
LABELS = torch.randint(3, (3, 1, 4, 5), generator=GENERATOR)


def softmax_and_truth():
    """(K, pixels of the whole batch) each, float64."""
    probabilities = LOGITS.double().softmax(1).transpose(0, 1).flatten(1)
    truth = nn.functional.one_hot(LABELS[:, 0], 3).permute(3, 0, 1, 2).flatten(1).double()
    return probabilities, truth


def test_the_default_is_what_it_always_was_to_the_bit():
    for targets, one_hot in ((LABELS, True), (LABELS.new_zeros(3, 3, 4, 5).float() + 1 / 3, False)):
        before = DiceCELoss(include_background=False, to_onehot_y=one_hot, softmax=True, batch=True)
        assert torch.equal(build_loss("segmentation", 3)(LOGITS, targets), before(LOGITS, targets))
    outputs, classes = LOGITS[:, :, 0, 0], LABELS[:, 0, 0, 0]
    for targets in (classes, nn.functional.one_hot(classes, 3).float()):
        expected = nn.CrossEntropyLoss()(outputs, targets)
        assert torch.equal(build_loss("classification", 3)(outputs, targets), expected)


def test_losses_by_name_are_their_equations():
    p, g = softmax_and_truth()
    eps = 1e-5
    dice = 1 - (2 * (p * g).sum(1) + eps) / (p.sum(1) + g.sum(1) + eps)
    hits, false, missed = (p * g).sum(1), (p * (1 - g)).sum(1), ((1 - p) * g).sum(1)
    tversky = 1 - (hits + eps) / (hits + 0.3 * false + 0.7 * missed + eps)
    entropy = -(g * p.log()).sum(0)
    focal = (-((1 - p) ** 2) * p.log() * g).mean()
    # MONAI's focal term beside Dice is over sigmoids.
    s = LOGITS.double().sigmoid().transpose(0, 1).flatten(1)
    right = g * s + (1 - g) * (1 - s)
    each_class_for_itself = (-((1 - right) ** 2) * right.log()).mean()
    expected = {
        ("dice", ()): dice[1:].mean(),  # of the classes that are scored
        ("tversky", (("alpha", 0.3), ("beta", 0.7))): tversky[1:].mean(),
        ("cross_entropy", ()): entropy.mean(),
        ("focal", (("gamma", 2.0),)): focal,
        ("dice_focal", ()): dice.mean() + each_class_for_itself,
        ("dice_ce", (("lambda_ce", 0.5),)): dice[1:].mean() + 0.5 * entropy.mean(),
    }
    for (name, args), value in expected.items():
        loss = build_loss("segmentation", 3, name, dict(args))
        assert float(loss(LOGITS.double(), LABELS)) == pytest.approx(float(value), rel=1e-4), name
    weights = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    w = weights @ g
    loss = build_loss("segmentation", 3, "cross_entropy", {"weight": weights.tolist()})
    assert float(loss(LOGITS, LABELS)) == pytest.approx(float((w * entropy).sum() / w.sum()), rel=1e-4)


@pytest.mark.parametrize("name", [*_LOSSES["segmentation"], "monai.losses.GeneralizedDiceFocalLoss"])
def test_probabilities_that_are_labels_give_the_same(name):
    loss = build_loss("segmentation", 3, name)
    whole = nn.functional.one_hot(LABELS[:, 0], 3).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(loss(LOGITS, whole), loss(LOGITS, LABELS))


def test_focal_for_classification():
    outputs, classes = LOGITS[:, :, 0, 0], LABELS[:, 0, 0, 0]
    p = outputs.double().softmax(1).gather(1, classes[:, None])[:, 0]
    loss = build_loss("classification", 3, "focal", {"gamma": 2.0})
    expected = -((1 - p) ** 2 * p.log()).sum() / 9  # the mean over images and classes
    assert float(loss(outputs, classes)) == pytest.approx(float(expected), rel=1e-4)
    soft = nn.functional.one_hot(classes, 3).float()
    torch.testing.assert_close(loss(outputs, soft), loss(outputs, classes))


def test_a_class_path_has_monais_own_defaults():
    ours = build_loss("segmentation", 3, "monai.losses.HausdorffDTLoss")
    theirs = HausdorffDTLoss(to_onehot_y=True, softmax=True)
    assert torch.equal(ours(LOGITS, LABELS), theirs(LOGITS, LABELS))
    assert not ours.takes_probabilities


@pytest.mark.parametrize(
    ("task", "name", "args", "words"),
    [
        ("segmentation", "dise", {}, "loss dise: is not known for segmentation; choose from dice_ce, dice, "),
        ("classification", "dice", {}, "is not known for classification; choose from cross_entropy, focal"),
        ("classification", "monai.losses.DiceLoss", {}, "is not known for classification"),
        ("segmentation", "os.system", {}, "monai.losses has no loss of the name"),
        ("segmentation", "monai.losses.dice.DiceLoss", {}, "monai.losses has no loss of the name"),
        ("segmentation", "monai.losses.DiceLos", {}, "monai.losses has no loss of the name DiceLos"),
        ("segmentation", "monai.losses.PerceptualLoss", {}, "for label maps by class path"),
        ("segmentation", "dice", {"alpha": 1}, "unexpected keyword argument 'alpha'"),
        ("segmentation", "dice", {"to_onehot_y": False}, "multiple values for .* 'to_onehot_y'"),
        ("segmentation", "dice", {"reduction": "none"}, r"gives \(.*\), expected one number"),
        ("segmentation", "cross_entropy", {"weight": [1, 2]}, "loss cross_entropy: weight tensor should be"),
        ("segmentation", "dice", {"cache_path": "x"}, "cache_path: weights are neither read from a file"),
    ],
)
def test_a_loss_that_cannot_be_used_is_named_in_one_line(task, name, args, words):
    with pytest.raises(ConfigError, match=words) as caught:
        build_loss(task, 3, name, args)
    assert "\n" not in str(caught.value)


@pytest.mark.all_layers
@pytest.mark.parametrize("schedule", ["poly", "cosine"])
def test_the_learning_rate_follows_the_rounds(phantom_dir, tiny_config, monkeypatch, schedule):
    rates, make = [], LocalTraining.optimiser

    def optimiser(self, parameters, round_):
        made = make(self, parameters, round_)
        rates.append(made.param_groups[0]["lr"])
        return made

    monkeypatch.setattr(LocalTraining, "optimiser", optimiser)
    options = {"rounds": 4, "learning_rate": 0.5, "optimizer": "sgd", "schedule": schedule, "limit": 1}
    config = tiny_config("fedavg,finetune", **options, settings={"finetune": {"epochs": 1}})
    whole = run_in_process(config, phantom_dir, SITES, "cpu")
    expected = {
        "poly": [0.5 * (share / 4) ** 0.9 for share in (4, 3, 2, 1)],
        "cosine": [0.5 * (1 + math.cos(math.pi * done / 4)) / 2 for done in range(4)],
    }[schedule]
    # Both sites, and then the training before the test, as if in a round after the selected one.
    assert rates[:8] == pytest.approx([rate for rate in expected for _ in SITES])
    assert rates[8:] == pytest.approx([expected[min(whole.selected_round, 3)]] * 2)
