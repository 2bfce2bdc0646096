"""A round of local training that is under way, on disk: a site that went down goes on from there."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from medfedaug._version import __version__
from medfedaug.errors import ConfigError, StorageError, warn
from medfedaug.federation.messages.checkpoint import load_checkpoint, save_checkpoint
from medfedaug.federation.site.training_state import (
    StateMismatch,
    capture,
    find_generators,
    generator_state,
    restore,
    set_generator_state,
)


class HalfRound:
    """Writes the state of a round's training every few minutes, and finds it again after a restart.

    The state is that of the network, the optimiser, the methods, all random numbers and the order of the
    data, after a number of steps. It is found again only for the same round with the same received model.

    Args:
        path: the file; ``None`` keeps nothing.
        minutes: between two writes; 0 keeps nothing.
        key: equal for two rounds that begin alike.
    """

    def __init__(self, path: Path | None, minutes: float, key: str) -> None:
        self.path, self.seconds, self.key = path, 60.0 * minutes, key
        self.beside: dict[str, Any] = {}
        """What else belongs to the state; of a found one as it was."""
        self.steps_before = 0
        """The number of steps that were found."""
        self._last = time.monotonic()
        self._generators: list[Any] = []
        self._found = self._load()
        if self._found:
            self.beside = self._found["beside"]

    @classmethod
    def none(cls) -> HalfRound:
        """Return an object that keeps nothing of a round."""
        return cls(None, 0.0, "")

    @property
    def found(self) -> bool:
        """Return whether the round goes on where it was interrupted."""
        return bool(self._found)

    @property
    def keeps(self) -> bool:
        """Return whether anything is written."""
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
        """Put the state that was found in its place.

        Returns:
            The losses of the steps that are done; none if nothing was found.
        """
        self._generators = list(find_generators(data)) if self.keeps or self._found else []
        self._last = time.monotonic()
        if not self._found:
            return []
        saved = self._found
        try:
            if len(self._generators) != len(saved["data"]):
                raise StateMismatch("the data set has other random numbers")
            restore(roots, saved["state"])
        except StateMismatch:
            self.discard()
            raise
        for generator, state in zip(self._generators, saved["data"], strict=True):
            set_generator_state(generator, state)
        torch.set_rng_state(saved["random"][0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(saved["random"][1], device)
        losses = list(saved["losses"].to(device).unbind())
        self.steps_before = len(losses)
        return losses

    def numbered(self, batches: Iterable[Any]) -> Iterator[tuple[Any, list[Any]]]:
        """Each batch, with the random numbers of the data after it: batches may be made ahead."""
        for batch in batches:
            yield batch, [generator_state(one) for one in self._generators] if self.keeps else []

    def step(
        self, roots: Mapping[str, Any], losses: Sequence[Tensor], data: list[Any], device: torch.device
    ) -> None:
        """A step is done: write the state, if it is time to. A full disk ends nothing."""
        if not self.keeps or time.monotonic() - self._last < self.seconds:
            return
        assert self.path is not None
        on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
        content = {
            "key": self.key,
            "beside": self.beside,
            "state": capture(roots),
            "losses": torch.stack(list(losses)).detach().cpu(),
            "data": data,
            "random": [torch.get_rng_state(), *on_device],
        }
        try:
            save_checkpoint(self.path, content, private=True)
        except StorageError as error:
            warn(f"{error}; a restart repeats the round from its beginning")
        self._last = time.monotonic()

    def discard(self) -> None:
        """Remove the file, for good: what goes on from it a second time would repeat noise of the first."""
        self._found = {}
        if self.path is None or not self.path.exists():
            return
        self.path.unlink()
        with suppress(OSError):  # a file system that cannot has no order of its own either
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def digest(*parts: Any) -> str:
    """A hash of tensors by name, and of anything else by its text."""
    found = hashlib.sha256(__version__.encode())
    for part in parts:
        if not isinstance(part, Mapping):
            found.update(repr(part).encode() + b"\0")
            continue
        for key in sorted(part):
            value = part[key]
            found.update(repr(key).encode() + b"\0")
            if isinstance(value, Tensor):
                plain = value.detach().cpu().contiguous()
                found.update(repr((str(plain.dtype), tuple(plain.shape))).encode())
                found.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                found.update(repr(value).encode() + b"\0")
    return found.hexdigest()


def keeps_order(loader: Any) -> bool:
    """Return whether the order of a loader's batches follows from its generator alone."""
    return isinstance(loader, DataLoader) and not loader.num_workers and loader.generator is not None


def remaining_batches(loader: DataLoader[Any], epochs: Iterable[int], done: int) -> Iterator[Any]:
    """The batches of some epochs after those that are done, which are not made."""
    for epoch in epochs:
        before = min(max(done - epoch * len(loader), 0), len(loader))
        if not before:
            yield from loader
            continue
        iter(loader)  # draws what a loader draws as an epoch begins
        assert loader.batch_sampler is not None
        assert loader.collate_fn is not None
        for number, indices in enumerate(loader.batch_sampler):
            if number >= before:
                yield loader.collate_fn(loader.dataset.__getitems__(indices))  # type: ignore[attr-defined]
