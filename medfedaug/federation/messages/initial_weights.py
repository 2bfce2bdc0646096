"""Initial weights of a run from a user's file."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medfedaug.errors import ConfigError, config_errors, warn
from medfedaug.federation.messages.messages import entries_hash
from medfedaug.models.entries import fit_weights, read_weights

INITIAL, INITIAL_FILE = "initial", "initial_weights.safetensors"
"""The prefix of the entries in `Request.once`, and the name of the file in a job."""

_MOST_NAMES = 40  # names of entries in `results.json`


@dataclass(frozen=True)
class InitialWeights:
    """Entries of the network's state dict that replace the random initial ones.

    The server starts from them. The sites receive the shared entries with the model of the first round, and
    the entries that stay at the sites once, with the results of the exchanges before training.
    """

    entries: dict[str, Tensor]  # float32 entries by name
    # The used entries of the file, and the reasons for unused ones, as JSON types.
    report: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, state: Mapping[str, Tensor]) -> InitialWeights:
        """Read the entries of a user's file that fit a network (`medfedaug.models.entries`)."""
        weights = read_weights(path)
        fit = fit_weights(weights, state)
        name = Path(path).name
        if not fit.entries:
            raise ConfigError(
                f"{path}: none of its {len(weights)} entries fits the network: the file has for instance "
                f"{next(iter(weights))}, the network {next(iter(state))}"
            )
        for key, value in fit.entries.items():
            if not bool(torch.isfinite(value).all()):
                raise ConfigError(f"{path}: NaN or infinite values in {key}")
        report = {
            "file": name,
            "loaded": len(fit.entries),
            "of": fit.total,
            "skipped": dict(list(fit.skipped.items())[:_MOST_NAMES]),
            "missing": fit.missing[:_MOST_NAMES],
        }
        if 2 * len(fit.entries) < fit.total:
            warn(f"{name}: only {len(fit.entries)} of {fit.total} entries of the network are started from it")
        return cls(fit.entries, report)

    @property
    def digest(self) -> str:
        """The hash of names and values, for `medfedaug.config.run.RunConfig.init`."""
        text = entries_hash(self.entries)
        # In groups, for readers, and so that NVFlare does not take it for a secret in the job.
        return " ".join(text[i : i + 8] for i in range(0, len(text), 8))

    def put_into(self, state: Mapping[str, Tensor], digest: str | None) -> dict[str, Tensor]:
        """Return the state dict of a network with these entries, whose digest fits the run's network."""
        if self.digest != digest:
            raise ConfigError("the initial weights are not those that the run was configured with")
        return {**state, **{name: value.clone() for name, value in self.entries.items()}}

    def kept(self, keys: Collection[str]) -> dict[str, Tensor]:
        """Return the entries that stay at the sites, with the prefix for `Request.once`."""
        return {f"{INITIAL}/{name}": value for name, value in self.entries.items() if name in keys}

    def save(self, path: Path) -> None:
        """Write the weights for a job, as safetensors, which hold no code."""
        save_file(self.entries, path, {"report": json.dumps(self.report)})

    @classmethod
    def load(cls, path: Path) -> InitialWeights:
        """Read a file of `save` at the server of a job."""
        problem = f"{path.name}: the job's initial weights cannot be read"
        with config_errors(problem, OSError, ValueError, SafetensorError), safe_open(path, "pt") as file:
            entries = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            report = json.loads((file.metadata() or {}).get("report", "{}"))
        return cls(entries, report if isinstance(report, dict) else {"loaded": len(entries)})
