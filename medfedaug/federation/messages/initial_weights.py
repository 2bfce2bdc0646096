"""The weights that a run starts from, where they are given."""

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

from medfedaug.errors import ConfigError, first_line, warn
from medfedaug.federation.messages.messages import entries_hash
from medfedaug.models.weights import fit_weights, read_weights

INITIAL, INITIAL_FILE = "initial", "initial_weights.safetensors"
"""The prefix of the entries in `Request.once`, and the name of the file in a job."""

_TOLD = 40  # names of entries in `results.json`, at most
_HEADER = 4 * 2**20  # bytes of names and shapes in a file, at most


@dataclass(frozen=True)
class InitialWeights:
    """Given entries of the network's state dict, which replace the random initial ones.

    The server starts from them. The sites receive the shared ones with the model of the first round, and
    those that stay at the sites once, together with the results of the exchanges before training.

    Args:
        entries: by name, float32.
        report: which entries of the given file were used, and why others were not, ready for JSON.
    """

    entries: dict[str, Tensor]
    report: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, state: Mapping[str, Tensor]) -> InitialWeights:
        """The entries of a user's file that fit a network (`medfedaug.models.weights`).

        Raises:
            ConfigError: when the file holds no state dict, nothing of it fits, or it is not finite.
        """
        given = read_weights(path)
        fit = fit_weights(given, state)
        name = Path(path).name
        if not fit.entries:
            raise ConfigError(
                f"{path}: none of its {len(given)} entries fits the network: the file has for instance "
                f"{next(iter(given))}, the network {next(iter(state))}"
            )
        spoilt = [key for key, value in fit.entries.items() if not bool(torch.isfinite(value).all())]
        if spoilt:
            raise ConfigError(f"{path}: NaN or infinite values in {spoilt[0]}")
        report = {
            "file": name,
            "loaded": len(fit.entries),
            "of": fit.total,
            "skipped": dict(list(fit.skipped.items())[:_TOLD]),
            "missing": fit.missing[:_TOLD],
        }
        if 2 * len(fit.entries) < fit.total:
            warn(f"{name}: only {len(fit.entries)} of {fit.total} entries of the network are started from it")
        return cls(fit.entries, report)

    def summary(self) -> list[str]:
        """The report in words, a line for each entry that was not used."""
        loaded, of, file = (self.report[name] for name in ("loaded", "of", "file"))
        told = f"{loaded} of {of} entries of the network from {file}"
        return [told, *(f"  not used: {name} ({why})" for name, why in self.report["skipped"].items())]

    @property
    def digest(self) -> str:
        """A fingerprint of names and values, for `medfedaug.config.run.RunConfig.init`."""
        text = entries_hash(self.entries)
        # In groups, as it is read, and as NVFlare does not take it for a secret in the job.
        return " ".join(text[i : i + 8] for i in range(0, len(text), 8))

    def put_into(self, state: Mapping[str, Tensor], digest: str | None) -> dict[str, Tensor]:
        """The state dict of a network with the entries in it.

        Raises:
            ConfigError: when these are other weights than the run's, or not of its network.
        """
        if self.digest != digest:
            raise ConfigError("the initial weights are not those that the run was configured with")
        for name, value in self.entries.items():
            if name not in state or value.shape != state[name].shape:
                raise ConfigError(f"the initial weights are not of the run's network: {name}")
        return {**state, **{name: value.clone() for name, value in self.entries.items()}}

    def kept(self, keys: Collection[str]) -> dict[str, Tensor]:
        """The entries that stay at the sites, with the prefix for `Request.once`."""
        return {f"{INITIAL}/{name}": value for name, value in self.entries.items() if name in keys}

    def save(self, path: Path) -> None:
        """Write them for a job, as safetensors: a format that holds numbers and no code."""
        save_file(self.entries, path, {"report": json.dumps(self.report)})

    @classmethod
    def load(cls, path: Path, state: Mapping[str, Tensor]) -> InitialWeights:
        """The inverse of `save`, at the server of a job.

        Raises:
            ConfigError: when the file is missing, larger than the network, or not of its entries.
        """
        room = sum(value.nbytes for value in state.values()) + _HEADER
        try:
            if path.stat().st_size > room:
                raise ConfigError(f"{path.name}: larger than the run's network")
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                entries = {name: file.get_tensor(name) for name in names}
                report = json.loads((file.metadata() or {}).get("report", "{}"))
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(
                f"{path.name}: the job's initial weights cannot be read ({first_line(error)})"
            ) from error
        return cls(entries, report if isinstance(report, dict) else {"loaded": len(entries)})
