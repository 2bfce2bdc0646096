"""Conditional distillation against its equation in float64, and its weight by round."""

import pytest
from open_classes import ALL, FIRST, NONE, SECOND, SHAPES, batch, softmax, voxels

from medfedaug.methods.condist import ConDist, conditional_distillation


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
    result = conditional_distillation(student, teacher, labels, annotated)
    assert result.item() == pytest.approx(expected, rel=1e-9)


def test_a_complete_batch_has_nothing_to_distil():
    student, teacher, labels, annotated = batch((4, 4), [ALL, ALL])
    assert conditional_distillation(student, teacher, labels, annotated) == 0


def test_the_weight_rises_linearly_to_the_last_round():
    method = ConDist(weight=1.0, first_weight=0.1)
    assert [round(method.weight_of(number, 4), 3) for number in (1, 2, 3, 4, 5)] == [0.1, 0.4, 0.7, 1.0, 1.0]
    assert method.weight_of(1, 1) == 1.0
