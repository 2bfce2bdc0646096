"""Marginal and exclusion loss against their equations in float64, three classes, 2D and 3D."""

import math

import pytest
import torch
from monai.networks.nets import DynUNet

from medfedaug.data.annotation import Annotation
from medfedaug.errors import ConfigError
from medfedaug.models.supervision import DeepSupervision, head_weights
from medfedaug.tasks.losses import _LOSSES, build_loss
from medfedaug.tasks.partial_loss import PartialLoss, exclusion_loss, merged_logits

ALL, FIRST, SECOND, NONE = (True,) * 3, (True, True, False), (True, False, True), (True, False, False)
CODE = Annotation.of(3, [FIRST, SECOND, NONE], has_unknown=False)
WITH_UNKNOWN = Annotation.of(3, [FIRST, SECOND, NONE])
GENERATOR = torch.Generator().manual_seed(0)
SHAPES = ((5, 6), (3, 4, 5))
EPS = 1e-5  # MONAI's smoothing


def batch(shape, sets, unknown=False):
    """Logits, float64, label maps of the classes that each case has annotated, and their code."""
    logits = torch.randn(len(sets), 3, *shape, generator=GENERATOR, dtype=torch.float64)
    labels = torch.randint(3, (len(sets), 1, *shape), generator=GENERATOR)
    for label, chosen in zip(labels, sets, strict=True):
        label[~torch.tensor(chosen)[label]] = 0
    coded = labels.clone()
    if unknown:
        coded[torch.rand(labels.shape, generator=GENERATOR) < 0.3] = 3
    code = WITH_UNKNOWN if unknown else CODE
    return (
        logits,
        labels,
        torch.stack([code.encode(label, chosen) for label, chosen in zip(coded, sets, strict=True)]),
    )


def reference(logits, labels, sets, known=None):
    """Dice plus cross-entropy, voxel by voxel, of the probabilities that Shi et al. merge."""
    hits, sizes, total, count = [0.0] * 3, [0.0] * 3, 0.0, 0
    known = torch.ones_like(labels, dtype=torch.bool) if known is None else known
    for b, chosen in enumerate(sets):
        voxels = logits[b].flatten(1).T.tolist()
        for x, y, seen in zip(voxels, labels[b].flatten().tolist(), known[b].flatten().tolist(), strict=True):
            if not seen:
                continue
            powers = [math.exp(v) for v in x]
            p = [v / sum(powers) for v in powers]
            q = [p[0] + sum(p[n] for n in (1, 2) if not chosen[n]), *(p[n] * chosen[n] for n in (1, 2))]
            total, count = total - math.log(q[y]), count + 1
            for n in (1, 2):
                hits[n] += q[n] * (y == n)
                sizes[n] += q[n] + (y == n)
    there = [n for n in (1, 2) if any(chosen[n] for chosen in sets)] or [1, 2]
    dice = [1 - (2 * hits[n] + EPS) / (sizes[n] + EPS) for n in there]
    return sum(dice) / len(there) + total / count


