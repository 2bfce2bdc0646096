"""What a run leaves behind: checkpoints and ``results.json``, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from medfedaug.federation.server import FederationServer
from medfedaug.statistics import save_statistics

__all__ = ["FINAL_MODEL", "GLOBAL_MODEL", "RESULTS", "STATISTICS", "write_json", "write_run", "write_state"]

RESULTS, GLOBAL_MODEL, FINAL_MODEL = "results.json", "global_model.pt", "final_model.pt"
STATISTICS = "statistics.json"


def write_run(folder: str | Path, server: FederationServer) -> None:
    """Write ``results.json``, the selected model, the last one and the statistics that were exchanged."""
    folder = Path(folder)
    write_state(folder / GLOBAL_MODEL, server.selected_state)
    write_state(folder / FINAL_MODEL, server.state)
    if server.statistics:
        save_statistics(folder / STATISTICS, server.statistics)
    write_json(folder / RESULTS, server.results())


def write_state(path: Path, state: dict[str, Tensor]) -> None:
    """A state dict that ``torch.load(path, weights_only=True)`` reads anywhere."""
    plain = {key: value.detach().cpu().clone() for key, value in state.items()}
    _atomic(path, lambda file: torch.save(plain, file))


def write_json(path: Path, content: Any) -> None:
    """JSON that a person can read."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    _atomic(path, lambda file: file.write(text.encode()))


def _atomic(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
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
