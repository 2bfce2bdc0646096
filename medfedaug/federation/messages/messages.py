"""The messages between server and site, independent of the engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from monai.utils import convert_to_tensor
from torch import Tensor

from medfedaug.methods.base import Payload

__all__ = [
    "CONFIRM",
    "FINGERPRINT",
    "FROZEN",
    "KEYS",
    "LEND",
    "MASKED",
    "MASK_TASKS",
    "OPEN",
    "PREPARE",
    "PROSPECT",
    "SCORE",
    "SCORE_EPSILON",
    "SCORING_TASKS",
    "SHARES",
    "TASKS",
    "TEST",
    "TRAIN",
    "UNSCORED",
    "VALIDATE",
    "Reply",
    "Request",
    "entries_hash",
    "namespaced",
    "num_bytes",
    "own_entries",
    "portable",
    "shared_keys",
    "split_frozen",
]

FINGERPRINT, PREPARE, TRAIN, VALIDATE, TEST = "fingerprint", "prepare", "train", "validate", "test"
KEYS, SHARES, CONFIRM, OPEN = "keys", "shares", "confirm", "open"
PROSPECT = "prospect"
"""The task of a job that exchanges fingerprints of images and trains nothing."""

MASK_TASKS = (KEYS, SHARES, CONFIRM, OPEN)
"""Before and after each round of training, under secure aggregation (`medfedaug.federation.secure`)."""

TASKS = (FINGERPRINT, PROSPECT, PREPARE, TRAIN, VALIDATE, TEST, *MASK_TASKS)
"""The tasks of a federation."""

MASKED = "sum"
"""The entry of `Reply.masks` with what is added up, of a reply to ``train`` under secure aggregation."""

UNSCORED = "val_note"
"""The entry of `Reply.metrics` with the reason why an update comes without a validation score."""

SCORE_EPSILON = "privacy/score_epsilon"
"""The entry of `Reply.metrics` with ε of the validation scores, of a site that adds noise to them."""

FROZEN = "frozen"
"""The prefix of the entries in `Request.once` that no site trains, and which no later request repeats."""

LEND, SCORE = "lend", "score"
SCORING_TASKS = (LEND, SCORE)
"""The tasks of an evaluation (`medfedaug.federation.server.evaluation`)."""


@dataclass
class Request:
    """From the server to a site.

    Args:
        task: one of `TASKS`.
        round: the number of the round that begins, from 1; 0 before training. For ``validate`` and ``test``,
            the round that the model in this request comes from.
        weights: the shared entries of the global model, without those that no site trains.
        frozen: a hash of these (`entries_hash`), which are in ``once``; empty where all are trained.
        once: what the methods exchange before training, with keys ``<method>/<key>``; not repeated in every
            round.
        payload: what the methods exchange in every round, with the same kind of keys.
        selected_round: the best round so far, 0 if there is none yet; sites keep their state of this round.
        run: the identity of the run, which does not change when the run is resumed; sites find their state by
            it.
        planned: settings of the run that were derived from the sites' fingerprints, as JSON types.
        scoring: in an evaluation, what is scored and how (`medfedaug.federation.server.evaluation.Asked`), as
            JSON types.
        method_states: in an evaluation, what methods keep for another site's model beside its weights, with
            keys ``<method>/<key>``.
        masks: under secure aggregation, what the sites of the round say to each other.
        scanners: in an exchange of fingerprints, by site the scanners that it names, as JSON types.
    """

    task: str
    round: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    frozen: str = ""
    once: Payload = field(default_factory=dict)
    payload: Payload = field(default_factory=dict)
    selected_round: int = 0
    run: str = ""
    planned: dict[str, Any] = field(default_factory=dict)
    scoring: dict[str, Any] = field(default_factory=dict)
    method_states: Payload = field(default_factory=dict)
    masks: dict[str, Any] = field(default_factory=dict)
    scanners: dict[str, Any] = field(default_factory=dict)


@dataclass
class Reply:
    """From a site to the server.

    Args:
        task: the request's.
        round: the request's.
        weights: the shared entries of the local model.
        payload: what the methods exchange, with keys ``<method>/<key>``.
        num_samples: the number of training samples of the site, which is the weight of its update.
        metrics: numbers by name, e.g. ``train_loss``, ``val_dice``, ``seconds``; for ``test``, one entry per
            case below ``cases``. Those that leave a real site are in `medfedaug.privacy.sent_numbers`.
        error: one line, if the site could not do what was requested; nothing else is then used.
        masks: under secure aggregation, what the site says to others of the round; of an update, in the place
            of weights and payload, their masked numbers below `MASKED`.
    """

    task: str
    round: int = 0
    weights: dict[str, Tensor] = field(default_factory=dict)
    payload: Payload = field(default_factory=dict)
    num_samples: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    masks: dict[str, Any] = field(default_factory=dict)


def namespaced(payload: Mapping[str, Tensor], method: str) -> Payload:
    """Put a method's name before its keys: ``enc1/mean`` becomes ``fedfa/enc1/mean``."""
    return {f"{method}/{key}": value for key, value in payload.items()}


def own_entries(payload: Mapping[str, Tensor], method: str) -> Payload:
    """The inverse of `namespaced`: the entries of ``payload`` that belong to the method."""
    prefix = f"{method}/"
    return {key.removeprefix(prefix): value for key, value in payload.items() if key.startswith(prefix)}


def by_method(payload: Mapping[str, Tensor]) -> dict[str, Payload]:
    """Group the entries of a payload by method; their keys stay as they are."""
    found: dict[str, Payload] = {}
    for key, value in payload.items():
        found.setdefault(key.split("/", 1)[0], {})[key] = value
    return found


def shared_keys(state: Mapping[str, Tensor], local_entries: frozenset[str]) -> list[str]:
    """The state-dict entries that are averaged: those that are floating point and not kept at the site.

    Integer buffers such as ``num_batches_tracked`` are excluded, since their mean may be a fraction.
    """
    return [key for key, value in state.items() if value.is_floating_point() and key not in local_entries]


def entries_hash(entries: Mapping[str, Tensor]) -> str:
    """Hash entries of a network by name, shape and value; empty for none."""
    found = hashlib.sha256()
    for key, value in sorted(entries.items()):
        found.update(json.dumps([key, list(value.shape)]).encode())
        found.update(portable(value, torch.device("cpu")).numpy().data)
    return found.hexdigest() if entries else ""


def split_frozen(once: Mapping[str, Tensor]) -> tuple[Payload, Payload]:
    """Split `Request.once` into entries that no site trains, and the methods' exchange before training."""
    frozen = {key: value for key, value in once.items() if key.startswith(f"{FROZEN}/")}
    return frozen, {key: value for key, value in once.items() if key not in frozen}


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of the numbers, without the framing of messages."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def portable(value: Tensor, device: torch.device) -> Tensor:
    """A float32 copy with the memory layout that all engines expect."""
    plain = convert_to_tensor(value.detach(), track_meta=False)
    found: Tensor = plain.to(device, torch.float32).clone(memory_format=torch.contiguous_format)
    return found