@pytest.mark.parametrize("shape", SHAPES)
def test_marginal_loss_is_its_equation_case_by_case(shape):
    for sets in ([FIRST], [ALL, FIRST, SECOND], [FIRST, NONE]):
        logits, labels, coded = batch(shape, sets)
        loss = PartialLoss(build_loss("segmentation", 3), CODE)
        assert float(loss(logits, coded)) == pytest.approx(reference(logits, labels, sets), rel=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_unknown_voxels_are_neither_learned_nor_counted(shape):
    sets = [ALL, FIRST]
    logits, labels, coded = batch(shape, sets, unknown=True)
    known = WITH_UNKNOWN.decode(coded).known
    loss = PartialLoss(build_loss("segmentation", 3), WITH_UNKNOWN)
    found = loss(logits.requires_grad_(), coded)
    assert found.item() == pytest.approx(reference(logits.detach(), labels, sets, known), rel=1e-9)
    found.backward()
    assert not logits.grad[(~known).expand_as(logits)].any()
    assert logits.grad.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_exclusion_loss_is_its_equation(shape):
    sets = [ALL, FIRST, SECOND, NONE]
    logits, labels, coded = batch(shape, sets)
    p, terms = logits.softmax(1), []
    for n in (1, 2):
        cases = [b for b, chosen in enumerate(sets) if not chosen[n] and any(chosen[1:])]
        own = torch.cat([p[b, n].flatten() for b in cases])
        excluded = torch.cat([(labels[b] > 0).flatten() for b in cases]).double()
        dice = 2 * (own * excluded).sum() / (own + excluded).sum()
        terms.append(float(dice + (excluded * (own + 1).log()).mean()))
    annotated = torch.tensor(sets)
    assert float(exclusion_loss(logits, labels, annotated)) == pytest.approx(sum(terms) / 2, rel=1e-9)
    plain, beside = (
        PartialLoss(build_loss("segmentation", 3), CODE, kind) for kind in ("marginal", "exclusion")
    )
    assert float(beside(logits, coded) - plain(logits, coded)) == pytest.approx(sum(terms) / 2, rel=1e-9)


def test_every_loss_leaves_what_is_not_annotated_to_the_network():
    """Whatever the share between the background and a class that is merged with it, the loss is the same."""
    logits, labels, coded = batch((6, 6), [FIRST, NONE])
    moved = logits.clone()
    both = logits[0, [0, 2]].logsumexp(dim=0)
    moved[0, 0], moved[0, 2] = both + math.log(0.2), both + math.log(0.8)
    with_unlabelled = torch.stack(
        [WITH_UNKNOWN.encode(labels[0], FIRST), WITH_UNKNOWN.encode(torch.full_like(labels[1], 3), NONE)]
    )
    for name in _LOSSES["segmentation"]:
        for code, targets, count in ((CODE, coded[:1], 1), (WITH_UNKNOWN, with_unlabelled, 2)):
            loss = PartialLoss(build_loss("segmentation", 3, name), code)
            given = logits[:count].clone().requires_grad_()
            found = loss(given, targets)
            assert torch.allclose(found, loss(moved[:count], targets), atol=1e-6), name
            found.backward()
            assert given.grad.isfinite().all(), name
            assert given.grad[0].any(), name
            assert not given.grad[1:].any(), name


def test_complete_cases_have_the_loss_of_old():
    logits, labels, coded = batch((5, 6), [ALL, ALL])
    assert torch.equal(coded, labels.to(coded.dtype))
    for name in _LOSSES["segmentation"]:
        plain = build_loss("segmentation", 3, name)
        assert torch.allclose(PartialLoss(plain, CODE)(logits, coded), plain(logits, labels), rtol=1e-12), (
            name
        )


def test_without_any_known_voxel_nothing_is_learned():
    logits = torch.randn(1, 3, 4, 4, requires_grad=True)
    coded = WITH_UNKNOWN.encode(torch.full((1, 1, 4, 4), 3), NONE)
    loss = PartialLoss(build_loss("segmentation", 3), WITH_UNKNOWN)(logits, coded)
    loss.backward()
    assert float(loss.detach()) == 0
    assert not logits.grad.any()


def test_none_takes_for_background_what_is_not_annotated():
    logits, labels, coded = batch((5, 6), [FIRST, NONE])
    plain = build_loss("segmentation", 3)
    assert torch.equal(PartialLoss(plain, CODE, "none")(logits, coded), plain(logits, labels))


@pytest.mark.parametrize("args", [{"sigmoid": True}, {"label_smoothing": 0.1}])
def test_a_loss_that_cannot_leave_a_class_out_is_refused(args):
    name = "cross_entropy" if "label_smoothing" in args else "dice_ce"
    with pytest.raises(ConfigError, match=f"loss {name}: .*annotated everywhere"):
        PartialLoss(build_loss("segmentation", 3, name, args), CODE)
    with pytest.raises(ConfigError, match="distances between voxels"):
        PartialLoss(build_loss("segmentation", 3, "monai.losses.HausdorffDTLoss"), CODE)


def test_deep_supervision_has_it_at_every_head():
    net = DynUNet(2, 1, 3, (3, 3, 3, 3), (1, 2, 2, 2), (2, 2, 2), deep_supervision=True, deep_supr_num=2)
    supervision = DeepSupervision(net)
    loss = PartialLoss(build_loss("segmentation", 3), CODE)
    _, _, coded = batch((16, 16), [FIRST, SECOND])
    outputs = net.train()(torch.randn(2, 1, 16, 16))
    total = supervision.criterion(loss)(outputs, coded)
    heads = [outputs, *supervision._coarser[outputs]]
    expected = sum(
        weight
        * loss(head, torch.nn.functional.interpolate(coded.float(), head.shape[2:], mode="nearest-exact"))
        for weight, head in zip(head_weights(len(heads)), heads, strict=True)
    )
    assert torch.allclose(total, expected)


def test_merged_logits_of_half_precision_are_finite():
    logits = torch.full((1, 3, 2, 2), 300.0, dtype=torch.bfloat16)
    shares = merged_logits(logits, torch.tensor([NONE])).softmax(1)
    assert shares[:, 0].eq(1).all()
    assert shares.isfinite().all()
