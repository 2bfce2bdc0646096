"""The files of a finished run: models and ``results.json``, each written atomically."""

from datetime import datetime, timezone
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
from medfedaug.statistics import save_statistics
from medfedaug.utils.files import write_atomic, write_json


def write_run(folder: str | Path, server: FederationServer, job: str = "") -> None:
    """Write ``results.json``, with the identifier of NVFlare's job if any, and the files of `write_files`."""
    folder = Path(folder)
    results = {**write_files(folder, server), **({"job": job} if job else {})}
    write_json(folder / RESULTS, {**results, HASHES: file_hashes(folder)})


def write_files(folder: Path, server: FederationServer) -> dict[str, Any]:
    """Write models and statistics; return the content of ``results.json``, for the caller to complete.

    ``date`` is the time of the end in UTC.
    """
    write_models(folder, server)
    if server.statistics:
        save_statistics(folder / STATISTICS, server.statistics, server.intensity)
    return {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **server.results()}


def write_models(folder: Path, server: FederationServer) -> None:
    """Write the selected model, if any, and the last model, each with its exchange."""
    best = server.selection
    models = {GLOBAL_MODEL: (best.state, best.payload)} if best.round else {}
    for name, (state, payload) in {**models, FINAL_MODEL: (server.state, server.payload)}.items():
        write_state(folder / name, state)
        before_training = server.aggregation.needed_at_inference(server.once.payload)
        if exchange := {**before_training, **payload}:
            write_state(exchange_file(folder / name), exchange)


def write_state(path: Path, state: dict[str, Tensor]) -> None:
    """Write a state dict that ``torch.load(path, weights_only=True)`` can read on any machine."""
    plain = {key: value.detach().cpu().clone() for key, value in state.items()}
    write_atomic(path, lambda file: torch.save(plain, file))
