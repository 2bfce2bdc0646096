"""What survives a restart: one file for the server and one for each site, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from medfedaug.errors import ConfigError, RunFailed, first_line

__all__ = ["load_checkpoint", "save_checkpoint", "server_checkpoint", "write_atomically"]

_FORMAT, _VERSION = "medfedaug.checkpoint", 1


def server_checkpoint(state_dir: str | Path, name: str = "medfedaug") -> Path:
    """Where the server of the run ``name`` keeps its checkpoint; sites have folders beside it."""
    return Path(state_dir) / "server" / f"{name}.pt"


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write ``content``, made of tensors and plain Python types; the old file stands until it is whole.

    Raises:
        RunFailed: when it cannot be written, for instance on a full disk; the file of before is intact.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"format": _FORMAT, "version": _VERSION, **content}
        write_atomically(path, lambda file: torch.save(whole, file))
    # torch.save reports a full disk as RuntimeError.
    except (OSError, RuntimeError) as error:
        raise RunFailed(
            f"{path}: the checkpoint cannot be written ({error}); the one of before is intact"
        ) from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The inverse of `save_checkpoint`; nothing in the file is executed.

    Raises:
        ConfigError: when there is no such file, or it is not a checkpoint of this release.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no checkpoint") from error
    except Exception as error:  # a damaged file fails anywhere between zip and pickle
        raise ConfigError(f"{path}: not a checkpoint ({first_line(error)})") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ConfigError(f"{path}: not a checkpoint of medfedaug")
    if content.get("version") != _VERSION:
        raise ConfigError(f"{path}: version {content.get('version')!r}, this release reads {_VERSION}")
    return content


def write_atomically(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let ``write`` fill a file beside ``path``, and rename it when it is whole and on the disk."""
    # In the same folder, since a rename is atomic within one file system only.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
