"""Several processes of a site in which a script's loop trains together, one for each GPU.

Rank 0 is the process of the site's job. It alone has the site's guard and ledger, answers the server, and
scores. The other ranks run the same script beside it, as under ``torchrun``: all are one process group of
PyTorch, in which the script's own `DistributedDataParallel` averages gradients and its `DistributedSampler`
shares out the samples. As a round begins, rank 0 gives the others the state of its network and its methods.
As it ends, they tell it their losses, and nothing else of them counts.
"""

from __future__ import annotations

import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist

from medfedaug.client import script_at
from medfedaug.config import bundle_reference as bundles
from medfedaug.config.run import RunConfig, derive_seed
from medfedaug.data.base import SiteFolder
from medfedaug.errors import MedFedAugError, withheld
from medfedaug.federation.messages.messages import digest_of
from medfedaug.federation.site.local_training import LocalRound
from medfedaug.federation.site.script_training import CustomLoop, LoopTraining, ScriptSession
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.federation.site.training_state import capture, restore
from medfedaug.privacy.site_settings import SiteSettings
from medfedaug.utils import plugins

_PATIENCE = 600.0
"""Seconds that a rank waits for another one, in a step or at the end of a round."""
_TO_BEGIN, _TO_END = 600.0, 10.0
"""Seconds that a rank has to import its packages, and that a script has after its last round."""


@dataclass(frozen=True)
class _Start:
    """Everything that another rank needs to run the script at the site of rank 0."""

    rank: int
    count: int
    script: str
    path: list[str]
    store: str
    patience: float
    config: RunConfig
    folder: SiteFolder
    name: str
    device: torch.device
    threads: int
    settings: SiteSettings

    def join_group(self) -> None:
        """Form PyTorch's process group, which no other machine can reach."""
        loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        for backend in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{backend}_SOCKET_IFNAME", loopback)
        own_gpus = self.device.type == "cuda" and torch.cuda.device_count() >= self.count
        dist.init_process_group(
            "nccl" if own_gpus and dist.is_nccl_available() else "gloo",
            store=dist.FileStore(self.store, self.count),
            rank=self.rank,
            world_size=self.count,
            timeout=timedelta(seconds=self.patience),
        )


@dataclass(frozen=True)
class _Waiting:
    """Another rank waits for a round, and has trained in the one before."""

    losses: list[float]
    steps: int
    weights: str


