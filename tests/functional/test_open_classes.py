"""Distillation and pseudo-labels about classes that a case lacks, against their equations in float64."""

import math

import pytest
import torch

from medfedaug import functional as F

ALL, FIRST, SECOND, NONE = (True,) * 3, (True, True, False), (True, False, True), (True, False, False)
GENERATOR = torch.Generator().manual_seed(0)
SHAPES = ((5, 6), (3, 4, 5))


def batch(shape, sets):
    student, teacher = (
        torch.randn(len(sets), 3, *shape, generator=GENERATOR, dtype=torch.float64) for _ in range(2)
    )
    labels = torch.randint(3, (len(sets), 1, *shape), generator=GENERATOR)
    for label, chosen in zip(labels, sets, strict=True):
        label[~torch.tensor(chosen)[label]] = 0
    return student, teacher, labels, torch.tensor(sets)


def softmax(logits, temperature=1.0):
    powers = [math.exp(v / temperature) for v in logits]
    return [v / sum(powers) for v in powers]


def voxels(*tensors):
    return zip(*(x.flatten(1).T.tolist() for x in tensors), strict=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sets", [[FIRST], [FIRST, SECOND, ALL], [NONE, FIRST]])
def test_conditional_distillation_is_its_equation(shape, sets):
    student, teacher, labels, annotated = batch(shape, sets)
    hits, sizes, some = [0.0] * 3, [0.0] * 3, set()
    for b, chosen in enumerate(sets):
        structures = [n for n in (1, 2) if chosen[n]]
        if len(structures) == 2:
            continue
        others = [n for n in range(3) if n not in structures]
        some |= {*others}
        for z, w, (y,) in voxels(student[b], teacher[b], labels[b]):
            if y in structures or w.index(max(w)) in structures:
                continue
            s, t = softmax(z, 2.0), softmax(w, 2.0)
            for g in others:
                own, theirs = (p[g] / (1 - sum(p[n] for n in structures)) for p in (s, t))
                hits[g] += own * theirs
                sizes[g] += own + theirs
    expected = sum(1 - 2 * hits[g] / (sizes[g] + 1e-5) for g in some) / len(some)
    found = F.conditional_distillation(student, teacher, labels, annotated)
    assert found.item() == pytest.approx(expected, rel=1e-9)


def test_a_complete_batch_has_nothing_to_distil():
    student, teacher, labels, annotated = batch((4, 4), [ALL, ALL])
    assert F.conditional_distillation(student, teacher, labels, annotated) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_confident_entropy_is_its_equation(shape):
    sets = [FIRST, ALL, NONE]
    student, teacher, labels, annotated = batch(shape, sets)
    known = torch.rand(labels.shape, generator=GENERATOR) < 0.7
    labels = labels * known
    possible = F.possible_classes(labels, known, annotated)
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
    found = F.confident_entropy(student, teacher, possible, 0.6)
    assert found.item() == pytest.approx(total / count, rel=1e-6)
    assert F.confident_entropy(student, teacher, possible, 1.01) == 0
