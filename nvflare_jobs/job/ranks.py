"""Several processes of a site in which a script's loop trains together, one for each GPU.

Rank 0 is the process of the site's job. It alone has the site's guard and ledger, answers the server, and
scores. Its peers, the other ranks, run the same script, as under ``torchrun``: all are one process group of
PyTorch, in which the script's `DistributedDataParallel` averages gradients and its `DistributedSampler`
distributes the samples. A round begins in each peer as after a restart, with the network and the kept state
of rank 0. At its end a peer reports a hash of its weights, and nothing else of it counts.
"""

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
from contextlib import ExitStack, contextmanager, suppress
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
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.utils import plugins

_PATIENCE = 600.0  # seconds that a rank waits for another one, in a step or at the end of a round
_TO_BEGIN, _TO_END = 600.0, 10.0
"""Seconds for a rank to import its packages, and for a script after its last round."""


@dataclass(frozen=True)
class _Start:
    """Parameters of a peer's process."""

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
        separate_gpus = self.device.type == "cuda" and torch.cuda.device_count() >= self.count
        dist.init_process_group(
            "nccl" if separate_gpus and dist.is_nccl_available() else "gloo",
            store=dist.FileStore(self.store, self.count),
            rank=self.rank,
            world_size=self.count,
            timeout=timedelta(seconds=self.patience),
        )


