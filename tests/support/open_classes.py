"""Batches of three classes of which cases lack some, in float64, and softmax in plain Python."""

import math

import torch

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
