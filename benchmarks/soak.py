"""Run a thousand rounds in one process with random failures of sites and server; check losses and memory.

    python benchmarks/soak.py --work DIR --rounds 1000

Five sites of small photographs train with FedRDN and FedBN; two of them join late. In every round each site
may raise, not answer, send NaN, be killed with its answer, or have a full disk; the server may be killed
after a round, or have a full disk when it saves. A killed process starts again from its files.

After each round the script checks that the model is the mean of exactly the sound updates, to the bit, and
that the record has every fault under its site's name.

It prints three numbers of memory, after a fifth of the rounds and at the end: resident memory, memory that
the C library's allocator has handed out (glibc), and the number of Python's blocks. Where only the first
grows, the allocator keeps returned memory.
"""

import ctypes
import errno
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import torch
from measure import hardware, parser
from PIL import Image
from torch import Tensor

from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.sites import find_sites
from medfedaug.errors import StorageError
from medfedaug.federation import Carrier, FederationServer, Reply, Request, Site, SiteTrainer, run
from medfedaug.federation.job_folder import server_checkpoint
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.protocol import Accept
from medfedaug.functional.means import WeightedMean
from medfedaug.methods import parse_methods
from medfedaug.simulate import configure

FAULTS = ("raise", "hang", "nan", "kill", "disk full")
JOINS = {"A": 0, "B": 0, "C": 0, "D": 0.1, "E": 0.4}
"""Share of the rounds after which a site joins."""
SHARE_OF_FAULTS, SHARE_OF_STOPS = 0.06, 0.02


