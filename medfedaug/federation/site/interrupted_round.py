"""Checkpoint of an unfinished round of local training, from which a restarted site resumes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from medfedaug.errors import ConfigError, StorageError, warn
from medfedaug.federation.messages.checkpoint import load_checkpoint, save_checkpoint
from medfedaug.federation.site.training_state import (
    StateMismatch,
    capture,
    find_generators,
    generator_state,
    random_state,
    restore,
    set_generator_state,
    set_random_state,
)


class RoundCheckpoint:
    """Writes the state of a round's training every few minutes, and loads it after a restart.

    The state holds the network, the optimiser, the methods, all random generators and the order of the data
    after a number of steps. It is valid only for the same round with the same received model.

    Args:
        path: the file; ``None`` keeps nothing.
        minutes: minutes between two writes; 0 keeps nothing.
        key: equal for two rounds that begin alike.

    Attributes:
        extra: other values that belong to the state; after a restart the saved ones.
        steps_before: the number of steps in the loaded state.
    """

    def __init__(self, path: Path | None, minutes: float, key: str) -> None:
        self.path, self.seconds, self.key = path, 60.0 * minutes, key
        self.steps_before = 0
        self._last = time.monotonic()
        self._generators: list[Any] = []
        self._saved = self._load()
        self.extra: dict[str, Any] = self._saved.get("beside", {})

    @classmethod
    def none(cls) -> RoundCheckpoint:
        """Return an object that keeps nothing."""
        return cls(None, 0.0, "")

    @property
    def resumed(self) -> bool:
        """Return whether the round continues after an interruption."""
        return bool(self._saved)

    @property
    def keeps(self) -> bool:
        """Return whether the object writes a file."""
        return self.path is not None and self.seconds > 0

    def _load(self) -> dict[str, Any]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            saved = load_checkpoint(self.path)
        except ConfigError as error:
            warn(f"{error}; the round is trained from its beginning")
            saved = {}
        if saved.get("key") == self.key:
            return saved
        self.discard()
        return {}

    def resume(self, roots: Mapping[str, Any], data: Any, device: torch.device) -> list[Tensor]:
        """Restore the loaded state, if any; return the losses of its steps."""
        self._generators = list(find_generators(data)) if self.keeps or self._saved else []
        self._last = time.monotonic()
        if not self._saved:
            return []
        saved = self._saved
        try:
            if len(self._generators) != len(saved["data"]):
                raise StateMismatch("the data set has other random numbers")
            restore(roots, saved["state"])
        except StateMismatch:
            self.discard()
            raise
        for generator, state in zip(self._generators, saved["data"], strict=True):
            set_generator_state(generator, state)
        set_random_state(saved["random"], device)
        losses = list(saved["losses"].to(device).unbind())
        self.steps_before = len(losses)
        return losses

    def numbered(self, batches: Iterable[Any]) -> Iterator[tuple[Any, list[Any]]]:
        """Yield each batch with the data's random generators after it, since batches may be made ahead."""
        for batch in batches:
            yield batch, [generator_state(generator) for generator in self._generators] if self.keeps else []

    def step(
        self, roots: Mapping[str, Any], losses: Sequence[Tensor], data: list[Any], device: torch.device
    ) -> None:
        """Write the state after a step, if it is due. A full disk does not end the training."""
        if not self.keeps or time.monotonic() - self._last < self.seconds:
            return
        assert self.path is not None
        content = {
            "key": self.key,
            "beside": self.extra,
            "state": capture(roots),
            "losses": torch.stack(list(losses)).detach().cpu(),
            "data": data,
            "random": random_state(device),
        }
        try:
            save_checkpoint(self.path, content, private=True)
        except StorageError as error:
            warn(f"{error}; a restart repeats the round from its beginning")
        self._last = time.monotonic()

    def discard(self) -> None:
        """Remove the file durably: a second continuation would repeat the noise of the first."""
        self._saved = {}
        if self.path is None or not self.path.exists():
            return
        self.path.unlink()
        with suppress(OSError):  # some file systems cannot sync a folder
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def keeps_order(loader: Any) -> bool:
    """Return whether a loader's generator alone decides the order of its batches."""
    return isinstance(loader, DataLoader) and not loader.num_workers and loader.generator is not None


def remaining_batches(loader: DataLoader[Any], epochs: Iterable[int], done: int) -> Iterator[Any]:
    """Yield the remaining batches of some epochs; skip the finished ones without making them."""
    for epoch in epochs:
        before = min(max(done - epoch * len(loader), 0), len(loader))
        if not before:
            yield from loader
            continue
        iter(loader)  # makes the random draws of an epoch's beginning
        assert loader.batch_sampler is not None
        assert loader.collate_fn is not None
        for number, indices in enumerate(loader.batch_sampler):
            if number >= before:
                yield loader.collate_fn(loader.dataset.__getitems__(indices))  # type: ignore[attr-defined]
