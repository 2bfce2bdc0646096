"""Krum's scores, written out."""

from __future__ import annotations

import numpy as np
import torch


def scores(models, parameters, hostile):
    """s(i), with every vector written out."""
    vectors = [np.concatenate([m[key].numpy().ravel() for key in parameters]) for m in models]
    values = []
    for i, own in enumerate(vectors):
        others = sorted(((own - other) ** 2).sum() for j, other in enumerate(vectors) if j != i)
        values.append(sum(others[: len(vectors) - hostile - 2]))
    return values


def clamped(model, models, parameters, hostile):
    """Running statistics within those of the sites, without the outermost."""
    new = {}
    for key, value in model.items():
        ordered = np.sort([m[key].numpy() for m in models], axis=0)
        low, high = ordered[hostile], ordered[len(models) - 1 - hostile]
        new[key] = value if key in parameters else torch.from_numpy(np.clip(value.numpy(), low, high))
    return new
