"""The files of a finished run: models and ``results.json``, each written completely or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfedaug.federation.job_folder import (
    FINAL_MODEL,
    GLOBAL_MODEL,
    HASHES,
    RESULTS,
    STATISTICS,
    exchange_file,
    file_hashes,
)
from medfedaug.federation.server.server import FederationServer
from medfedaug.methods.base import Payload
from medfedaug.statistics import save_statistics
from medfedaug.utils.files import write_atomic, write_json


def write_run(folder: str | Path, server: FederationServer) -> None:
    """Write ``results.json``, and what `write_files` does."""
    folder = Path(folder)
    results = write_files(folder, server)
    write_json(folder / RESULTS, {**results, HASHES: file_hashes(folder)})


def write_files(folder: Path, server: FederationServer) -> dict[str, Any]:
    """Write the selected model, the last model and the statistics that were exchanged.

    Returns:
        The content of ``results.json``, for the caller to complete and write.
    """
    write_models(folder, server)
    if server.statistics:
        save_statistics(folder / STATISTICS, server.statistics, server.intensity)
    return server.results()


def write_models(folder: Path, server: FederationServer) -> None:
    """Write the selected model, if there is one, and the last model, each with its exchange."""
    best = server.selection
    if best.round:
        write_state(folder / GLOBAL_MODEL, best.state)
        _write_exchange(folder / GLOBAL_MODEL, server.payload_for_inference(best.payload))
    write_state(folder / FINAL_MODEL, server.state)
    _write_exchange(folder / FINAL_MODEL, server.payload_for_inference(server.payload))


def _write_exchange(model: Path, payload: Payload) -> None:
    if payload:
        write_state(exchange_file(model), payload)


def write_state(path: Path, state: dict[str, Tensor]) -> None:
    """Write a state dict that ``torch.load(path, weights_only=True)`` can read on any machine."""
    plain = {key: value.detach().cpu().clone() for key, value in state.items()}
    write_atomic(path, lambda file: torch.save(plain, file))
