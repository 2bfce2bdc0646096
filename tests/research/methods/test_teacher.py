"""Pseudo-labels of a mean teacher against their equation in float64; the teacher follows the weights."""

import math
from types import SimpleNamespace

import pytest
import torch
from open_classes import ALL, FIRST, GENERATOR, NONE, SHAPES, batch, softmax, voxels

from medfedaug.research.methods.teacher import Teacher, TeacherSite, confident_entropy, possible_classes


@pytest.mark.parametrize("shape", SHAPES)
def test_confident_entropy_is_its_equation(shape):
    sets = [FIRST, ALL, NONE]
    student, teacher, labels, annotated = batch(shape, sets)
    known = torch.rand(labels.shape, generator=GENERATOR) < 0.7
    labels = labels * known
    possible = possible_classes(labels, known, annotated)
    total, count = 0.0, 0
    for b, chosen in enumerate(sets):
        for z, w, (y,), (seen,), allowed in voxels(student[b], teacher[b], labels[b], known[b], possible[b]):
            expected = [not seen or (n == y if y else n == 0 or not chosen[n]) for n in range(3)]
            assert allowed == expected
            if sum(allowed) == 1:
                continue
            count += 1
            own, theirs = (
                softmax([v if a else -math.inf for v, a in zip(x, allowed, strict=True)]) for x in (z, w)
            )
            best = theirs.index(max(theirs))
            total -= math.log(own[best]) * (theirs[best] >= 0.6)
    result = confident_entropy(student, teacher, possible, 0.6)
    assert result.item() == pytest.approx(total / count, rel=1e-6)
    assert confident_entropy(student, teacher, possible, 1.01) == 0


def test_the_teacher_is_the_moving_average_of_the_trained_weights():
    network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))
    site = TeacherSite(
        Teacher(decay=0.75), SimpleNamespace(network=network, task=SimpleNamespace(annotation="a code"))
    )
    site.start_round()
    expected = {key: value.detach().clone() for key, value in network.named_parameters()}
    assert site.teacher.keys() == expected.keys()  # running statistics are the student's
    for _ in range(3):
        with torch.no_grad():
            for value in network.parameters():
                value.add_(torch.randn_like(value))
        site.after_step(None)
        for key, value in network.named_parameters():
            expected[key] = 0.75 * expected[key] + 0.25 * value.detach()
            torch.testing.assert_close(site.teacher[key], expected[key])


def test_the_weight_rises_to_the_last_round():
    weights = [Teacher(weight=2.0).weight_of(number, 4) for number in (1, 2, 3, 4, 5)]
    assert weights == pytest.approx([2 * math.exp(-5 * (1 - r / 4) ** 2) for r in (1, 2, 3, 4, 4)])
