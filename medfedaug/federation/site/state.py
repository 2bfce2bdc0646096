"""State that a site keeps for itself from round to round, in memory and on disk."""

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
    """State of a site after a round: entries of the network, and the methods' own state.

    Args:
        network: entries of the state dict that are neither sent nor received.
        methods: by method, `medfedaug.methods.base.SitePart.state`.
    """

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
    """Read what a site kept in a run, by round; nothing where there is no file."""
    saved = load_checkpoint(file) if file.exists() else {}
    return _states(saved)


def _states(saved: Mapping[str, Any]) -> dict[int, LocalState]:
    return {round_: LocalState(**kept) for round_, kept in saved.get("rounds", {}).items()}


class RoundMemory:
    """Keeps the state of three rounds: the selected one (for the test), the last one and the one before it.

    The one before the last is kept because the server may have to repeat a round.

    Args:
        site: the site's name, for messages.
        folder: a folder that survives the process; ``None`` keeps everything in memory only.

    Attributes:
        run: the run that it belongs to.
        sent: what the site sent before training; ``None`` until then.
        once: what it received in return, with the entries of the model that no site trains.
        frozen: a hash of these; empty for none.
        present: the round whose state is now in the network and in the methods; 0 for none yet, -1 if the
            network's state belongs to no round.
        checkpointed: the rounds from which the server would continue if it were started again now.
    """

    def __init__(self, site: str, folder: Path | None) -> None:
        self.site, self.folder = site, folder
        self.run = ""
        self.sent: Payload | None = None
        self.once: Payload = {}
        self.frozen = ""
        self.present = 0
        self.checkpointed: tuple[int, ...] = ()
        self._rounds: dict[int, LocalState] = {}

    def enter(self, run: str) -> bool:
        """Load what was kept in a run, if the site took part in it before a restart.

        Returns:
            Whether this is a different run than before.
        """
        if run == self.run:
            return False
        if not re.fullmatch(r"[0-9a-f]{32}", run):  # it becomes the name of a file
            raise MedFedAugError(f"site {self.site}: {run[:40]!r} is not the identity of a run")
        if self.folder is not None:
            remove_unfinished(self.folder)
        path = self._file(run)
        saved = load_checkpoint(path) if path is not None and path.exists() else {}
        # Only now: a request after one that failed here must not find an empty memory of the run.
        self.run, self.present = run, 0
        self.sent = saved.get("sent")
        file = self._frozen_file(run)
        frozen = load_checkpoint(file)["entries"] if file is not None and file.exists() else {}
        self.once, self.frozen = {**saved.get("once", {}), **frozen}, entries_hash(frozen)
        self._rounds = _states(saved)
        return True

    @property
    def begun(self) -> bool:
        """Return whether the site has trained, or is training, in this run."""
        return bool(self._rounds) or self.present != 0

    def latest(self, round_: int) -> int:
        """The last round up to the given one in which this site trained. It may have missed some rounds."""
        return max((r for r in self._rounds if r <= round_), default=0)

    def is_ahead(self, round_: int) -> bool:
        """Return whether the site has trained, but in no round up to the given one.

        As where it joined after the selected round, or the server repeats the first round that it was in.
        """
        return self.begun and not self.latest(round_)

    def start_over(self) -> None:
        """Forget every round. The caller replaces what network and methods hold of one."""
        self._rounds, self.present = {}, 0

    def network_is_new(self) -> None:
        """Note that the network has been built anew: no round's state is in it."""
        self.present = 0

    def forget(self, selected: int, current: int) -> None:
        """Drop the state of rounds that can no longer be requested."""
        needed = {self.latest(round_) for round_ in (selected, current - 1, *self.checkpointed)}
        self._rounds = {r: state for r, state in self._rounds.items() if r in needed}

    def remember(self, round_: int, state: LocalState) -> None:
        """Keep the state after a finished round, which is the one in the network."""
        self._rounds[round_] = state
        self.present = round_

    def recall(self, round_: int) -> LocalState | None:
        """Return the state that was kept after a round, for the caller to load.

        Returns:
            ``None`` if it is in the network already, or the round is 0.
        """
        if not round_ or round_ == self.present:
            return None
        self.present = round_
        return self._rounds[round_]

    def take_once(self, once: Payload) -> None:
        """Keep what was received once; what no site trains lies in a file that is written once."""
        self.once = once
        entries, _ = split_frozen(once)
        found = entries_hash(entries)
        path = self._frozen_file(self.run)
        if found not in ("", self.frozen) and path is not None:
            save_checkpoint(path, {"entries": entries}, private=True)
        self.frozen = found

    def save(self) -> None:
        """Write the file, if there is a folder."""
        path = self._file(self.run)
        if path is not None:
            rounds = {r: vars(kept) for r, kept in self._rounds.items()}
            _, once = split_frozen(self.once)
            content = {"run": self.run, "sent": self.sent, "once": once, "rounds": rounds}
            save_checkpoint(path, content, private=True)

    def half_file(self) -> Path | None:
        """The file of a round that is under way (`medfedaug.federation.site.interrupted_round`)."""
        path = self._file(self.run)
        return path.with_suffix(".half.pt") if path is not None else None

    def _frozen_file(self, run: str) -> Path | None:
        return self.folder / f"{run}.frozen.pt" if self.folder is not None and run else None

    def _file(self, run: str) -> Path | None:
        return self.folder / f"{run}.pt" if self.folder is not None and run else None


def _copy(value: Tensor) -> Tensor:
    return value.detach().cpu().clone()
