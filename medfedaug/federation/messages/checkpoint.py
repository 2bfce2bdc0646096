"""Files that survive a restart, one for the server and one per site, each written atomically."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, config_errors
from medfedaug.methods import build_methods
from medfedaug.models.entries import load_tensors
from medfedaug.utils.files import check_version, version_mark, write_atomic

_KIND, _VERSION = "checkpoint", 2
CHECKPOINT_FORMAT: str = version_mark(_KIND, _VERSION)["format"]


def save_checkpoint(path: Path, content: dict[str, Any], *, private: bool = False) -> None:
    """Write ``content``, tensors and plain Python types, atomically."""
    whole = {**version_mark(_KIND, _VERSION), **content}
    write_atomic(path, lambda file: torch.save(whole, file), private=private)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a file of `save_checkpoint` without executing anything in it."""
    with config_errors(f"{path}: not a checkpoint"):  # a damaged file fails anywhere between zip and pickle
        return check_version(load_tensors(path), _KIND, _VERSION)


def check_same_run(path: Path, saved: Mapping[str, Any], config: RunConfig) -> None:
    """Check that a checkpoint belongs to this run.

    Only the purpose and the number of rounds may differ. The latter may not with a schedule, which has set
    the learning rates of past rounds, nor with a method that depends on it.
    """
    now, before = config.to_dict(), RunConfig.from_dict(saved["config"]).to_dict()
    fixed = config.schedule != "constant" or any(
        "fixed_rounds" in method.requires for method in build_methods(config.methods)
    )
    free = {"purpose"} if fixed else {"purpose", "rounds"}
    if differing := sorted(name for name in {*now} - free if now[name] != before[name]):
        name = differing[0]
        raise ConfigError(f"{path} is of a run with another {name}: {before[name]}, asked for {now[name]}")