class _Allocated(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks"),
            *("fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def held() -> dict[str, float]:
    """Return the resident and the allocated MiB, and the number of Python's blocks."""
    gc.collect()
    numbers = {"resident": psutil.Process().memory_info().rss / 2**20}
    allocator = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if allocator is not None:
        allocator.restype = _Allocated
        status = allocator()
        numbers["allocated"] = (status.uordblks + status.hblkhd) / 2**20
    numbers["Python's blocks"] = sys.getallocatedblocks()
    return {name: round(number, 1) for name, number in numbers.items()}


class Killed(Exception):
    """Ends the server's process."""


def write_sites(root: Path) -> None:
    """Write photographs of two classes, 6 to 18 at a site."""
    for index, name in enumerate(JOINS):
        random_ = np.random.default_rng(index)
        for label in ("cat", "dog"):
            folder = root / name / label
            folder.mkdir(parents=True)
            for image in range(5 + 2 * index):
                pixels = random_.integers(0, 256, (28, 28, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{image}.png")


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no file be flushed to the disk."""
    with mock.patch(
        "medfedaug.utils.files.os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")
    ):
        yield


class Soak(Carrier):
    """Sites and a server that fail.

    Args:
        config: the run.
        work: the folder of data and state.
        seed: of the faults.
    """

    def __init__(self, config: RunConfig, work: Path, seed: int) -> None:
        self.config, self.work, self.random = config, work, random.Random(seed)
        self.sites = {name: self._start(name) for name in JOINS}
        self.planned: dict[str, str] = {}
        self.accepted: dict[str, tuple[float, dict[str, Tensor]]] = {}
        self.counts: Counter[str] = Counter()
        self.server: FederationServer | None = None
        self.memory: dict[int, dict[str, float]] = {}

    def _start(self, name: str) -> Site:
        return Site(name, SiteTrainer(self.config, self.work / "data", "cpu", self.work / "state" / name))

    def begin(self) -> None:
        """Start a server, from its checkpoint if there is one."""
        self.server = FederationServer(self.config, execution=Execution(min_sites=1))
        checkpoint = server_checkpoint(self.work / "state")
        if checkpoint.exists():
            self.server.restore(checkpoint)
        run(self.server, self)

    def connected(self) -> list[str]:
        """Return the sites that have joined."""
        assert self.server is not None
        done = self.server.round / self.config.rounds
        return sorted(name for name, share in JOINS.items() if done >= share)

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Ask one site after another; at least one site of a round does not fail."""
        failing = {name for name in sites if self.random.random() < SHARE_OF_FAULTS}
        if request.task != TRAIN or len(failing) == len(sites):
            failing = set()
        silent, self.planned, self.accepted = {}, {}, {}
        for name in sites:
            fault = self.random.choice(FAULTS) if name in failing else ""
            if fault:
                self.planned[name] = fault
                self.counts[fault] += 1
            if fault == "disk full":
                with full_disk():
                    reply = self.sites[name].answer(request)
            else:
                reply = self.sites[name].answer(request)
            if fault == "kill":
                self.sites[name] = self._start(name)
            if fault in ("kill", "hang"):
                silent[name] = f"site {name} did not answer"
                continue
            if fault == "raise":
                reply = Reply(request.task, request.round, error=f"site {name}: out of memory, say")
            if fault == "nan":
                reply.weights[next(iter(reply.weights))][:] = float("nan")
            used = accept(name, reply)
            if request.task == TRAIN:
                assert used is not bool(fault), (request.round, name, fault, reply.error)
                if used:
                    self.accepted[name] = float(reply.num_samples), reply.weights
        return silent

    def round_done(self, server: FederationServer) -> None:
        """Check the round, and save; the server may die here."""
        mean = WeightedMean()
        for _, (weight, weights) in sorted(self.accepted.items()):
            mean.add(weights, weight)
        expected = mean.result()
        assert all(torch.equal(server.state[key], value) for key, value in expected.items())
        entry = server.rounds[-1]
        assert entry["round"] == len(server.rounds) == server.round
        named = {trouble["site"] for trouble in (*entry["refused"], *entry["missing"])}
        assert named == set(self.planned), (entry, self.planned)
        if server.round in (self.config.rounds // 5, self.config.rounds):
            self.memory[server.round] = held()
        if self.random.random() < SHARE_OF_STOPS and server.round < self.config.rounds:
            self.counts["server's disk full"] += 1
            with full_disk():
                server.save(server_checkpoint(self.work / "state"))  # raises
        server.save(server_checkpoint(self.work / "state"))
        if self.random.random() < SHARE_OF_STOPS and server.round < self.config.rounds:
            self.counts["server killed"] += 1
            raise Killed


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--work", type=Path, required=True, help="an empty folder for data and state")
    arguments.add_argument("--rounds", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--out", type=Path, help="a JSON file for the summary")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    print(hardware(), flush=True)
    write_sites(options.work / "data")
    config = configure(
        find_sites(options.work / "data"),
        max_share=1.0,  # the check computes plain means
        methods=tuple(parse_methods("fedrdn,fedbn")),
        network="lenet5",
        rounds=options.rounds,
        local_steps=1,
        batch_size=4,
    )
    soak, started = Soak(config, options.work, options.seed), time.perf_counter()
    while True:
        try:
            soak.begin()
            break
        except (Killed, StorageError):
            soak.sites = {name: soak._start(name) for name in JOINS}
    server = soak.server
    assert server is not None
    rounds = server.rounds
    assert [entry["round"] for entry in rounds] == list(range(1, options.rounds + 1))
    assert set(server.results()["test"]["sites"]) == set(JOINS)
    summary = {
        "rounds": len(rounds),
        "faults": dict(sorted(soak.counts.items())),
        "updates used": sum("samples" in site for entry in rounds for site in entry["sites"].values()),
        "updates refused or missing": sum(len(e["refused"]) + len(e["missing"]) for e in rounds),
        "files left over": sorted(path.name for path in options.work.glob("state/**/.*")),
        "memory MiB": {str(number): soak.memory[number] for number in sorted(soak.memory)},
        "checkpoint KiB": os.path.getsize(server_checkpoint(options.work / "state")) // 1024,
        "seconds": round(time.perf_counter() - started),
        "hardware": hardware(),
    }
    assert not summary["files left over"]
    print(json.dumps(summary, indent=1))
    if options.out:
        options.out.write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
