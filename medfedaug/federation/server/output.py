"""The files of a finished run: models and ``results.json``, each written completely or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medfedaug.errors import ConfigError
from medfedaug.federation.job_folder import FINAL_MODEL, GLOBAL_MODEL, RESULTS, STATISTICS
from medfedaug.federation.server.server import FederationServer
from medfedaug.methods.base import Payload
from medfedaug.statistics import save_statistics
from medfedaug.utils.files import sha256, write_atomic, write_json

__all__ = [
    "HASHES",
    "check_unchanged",
    "exchange_file",
    "file_hashes",
    "write_files",
    "write_models",
    "write_run",
    "write_state",
]

HASHES = "sha256"
"""The entry of ``results.json`` with the hash of each file that a prediction uses, by name."""


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


def file_hashes(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a run's folder that a prediction uses, by its name."""
    models = [folder / name for name in (GLOBAL_MODEL, FINAL_MODEL)]
    files = [folder / STATISTICS, *models, *(exchange_file(model) for model in models)]
    return {file.name: sha256(file) for file in sorted(files) if file.is_file()}


def check_unchanged(path: Path, record: Mapping[str, Any]) -> None:
    """Check that a file of a run is as the run wrote it; nothing where its record has no hashes.

    A model under another name, such as one that was trained further, has no hash in the record.

    Args:
        path: the file, which may be missing.
        record: what ``results.json`` says.

    Raises:
        ConfigError: when it is another one, is missing, or is an exchange where the run wrote none.
    """
    hashes = record.get(HASHES)
    if not isinstance(hashes, Mapping):
        return
    expected = hashes.get(path.name)
    try:
        found = sha256(path) if path.exists() else None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    if found == expected or (expected is None and not _is_exchange(path)):
        return
    if found is None:
        what = "is not there, and the run wrote one"
    else:
        what = "is of no run" if expected is None else "is not as the run wrote it"
    raise ConfigError(
        f"{path}: {what} ({HASHES} in {RESULTS}): damaged, changed or mixed up. Put the original back; if "
        f"the change is meant, correct or remove {path.name} under {HASHES} in {RESULTS}"
    )


def _is_exchange(path: Path) -> bool:
    return path.name in [exchange_file(Path(model)).name for model in (GLOBAL_MODEL, FINAL_MODEL)]


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


def exchange_file(model: Path) -> Path:
    """The path of the methods' exchange of a model: ``global_exchange.pt`` beside ``global_model.pt``."""
    return model.with_name(f"{model.stem.removesuffix('_model')}_exchange{model.suffix}")


def write_state(path: Path, state: dict[str, Tensor]) -> None:
    """Write a state dict that ``torch.load(path, weights_only=True)`` can read on any machine."""
    plain = {key: value.detach().cpu().clone() for key, value in state.items()}
    write_atomic(path, lambda file: torch.save(plain, file))
