"""A site's state between rounds, in memory and on disk."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from medfedaug.errors import MedFedAugError
from medfedaug.federation.messages.checkpoint import load_checkpoint, save_checkpoint
from medfedaug.federation.messages.messages import entries_hash, split_frozen
from medfedaug.methods.base import Payload, SitePart
from medfedaug.utils.files import remove_unfinished


@dataclass(frozen=True)
class LocalState:
    """A site's state after a round: unsent entries of the network, and `SitePart.state` by method."""

    network: dict[str, Tensor]
    methods: dict[str, Payload]

    @classmethod
    def of(cls, network: nn.Module, keys: Iterable[str], parts: Mapping[str, SitePart]) -> LocalState:
        """Copy the state after a finished round."""
        state = network.state_dict()
        return cls(
            network={key: _copy(state[key]) for key in keys},
            methods={
                name: {key: _copy(value) for key, value in part.state().items()}
                for name, part in parts.items()
            },
        )


def read_local_states(file: Path) -> dict[int, LocalState]:
    """Read a site's states of a run, by round; none if the file is missing."""
    return _states(_load(file))


def _load(file: Path | None) -> dict[str, Any]:
    return load_checkpoint(file) if file is not None and file.exists() else {}


def _states(saved: Mapping[str, Any]) -> dict[int, LocalState]:
    return {round_: LocalState(**kept) for round_, kept in saved.get("rounds", {}).items()}


class RoundMemory:
    """Keeps the states of the selected round (for the test), the last round and the round before it.

    The server may have to repeat a round, which needs the state before it.

    Args:
        folder: a folder that survives the process; ``None`` keeps everything in memory.

    Attributes:
        settings: the hash of the run's settings, to which the state belongs.
        sent: the site's payload before training; ``None`` until then.
        once: the received exchange before training, with the entries of the model that no site trains.
        frozen: a hash of these entries; empty for none.
        present: the round whose state the network and the methods hold; 0 for none yet, -1 if the network's
            state belongs to no round.
        checkpointed: the rounds from which a restarted server would continue.
    """

    def __init__(self, site: str, folder: Path | None) -> None:
        self.site, self.folder = site, folder
        self.run = self.settings = ""
        self.sent: Payload | None = None
        self.once: Payload = {}
        self.frozen = ""
        self.present = 0
        self.checkpointed: tuple[int, ...] = ()
        self._rounds: dict[int, LocalState] = {}

    def enter(self, run: str, settings: str) -> bool:
        """Load the states of a run, if the site took part before a restart; return whether the run is new.

        Raises:
            MedFedAugError: when the states of this name are of a run with other settings: what stays at the
                site could leave by another method.
        """
        if run == self.run and self.sent is None and not self.begun:
            self.settings = settings  # the run has got its plan
        if (run, settings) == (self.run, self.settings):
            return False
        if not re.fullmatch(r"[0-9a-f]{32}", run):  # it becomes a file name
            raise MedFedAugError(f"site {self.site}: {run[:40]!r} is not the identity of a run")
        if self.folder is not None:
            remove_unfinished(self.folder)
        saved = _load(self._file(run))
        if run == self.run or (saved and saved["settings"] != settings):
            raise MedFedAugError(f"site {self.site}: run {run} has other settings here; it cannot continue")
        # Only now, so that a request after a failed load does not meet an empty memory.
        self.run, self.settings, self.present = run, settings, 0
        self.sent = saved.get("sent")
        frozen = _load(self._file(run, ".frozen.pt")).get("entries", {})
        self.once, self.frozen = {**saved.get("once", {}), **frozen}, entries_hash(frozen)
        self._rounds = _states(saved)
        return True

    @property
    def begun(self) -> bool:
        """Return whether the site has begun to train in this run."""
        return bool(self._rounds) or self.present != 0

    def latest(self, round_: int) -> int:
        """Return the last round up to the given one in which this site trained; 0 for none."""
        return max((r for r in self._rounds if r <= round_), default=0)

    def before(self, round_: int) -> LocalState | None:
        """Return the state with which the site begins a round; ``None`` for its first round."""
        return self._rounds.get(self.latest(round_ - 1))

    def is_ahead(self, round_: int) -> bool:
        """Return whether the site has trained, but in no round up to the given one."""
        return self.begun and not self.latest(round_)

    def start_over(self) -> None:
        """Forget every round. The caller rebuilds network and methods."""
        self._rounds, self.present = {}, 0

    def forget(self, selected: int, current: int) -> None:
        """Drop the states that no later request can need."""
        needed = {self.latest(round_) for round_ in (selected, current - 1, *self.checkpointed)}
        self._rounds = {r: state for r, state in self._rounds.items() if r in needed}

    def remember(self, round_: int, state: LocalState) -> None:
        """Keep the state after a finished round, which the network holds."""
        self._rounds[round_] = state
        self.present = round_

    def recall(self, round_: int) -> LocalState | None:
        """Return the state of a round to load; ``None`` if the network holds it, or the round is 0."""
        if not round_ or round_ == self.present:
            return None
        self.present = round_
        return self._rounds[round_]

    def take_once(self, once: Payload) -> None:
        """Keep the exchange before training; write the entries that no site trains to a file once."""
        self.once = once
        entries, _ = split_frozen(once)
        frozen = entries_hash(entries)
        path = self._file(self.run, ".frozen.pt")
        if frozen not in ("", self.frozen) and path is not None:
            save_checkpoint(path, {"entries": entries}, private=True)
        self.frozen = frozen

    def save(self) -> None:
        """Write the file, if the memory has a folder."""
        path = self._file(self.run)
        if path is not None:
            rounds = {r: vars(kept) for r, kept in self._rounds.items()}
            _, once = split_frozen(self.once)
            whose = {"run": self.run, "settings": self.settings}
            content = {**whose, "sent": self.sent, "once": once, "rounds": rounds}
            save_checkpoint(path, content, private=True)

    def _file(self, run: str, suffix: str = ".pt") -> Path | None:
        return self.folder / f"{run}{suffix}" if self.folder is not None and run else None


def _copy(value: Tensor) -> Tensor:
    return value.detach().cpu().clone()
