"""What travels between server and site, whatever the engine, and the check that nothing harmful is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medfedaug.errors import UpdateRefused
from medfedaug.methods.base import Payload, Shapes

__all__ = [
    "LARGEST",
    "PREPARE",
    "TEST",
    "TRAIN",
    "VALIDATE",
    "Reply",
    "Request",
    "check_tensors",
    "clean_metrics",
    "fits",
    "namespaced",
    "num_bytes",
    "own_entries",
    "shared_keys",
]

PREPARE, TRAIN, VALIDATE, TEST = "prepare", "train", "validate", "test"

# Beyond any intensity that a scanner stores and any weight that still trains, and far inside float32.
LARGEST = 1e10
_LONGEST_NAME = 500


@dataclass
class Request:
    """From the server to a site.

    Args:
        task: one of ``prepare``, ``train``, ``validate``, ``test``.
        round: the round that begins, counted from 1; 0 before training. For ``validate`` and ``test``, the
            round whose model comes along.
        weights: the shared entries of the global model.
        once: the methods' exchange from before training, keys ``<method>/<key>``; not repeated in every
            round.
        payload: the methods' exchange of every round, keys alike.
        selected_round: the best round so far, 0 while there is none: sites keep what belongs to it.
        run: identifies the run, also after it was resumed: sites find what they keep by it.
    """

    task: str
    round: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    once: Payload = field(default_factory=dict)
    payload: Payload = field(default_factory=dict)
    selected_round: int = 0
    run: str = ""


@dataclass
class Reply:
    """From a site to the server.

    Args:
        task: the request's.
        round: the request's.
        weights: the shared entries of the local model.
        payload: the methods' exchange, keys ``<method>/<key>``.
        num_samples: training samples of the site, the weight of its update.
        metrics: numbers by name, e.g. ``train_loss``, ``val_dice``, ``seconds``; for ``test``, one entry per
            case below ``cases``.
        error: one line, when the site could not do what it was asked; nothing else is then used.
    """

    task: str
    round: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    payload: Payload = field(default_factory=dict)
    num_samples: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def namespaced(payload: Mapping[str, Tensor], method: str) -> Payload:
    """Put a method's name before its keys: ``enc1/mean`` becomes ``fedfa/enc1/mean``."""
    return {f"{method}/{key}": value for key, value in payload.items()}


def own_entries(payload: Mapping[str, Tensor], method: str) -> Payload:
    """The inverse of `namespaced`: what in ``payload`` is the method's."""
    prefix = f"{method}/"
    return {key.removeprefix(prefix): value for key, value in payload.items() if key.startswith(prefix)}


def shared_keys(state: Mapping[str, Tensor], kept_at_site: frozenset[str]) -> list[str]:
    """The state-dict entries that are averaged: floating point, and not kept at the site.

    Integer buffers such as ``num_batches_tracked`` would turn into fractions.
    """
    return [key for key, value in state.items() if value.is_floating_point() and key not in kept_at_site]


def check_tensors(site: str, tensors: Mapping[str, Any], shapes: Shapes) -> None:
    """Refuse what is not exactly the expected keys and shapes, floating point, finite and below `LARGEST`.

    Raises:
        UpdateRefused: naming site, key, what was expected and what came.
    """
    for key in tensors:
        if key not in shapes:
            raise UpdateRefused(site, repr(key)[:80], expected="no such entry", got="one")
    for key, shape in shapes.items():
        value = tensors.get(key)
        if not isinstance(value, Tensor):
            got = "none" if value is None else type(value).__name__
            raise UpdateRefused(site, key, expected=f"a tensor of shape {tuple(shape)}", got=got)
        # Compared before anything is added: (1,) would otherwise broadcast silently into (4,).
        if not fits(tuple(value.shape), shape):
            raise UpdateRefused(site, key, expected=f"shape {tuple(shape)}", got=f"{tuple(value.shape)}")
        if not value.is_floating_point():
            raise UpdateRefused(site, key, expected="floating point", got=str(value.dtype))
        if not value.numel():
            continue
        low, high = (float(edge) for edge in torch.aminmax(value))  # a NaN anywhere makes both NaN
        if not (math.isfinite(low) and math.isfinite(high)):
            bad = int((~torch.isfinite(value)).sum())
            raise UpdateRefused(
                site, key, expected="finite values", got=f"{bad} of {value.numel()} NaN or infinite"
            )
        if max(-low, high) > LARGEST:
            raise UpdateRefused(site, key, expected=f"values up to {LARGEST:g}", got=f"{max(-low, high):g}")


def fits(found: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Whether a shape is the expected one, in which ``None`` stands for any length but zero.

    >>> fits((3, 4), (None, 4)), fits((0, 4), (None, 4)), fits((3, 4), (None, 5))
    (True, False, False)
    """
    return len(found) == len(expected) and all(
        n > 0 if wanted is None else n == wanted for n, wanted in zip(found, expected, strict=True)
    )


def clean_metrics(metrics: Mapping[str, Any], nested: bool = True) -> dict[str, Any]:
    """What of a site's metrics is fit for ``results.json``: finite numbers, and short texts as notes.

    A mapping inside, such as the scores by case, is treated alike, but not what is nested in that. Everything
    else is dropped: metrics decide nothing that would be worth ending a round for.
    """
    kept: dict[str, Any] = {}
    for key, value in metrics.items():
        if not isinstance(key, str) or len(key) > _LONGEST_NAME:
            continue
        number = isinstance(value, (int, float)) and math.isfinite(value)  # true and false among them
        text = isinstance(value, str) and len(value) <= _LONGEST_NAME
        if value is None or number or text:
            kept[key] = value
        elif nested and isinstance(value, Mapping):
            kept[key] = clean_metrics(value, nested=False)
    return kept


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of the numbers themselves, without any framing."""
    return sum(value.numel() * value.element_size() for value in tensors.values())
