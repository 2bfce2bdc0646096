"""Decoded images in memory, for many runs over the same files in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

from medfedaug.data.io.formats import file_states

if TYPE_CHECKING:
    from torch import Tensor


class DecodedMemory:
    """Tensors by file, up to a number of bytes; none is replaced, since runs read files in one order."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes, self.decodings = max_bytes, 0, 0
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def get(self, key: tuple[object, ...], load: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of ``key``, or ``load()``."""
        if key in self._kept:
            return self._kept[key]
        value = load()
        self.decodings += 1
        if self.num_bytes + value.nbytes <= self.max_bytes:
            # Cloned, since a view would keep the whole tensor in memory.
            self._kept[key] = value if value.untyped_storage().nbytes() == value.nbytes else value.clone()
            self.num_bytes += value.nbytes
        return value


_active: ContextVar[DecodedMemory | None] = ContextVar("decoded_memory", default=None)


@contextmanager
def keep_decoded(max_bytes: int) -> Iterator[DecodedMemory]:
    """Share decoded images between all sites of this process in a context, up to a number of bytes."""
    memory = DecodedMemory(max_bytes)
    token = _active.set(memory)
    try:
        yield memory
    finally:
        _active.reset(token)


def decoded(kind: str, files: Sequence[Path], load: Callable[[], Tensor]) -> Tensor:
    """Return ``load()``, or its earlier result for this kind of use and files; it must not be changed."""
    memory = _active.get()
    return load() if memory is None else memory.get((kind, *file_states(files)), load)