class _Peer:
    """Another rank and its process."""

    def __init__(self, rank: int) -> None:
        self.rank, self.lost = rank, ""
        self.report: str | None = None
        """The hash of its weights, while it waits for a round; empty before the first."""
        self._connection, remote = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()", str(remote.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[remote.fileno()],
        )
        remote.close()

    def send(self, message: bytes) -> None:
        """Send a message, unless the rank is lost."""
        self.report = None
        with suppress(OSError):
            self._connection.send_bytes(message)

    def listen(self, seconds: float = 0.0) -> bool:
        """Wait for a report; return whether it has come, or the rank is lost."""
        if self.report is None and not self.lost and self._connection.poll(seconds):
            try:
                self.report, self.lost = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                self.lost = f"exit status {self._process.wait()}"
        return bool(self.lost) or self.report is not None

    def over(self) -> None:
        """Let its script end, or kill it in the middle of a round."""
        if self.report is None:
            self._process.kill()
        self.send(pickle.dumps(None))

    def end(self) -> None:
        try:
            self._process.wait(_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()


class Ranks:
    """The peers of a site's process, and their group; no peers where one process trains."""

    def __init__(self, script: Path, session: ScriptSession, settings: SiteSettings) -> None:
        self._session, self._count, self._group = session, settings.processes, None
        self._peers: list[_Peer] = []
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
        with ExitStack() as after_an_error:
            after_an_error.callback(self.close)
            after_an_error.callback(self.over)
            self._peers = [_Peer(rank) for rank in range(1, self._count)]
            for peer in self._peers:
                peer.send(pickle.dumps(replace(start, rank=peer.rank)))
            self.collect(seconds=_TO_BEGIN)
            if lost := self.lost():
                raise MedFedAugError(
                    f"site {site.name}: {lost[0]}the site's processes ended before the script began "
                    f"({withheld(lost[1])}); the site's log says why"
                )
            for peer in self._peers:
                peer.report = None
            start.join_group()
            self._group = dist.group.WORLD
            after_an_error.pop_all()

    def lost(self, seconds: float = 0.0) -> tuple[str, str] | None:
        """Return the name of a rank that has ended, and the reason."""
        for peer in self._peers:
            if peer.listen(seconds) and peer.lost:
                return f"rank {peer.rank} of {self._count} of ", peer.lost
        return None

    @contextmanager
    def in_group(self) -> Iterator[None]:
        """Set the process group for the script; only the site itself scores and receives."""
        dist.group.WORLD = self._group
        try:
            yield
        finally:
            dist.group.WORLD = None

    def begin(self, round_: LocalRound) -> None:
        """Let the peers begin a round with the state of rank 0."""
        if self._peers:
            site, memory = self._session.site, self._session.memory
            kept = memory.before(round_.number)
            methods = kept.methods if kept is not None else {}
            network = {key: value.cpu() for key, value in site.network.state_dict().items()}
            message = pickle.dumps((round_, network, methods, site.payload, memory.once))
            for peer in self._peers:
                peer.send(message)

    def collect(self, stopped: Callable[[], bool] = lambda: False, seconds: float | None = None) -> bool:
        """Wait until all peers have reached the end of the round; return whether they have."""
        seconds = _PATIENCE if seconds is None else seconds
        until = time.monotonic() + seconds
        for peer in self._peers:
            while not peer.listen(0.2):
                if stopped():
                    return False
                if time.monotonic() > until:
                    raise MedFedAugError(
                        f"site {self._session.site.name}: rank {peer.rank} of {self._count} is not as far as "
                        f"rank 0 after {seconds:g} s; all ranks have to take the same steps"
                    )
        return not any(peer.lost for peer in self._peers)

    def finish(self) -> None:
        """Check that all ranks have the same weights after a round."""
        for peer in self._peers:
            if peer.report != _weights(self._session.training):
                raise MedFedAugError(
                    f"site {self._session.site.name}: rank {peer.rank} of {self._count} has other weights "
                    "than rank 0 after the round; take the same steps in all ranks, and pass each batch "
                    "through DistributedDataParallel(network), which averages the gradients"
                )

    def over(self) -> None:
        """Tell the peers that no round follows."""
        for peer in self._peers:
            peer.over()

    def close(self) -> None:
        """Wait for the end of the peers' processes."""
        for peer in self._peers:
            peer.end()
        self._peers = []
        if self._group is not None:
            dist.group.WORLD, self._group = self._group, None
            dist.destroy_process_group()
        if self._count > 1:
            self._folder.cleanup()


class _SiteOfRank(CustomLoop):
    """The site in a peer's process, whose main program, the script, asks it for rounds."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._messages, self._began = connection, Queue[Any](), False
        # The process ends with rank 0, also in the middle of a step.
        threading.Thread(target=self._listen, daemon=True).start()
        self._start: _Start = self._messages.get()
        start = self._start
        sys.path[:], sys.argv = start.path, [start.script]
        plugins.restrict(start.settings.plugins)
        bundles.restrict(start.settings.bundles)
        self.trainer = SiteTrainer(start.config, start.folder, threads=start.threads, machine=start.settings)
        self.trainer.device = start.device
        if start.device.type == "cuda":
            index = ((start.device.index or 0) + start.rank) % torch.cuda.device_count()
            self.trainer.device = torch.device("cuda", index)
            torch.cuda.set_device(index)
        self.trainer.loop = self

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._messages.put(pickle.loads(self._connection.recv_bytes()))
        os._exit(1)

    def send(self, weights: str | None, error: str = "") -> None:
        self._connection.send_bytes(pickle.dumps((weights, error)))

    def run(self) -> None:
        self.trainer.open(self._start.name)
        self.send("")
        self._start.join_group()
        with script_at(self._session, self._wait):
            runpy.run_path(self._start.script, run_name="__main__")

    def start(self, session: ScriptSession) -> None:
        """Keep the session; `run` starts the script."""
        self._session = session

    def train(self, round_: LocalRound) -> None:
        """Do nothing: the script takes its rounds by `_wait`."""

    def _wait(self) -> LocalRound | None:
        training, parts = self._session.training, self.trainer.parts.values()
        if self._began:
            for part in parts:
                part.end_round()
        self.send(_weights(training))
        if (message := self._messages.get()) is None:
            return None
        round_, network, methods, payload, once = message
        self._began, self.trainer.round = True, round_.number
        for name, state in methods.items():
            if state:
                self.trainer.parts[name].restore(state)
        self.trainer.receive({}, payload, once)
        training.network.load_state_dict(network)
        torch.manual_seed(round_.seed)
        for part in parts:
            part.start_round()
        seed = derive_seed(round_.seed, "rank", self._start.rank)
        torch.manual_seed(seed)
        training.begin(self.trainer.training_dataset(seed))
        return round_


def main() -> None:
    """Run a peer until the end of its script, an error, or the end of rank 0."""
    site = _SiteOfRank(Connection(int(sys.argv[1])))
    try:
        site.run()
    except BaseException as error:
        traceback.print_exc()
        site.send(None, traceback.format_exception_only(error)[-1].strip())
        sys.stderr.flush()
        os._exit(1)


def _weights(training: LoopTraining) -> str:
    return digest_of(dict(training.network.named_parameters()))
