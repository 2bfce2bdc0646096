"""Decoded images kept in memory, for many runs over the same files in one process."""

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
    """Tensors by file, up to a number of bytes.

    What is kept stays: a run reads its files in the same order again and again, so that a tensor that
    replaced the oldest one would be replaced itself before it is needed again.

    Attributes:
        decodings: how often something had to be decoded.
        num_bytes: the size of what is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes, self.decodings = max_bytes, 0, 0
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def get(self, key: tuple[object, ...], load: Callable[[], Tensor]) -> Tensor:
        """The tensor kept under ``key``, otherwise ``load()``."""
        if key in self._kept:
            return self._kept[key]
        value = load()
        self.decodings += 1
        size = value.numel() * value.element_size()
        if self.num_bytes + size <= self.max_bytes:
            # Cloned, or a view would keep all that it is a view of.
            self._kept[key] = value if value.untyped_storage().nbytes() == size else value.clone()
            self.num_bytes += size
        return value


_active: ContextVar[DecodedMemory | None] = ContextVar("decoded_memory", default=None)


@contextmanager
def keep_decoded(max_bytes: int) -> Iterator[DecodedMemory]:
    """A context in which all sites of this process share decoded images, up to so many bytes.

    Example:
        >>> with keep_decoded(2**20) as memory:
        ...     memory.num_bytes
        0
    """
    memory = DecodedMemory(max_bytes)
    token = _active.set(memory)
    try:
        yield memory
    finally:
        _active.reset(token)


def decoded(kind: str, files: Sequence[Path], load: Callable[[], Tensor]) -> Tensor:
    """``load()``, or its earlier result for this kind of use and these files; it must not be changed."""
    memory = _active.get()
    if memory is None:
        return load()
    try:
        states = file_states(files)
    except OSError:
        return load()  # which says what is wrong with the file
    return memory.get((kind, *states), load)
