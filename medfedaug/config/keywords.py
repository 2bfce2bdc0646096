"""`RunKeywords`: the settings of a run and of its execution as keywords, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from medfedaug.config.plan import Plan


class RunKeywords(TypedDict, total=False):
    """The fields of `RunConfig` and `Execution`, but for ``methods``; a test compares them."""

    purpose: str
    task: str
    network: str
    network_args: Mapping[str, Any]
    loss: str | None
    loss_args: Mapping[str, Any]
    partial_loss: str
    unlabelled_weight: float
    in_channels: int
    channel_names: Sequence[str]
    classes: Sequence[str]
    plan: Plan
    planning: Mapping[str, Any]
    image_size: int | None
    rounds: int
    validate_every: int
    patience: int
    local_epochs: int
    local_steps: int
    batch_size: int
    optimizer: str
    learning_rate: float
    schedule: str
    momentum: float
    weight_decay: float
    weighting: str
    max_share: float
    secure_aggregation: bool
    wire: str
    precision: str
    intensity: str
    augmentation: str
    surface_tolerance: float
    bundle: str | Path | None
    init: str | Path | None
    freeze: Sequence[str]
    loop: str | Path | None
    seed: int
    limit: int | None
    holdout: Sequence[str]
    buffer: int
    staleness: float
    threads: int
    min_sites: int
    round_timeout: float
    grace: float | None
    site_speed: Mapping[str, float]
    tested: bool
