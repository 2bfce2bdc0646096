"""Prepared cases: in memory up to a limit, and beyond it in files."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medfedaug._version import __version__
from medfedaug.config.machine import Machine
from medfedaug.errors import MedFedAugError, StorageError, first_line

Window = tuple[slice, ...]

# Of what is kept of a case; raised where it changes within a version of the package.
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
        """The shape of a tensor, without reading it."""
        if self.tensors is not None:
            return tuple(self.tensors[name].shape)
        return tuple(self._mapped(name).shape)

    def read(self, name: str, index: int | None = None, window: Window = ()) -> Tensor:
        """A tensor, or of it what is asked for, as a tensor of its own that must not be changed."""
        where: tuple[Any, ...] = (...,) if index is None else (index, ..., *window) if window else (index,)
        if self.tensors is not None:
            return self.tensors[name][where]
        # Mapped for as long as this takes: what a window needs is read, and no page stays with the process.
        return torch.from_numpy(np.array(self._mapped(name)[where]))

    def _file(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{name}.npy"

    def _mapped(self, name: str) -> np.ndarray:
        try:
            mapped: np.ndarray = np.load(self._file(name), mmap_mode="r")
        except (OSError, ValueError) as error:
            raise MedFedAugError(
                f"{self.folder}: a prepared case cannot be read ({first_line(error)}); remove the folder"
            ) from error
        return mapped


class CaseCache:
    """Keeps what is made of cases: the first ones in memory, the others in files.

    What is kept stays where it is: cases are read in an order that is random from epoch to epoch, so that no
    choice of what to drop would be better.

    Args:
        machine: how much is kept in memory, and where the files are. Those in a folder of the site's stay
            until somebody removes it, and serve later processes.
        place: brings a tensor that stays in memory, with this name, to where it is needed.

    Attributes:
        num_bytes: the size of what is in memory.
        made: how many cases had to be made.
    """

    def __init__(
        self,
        machine: Machine,
        place: Callable[[str, Tensor], Tensor] = lambda name, tensor: tensor,
    ) -> None:
        self.max_bytes, self.place = machine.max_bytes, place
        self.num_bytes, self.made = 0, 0
        self._folder = machine.cache
        self._known: dict[tuple[object, ...], StoredCase] = {}

    def get(
        self,
        key: tuple[object, ...],
        make: Callable[[], Mapping[str, Tensor]],
        files: Sequence[Path] = (),
    ) -> StoredCase:
        """Return the case kept under a key, or keep ``make()`` and its files, for `remove_prepared`."""
        if key not in self._known:
            self._known[key] = self._find(key) or self._keep(key, make(), files)
        return self._known[key]

    def _file(self, key: tuple[object, ...]) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="medfedaug-cache-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        # Another version may make something else of the same files.
        made = repr((__version__, _FORM, key)).encode()
        return self._folder / hashlib.blake2b(made, digest_size=16).hexdigest()

    def _find(self, key: tuple[object, ...]) -> StoredCase | None:
        if self._folder is None or not (folder := self._file(key)).is_dir():
            return None
        return StoredCase(folder=folder)

    def _keep(
        self, key: tuple[object, ...], tensors: Mapping[str, Tensor], files: Sequence[Path]
    ) -> StoredCase:
        self.made += 1
        size = sum(value.nbytes for value in tensors.values())
        if self.num_bytes + size <= self.max_bytes:
            self.num_bytes += size
            # Cloned, or a view would keep all that it is a view of.
            own = {
                name: self.place(name, v if v.untyped_storage().nbytes() == v.nbytes else v.clone())
                for name, v in tensors.items()
            }
            return StoredCase(own)
        return StoredCase(folder=self._write(self._file(key), tensors, files))

    def _write(self, folder: Path, tensors: Mapping[str, Tensor], files: Sequence[Path]) -> Path:
        """Write all files or none: another process may look at the same time, and this one may be killed."""
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            unfinished = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
            try:
                for name, value in tensors.items():
                    np.save(unfinished / f"{name}.npy", value.contiguous().numpy())
                (unfinished / _FILES).write_text("".join(f"{_mark(file)}\n" for file in files))
                os.rename(unfinished, folder)
            except OSError:
                shutil.rmtree(unfinished, ignore_errors=True)
                if not folder.is_dir():  # else another process was faster
                    raise
        except OSError as error:
            raise StorageError(folder, error) from error
        return folder


def remove_prepared(folder: Path, files: Sequence[Path]) -> int:
    """Remove prepared cases of some files, by the files' names, and count them; those of no file go, too.

    What a killed process left unfinished is removed, too. Cases are prepared again when they are needed.
    """
    marks, removed = {_mark(file) for file in files}, 0
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        finished = _ENTRY.fullmatch(entry.name) is not None
        inside = [path.name for path in entry.iterdir()] if entry.is_dir() and not entry.is_symlink() else []
        # Nothing but what a cache writes: the folder may hold other things of the site.
        if not inside or not all(name == _FILES or name.endswith(".npy") for name in inside):
            continue
        if not finished and not entry.name.startswith("."):
            continue
        listed = entry / _FILES
        own = {*listed.read_text().split()} if finished and listed.is_file() else set()
        if own and not own & marks:
            continue
        try:
            shutil.rmtree(entry)
        except OSError as error:
            raise StorageError(entry, error) from error
        removed += finished
    return removed


def _mark(file: Path) -> str:
    """A digest of a file's name, which may be a patient's."""
    return hashlib.sha256(file.name.encode("utf-8", "surrogateescape")).hexdigest()
