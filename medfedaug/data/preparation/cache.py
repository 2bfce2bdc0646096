"""Prepared cases, in memory up to a limit and then in files; decoded images in memory, for many runs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medfedaug._version import __version__
from medfedaug.config.machine import Machine
from medfedaug.data.io.formats import file_states
from medfedaug.errors import storing

if TYPE_CHECKING:
    from torch import Tensor

Window = tuple[slice, ...]

# Form of a stored case; to be raised for a change within a version of the package.
_FORM = 3
_FILES = "files"
_ENTRY = re.compile(r"[0-9a-f]{32}")


class StoredCase:
    """The tensors of one prepared case, in memory or in a folder as ``<name>.npy``."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None, folder: Path | None = None) -> None:
        self.tensors, self.folder = tensors, folder

    def __contains__(self, name: str) -> bool:
        return name in self.tensors if self.tensors is not None else self._file(name).is_file()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, without reading it."""
        return tuple((self._mapped(name) if self.tensors is None else self.tensors[name]).shape)

    def read(self, name: str, index: int | None = None, window: Window = ()) -> Tensor:
        """Return a tensor, or a window of one item; it must not be changed."""
        where: tuple[Any, ...] = (...,) if index is None else (index, ..., *window)
        if self.tensors is not None:
            return self.tensors[name][where]
        import torch

        # Mapped for this read alone: the window is read, and no page stays with the process.
        return torch.from_numpy(np.array(self._mapped(name)[where]))

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.npy"

    def _mapped(self, name: str) -> np.ndarray:
        mapped: np.ndarray = np.load(self._file(name), mmap_mode="r")
        return mapped


class CaseCache:
    """Cache of prepared cases: the first in memory, the others in files.

    Cases are read in random order, so that dropping one for another would save no work. ``machine`` limits
    the memory, and has the folder of the files, which serves later processes. ``place`` moves a tensor of a
    name to the device that needs it, where it stays in memory.
    """

    def __init__(
        self, machine: Machine, place: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor
    ) -> None:
        self.max_bytes, self.place, self.num_bytes = machine.max_bytes, place, 0
        self._folder = machine.cache
        self._known: dict[tuple[object, ...], StoredCase] = {}

    def get(
        self, key: tuple[object, ...], make: Callable[[], Mapping[str, Tensor]], files: Sequence[Path] = ()
    ) -> StoredCase:
        """Return the case of a key, or store ``make()`` with its files' names, for `remove_prepared`."""
        if key not in self._known:
            self._known[key] = self._find(key) or self._keep(key, make(), files)
        return self._known[key]

    def _file(self, key: tuple[object, ...]) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="medfedaug-cache-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        # Another version may prepare the same files differently.
        content = repr((__version__, _FORM, key)).encode()
        return self._folder / hashlib.blake2b(content, digest_size=16).hexdigest()

    def _find(self, key: tuple[object, ...]) -> StoredCase | None:
        if self._folder is None or not (folder := self._file(key)).is_dir():
            return None
        return StoredCase(folder=folder)

    def _keep(
        self, key: tuple[object, ...], tensors: Mapping[str, Tensor], files: Sequence[Path]
    ) -> StoredCase:
        size = sum(value.nbytes for value in tensors.values())
        if self.num_bytes + size <= self.max_bytes:
            self.num_bytes += size
            return StoredCase({name: self.place(name, _whole(value)) for name, value in tensors.items()})
        return StoredCase(folder=self._write(self._file(key), tensors, files))

    def _write(self, folder: Path, tensors: Mapping[str, Tensor], files: Sequence[Path]) -> Path:
        """Write all files or none, since another process may read, and this one may be killed."""
        with storing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
            try:
                for name, value in tensors.items():
                    np.save(unfinished / f"{name}.npy", value.contiguous().numpy())
                (unfinished / _FILES).write_text("".join(f"{_mark(file)}\n" for file in files))
                os.rename(unfinished, folder)
            except OSError:
                shutil.rmtree(unfinished, ignore_errors=True)
                if not folder.is_dir():  # otherwise another process was faster
                    raise
        return folder


def _whole(tensor: Tensor) -> Tensor:
    """Clone a view, which would keep the whole tensor in memory."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def remove_prepared(folder: Path, files: Sequence[Path]) -> int:
    """Remove the prepared cases of some files, by name, and return their number.

    Cases without listed files, and unfinished ones of killed processes, are removed, too.
    """
    marks, removed = {_mark(file) for file in files}, 0
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        finished = _ENTRY.fullmatch(entry.name) is not None
        inside = [path.name for path in entry.iterdir()] if entry.is_dir() and not entry.is_symlink() else []
        # Only entries of a cache: the folder may hold other files of the site.
        stored = inside and all(name == _FILES or name.endswith(".npy") for name in inside)
        if not stored or not (finished or entry.name.startswith(".")):
            continue
        listed = entry / _FILES
        entry_marks = {*listed.read_text().split()} if finished and listed.is_file() else set()
        if entry_marks and not entry_marks & marks:
            continue
        with storing(entry):
            shutil.rmtree(entry)
        removed += finished
    return removed


def _mark(file: Path) -> str:
    """Return a digest of a file's name, which may identify a patient."""
    return hashlib.sha256(file.name.encode("utf-8", "surrogateescape")).hexdigest()


class DecodedMemory:
    """Tensors by file, up to a number of bytes; none is replaced, since runs read files in one order."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._kept: dict[tuple[object, ...], Tensor] = {}

    def get(self, key: tuple[object, ...], load: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of ``key``, or ``load()``."""
        if key in self._kept:
            return self._kept[key]
        value = load()
        if self.num_bytes + value.nbytes <= self.max_bytes:
            self._kept[key] = _whole(value)
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