class _Other:
    """Another rank, as rank 0 sees it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.lost = rank, ""
        self.told: _Waiting | None = None
        self._connection, there = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", str(there.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
        )
        there.close()

    def send(self, message: bytes) -> None:
        """Send it, unless the rank is lost."""
        self.told = None
        with suppress(OSError):
            self._connection.send_bytes(message)

    def listen(self, seconds: float = 0.0) -> bool:
        """Wait for its word, at most so long. Returns whether there is one, or the rank is lost."""
        if self.told is None and not self.lost and self._connection.poll(seconds):
            try:
                found = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                found = f"exit status {self._process.wait()}"
            self.told, self.lost = (None, found) if isinstance(found, str) else (found, "")
        return bool(self.lost) or self.told is not None

    def over(self) -> None:
        """Let its script end, or end it in the middle of a round."""
        if self.told is None:
            self._process.kill()
        self.send(pickle.dumps(None))

    def end(self) -> None:
        """Wait until it has ended."""
        try:
            self._process.wait(_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()


class Ranks:
    """The other ranks of a site, and their group; none where one process trains.

    Args:
        script: the training script.
        session: of rank 0.
        settings: of the site.
    """

    def __init__(self, script: Path, session: ScriptSession, settings: SiteSettings) -> None:
        self._session, self._count, self._group = session, settings.processes, None
        self._others: list[_Other] = []
        if self._count == 1:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="medfedaug-ranks-")
        site = session.site
        start = _Start(
            rank=0,
            count=self._count,
            script=str(script.resolve()),
            path=sys.path,
            store=str(Path(self._folder.name) / "store"),
            patience=_PATIENCE,
            config=site.config,
            folder=site.folder,
            name=site.name,
            device=site.device,
            threads=site.threads,
            settings=settings,
        )
        try:
            self._others = [_Other(rank) for rank in range(1, self._count)]
            for other in self._others:
                other.send(pickle.dumps(replace(start, rank=other.rank)))
            self.collect(seconds=_TO_BEGIN)
            if lost := self.lost():
                raise MedFedAugError(
                    f"site {site.name}: {lost[0]}the site's processes ended before the script began "
                    f"({withheld(lost[1])}); the site's log says why"
                )
            for other in self._others:
                other.told = None
            start.join_group()
            self._group = dist.group.WORLD
        except BaseException:
            self.over()
            self.close()
            raise

    def lost(self, seconds: float = 0.0) -> tuple[str, str] | None:
        """Return the name of a rank that has ended, and why."""
        for other in self._others:
            if other.listen(seconds) and other.lost:
                return f"rank {other.rank} of {self._count} of ", other.lost
        return None

    @contextmanager
    def in_group(self) -> Iterator[None]:
        """Within it the group is there, for the script; the site itself scores and receives alone."""
        dist.group.WORLD = self._group
        try:
            yield
        finally:
            dist.group.WORLD = None

    def begin(self, round_: LocalRound) -> None:
        """Let the other ranks begin a round as rank 0 does."""
        if self._others:
            message = pickle.dumps(
                (round_, self._session.site.memory.once, capture(_roots(self._session.training)))
            )
            for other in self._others:
                other.send(message)

    def collect(self, stopped: Callable[[], bool] = lambda: False, seconds: float | None = None) -> bool:
        """Wait until all other ranks have come as far as rank 0. Returns whether they have."""
        seconds = _PATIENCE if seconds is None else seconds
        until = time.monotonic() + seconds
        for other in self._others:
            while not other.listen(0.2):
                if stopped():
                    return False
                if time.monotonic() > until:
                    raise MedFedAugError(
                        f"site {self._session.site.name}: rank {other.rank} of {self._count} is not as far "
                        f"as rank 0 after {seconds:g} s; all ranks have to take the same steps"
                    )
        return not any(other.lost for other in self._others)

    def finish(self) -> None:
        """End a round that all have trained in: average the losses over the ranks."""
        if not self._others:
            return
        training, losses = self._session.training, []
        for other in self._others:
            who = f"site {self._session.site.name}: rank {other.rank} of {self._count}"
            assert other.told is not None
            if other.told.steps != training.steps:
                raise MedFedAugError(
                    f"{who} took {other.told.steps} steps in the round, and rank 0 took {training.steps}; "
                    "all ranks have to take the same steps"
                )
            if other.told.weights != _weights(training):
                raise MedFedAugError(
                    f"{who} has other weights than rank 0 after the round; pass each batch through "
                    "DistributedDataParallel(network), which averages the gradients"
                )
            losses.append(other.told.losses)
        training.average(losses)

    def over(self) -> None:
        """Tell the other ranks that there is no more round."""
        for other in self._others:
            other.over()

    def close(self) -> None:
        """Wait until the other ranks have ended."""
        for other in self._others:
            other.end()
        self._others = []
        if self._group is not None:
            dist.group.WORLD, self._group = self._group, None
            dist.destroy_process_group()
        if self._count > 1:
            self._folder.cleanup()


class _SiteOfRank(CustomLoop):
    """The site in another rank: its script, which is the main program here, asks it for rounds."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._messages, self._began = connection, Queue[Any](), False
        # Also in the middle of a step the process goes when rank 0 does.
        threading.Thread(target=self._listen, daemon=True).start()
        self._told: _Start = self._messages.get()
        told = self._told
        sys.path[:], sys.argv = told.path, [told.script]
        plugins.restrict(told.settings.plugins)
        bundles.restrict(told.settings.bundles)
        self.trainer = SiteTrainer(told.config, told.folder, threads=told.threads, machine=told.settings)
        self.trainer.device = told.device
        if told.device.type == "cuda":
            index = ((told.device.index or 0) + told.rank) % torch.cuda.device_count()
            self.trainer.device = torch.device("cuda", index)
            torch.cuda.set_device(index)
        self.trainer.loop = self

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._messages.put(pickle.loads(self._connection.recv_bytes()))
        os._exit(1)

    def tell(self, message: Any) -> None:
        """Tell rank 0."""
        self._connection.send_bytes(pickle.dumps(message))

    def run(self) -> None:
        """Run the script to its end."""
        self.trainer.open(self._told.name)
        self.tell(_Waiting([], 0, ""))
        self._told.join_group()
        with script_at(self._session, self._wait):
            runpy.run_path(self._told.script, run_name="__main__")

    def start(self, session: ScriptSession) -> None:
        """The script is started by `run`."""
        self._session = session

    def train(self, round_: LocalRound) -> None:
        """The script takes its rounds itself, by `_wait`."""

    def _wait(self) -> LocalRound | None:
        training, parts = self._session.training, self.trainer.parts.values()
        if self._began:
            for part in parts:
                part.end_round()
        losses = [float(loss) for loss in training.losses]
        self.tell(_Waiting(losses, training.steps, _weights(training)))
        if (message := self._messages.get()) is None:
            return None
        round_, once, state = message
        self.trainer.receive({}, once=once)
        self._began, self.trainer.round = True, round_.number
        seed = derive_seed(round_.seed, "rank", self._told.rank)
        torch.manual_seed(seed)
        for part in parts:
            part.start_round()
            part.continue_round()
        restore(_roots(training), state)
        training.begin(self.trainer.training_dataset(seed))
        return round_


def main() -> None:
    """Run another rank, which ends with its script, with an error in it, or with rank 0."""
    site = _SiteOfRank(Connection(int(sys.argv[1])))
    try:
        site.run()
    except BaseException as error:
        traceback.print_exc()
        site.tell(traceback.format_exception_only(error)[-1].strip())
        sys.stderr.flush()
        os._exit(1)


def _roots(training: LoopTraining) -> dict[str, Any]:
    return {"network": training.network, "parts": dict(training.parts)}


def _weights(training: LoopTraining) -> str:
    return digest_of(dict(training.network.named_parameters()))
