"""Workers of a sweep: this process, processes of this machine, jobs of Slurm, or workers of Dask.

A sweep hands each run to one worker. A run's folder has all that any worker needs to continue it: a run whose
worker was killed goes on after its last finished round, on this machine or another that sees the same files.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from filelock import FileLock

from medfedaug.data.preparation.decoded_cache import keep_decoded
from medfedaug.errors import ConfigError, first_line
from medfedaug.experiments.planned import PlannedRun

Make = Callable[..., str]
"""Makes one run, and returns the reason if it failed."""
MEMORY = 4 * 2**30
"""Bytes of decoded images that a process keeps, by default."""
Outcomes = Generator[tuple[PlannedRun, str], None, None]

_FORMS = "a number of processes (4 or local:4), slurm, slurm:PARTITION or dask://HOST:PORT"
_POLL = 5.0  # seconds between two looks at the jobs of Slurm
_ANSWER = "20s"  # how long a scheduler of Dask has to answer
_KILLED = "its process was ended from outside, as happens when memory runs out"


class Workers(ABC):
    """Makers of the runs of a sweep."""

    elsewhere: ClassVar[bool] = False
    """Flag: workers may be other machines, to which relative paths mean nothing."""
    alone: ClassVar[bool] = False
    """Flag: runs are made in this process, one after the other."""
    number: int
    """Runs that a search proposes at the same time."""

    @abstractmethod
    def outcomes(self, make: Make, runs: Sequence[PlannedRun]) -> Outcomes:
        """Make runs; yield each as it ends, with the reason if it failed.

        When the caller stops, runs that were not begun are not made.
        """


def find_workers(
    where: str, folder: str | Path, *, memory: int = MEMORY, each: Sequence[str] = ()
) -> Workers:
    """Return the workers that a text names.

    Args:
        where: ``N`` or ``local:N``, ``slurm``, ``slurm:PARTITION``, ``dask://HOST:PORT``.
        folder: the sweep's folder.
        memory: bytes of decoded images that each process keeps.
        each: what each run asks of the cluster, as ``NAME=VALUE``: options of ``sbatch``, or resources of
            Dask's workers.

    Raises:
        ConfigError: for another text, for ``each`` that nobody reads, and for a package that is missing.
    """
    for text in each:
        if not re.fullmatch(r"[^=]+=.+", text):
            raise ConfigError(f"--each {text}: write NAME=VALUE")
    wanted = dict(text.split("=", 1) for text in each)
    kind, _, rest = where.partition(":")
    count = rest if kind == "local" else where
    if count.isdecimal() and int(count) > 0:
        if each:
            raise ConfigError(f"--each {each[0]}: only clusters read it; --workers names none")
        return Processes(int(count), memory) if int(count) > 1 else ThisProcess(memory)
    if kind == "slurm" and (rest or where == kind):
        return SlurmJobs(Path(folder), memory, wanted, rest)
    if kind == "dask" and rest.startswith("//") and len(rest) > 2:
        return DaskWorkers(Path(folder), memory, wanted, f"tcp:{rest}")
    raise ConfigError(f"--workers {where}: must be {_FORMS}")


@dataclass(frozen=True)
class ThisProcess(Workers):
    """This process makes all runs, which share the decoded images."""

    memory: int = MEMORY
    number: ClassVar[int] = 1  # type: ignore[misc]
    alone: ClassVar[bool] = True

    def outcomes(self, make: Make, runs: Sequence[PlannedRun]) -> Outcomes:
        """Make one run after the other."""
        with keep_decoded(self.memory):
            for run in runs:
                yield run, make(run)


@dataclass(frozen=True)
class Processes(Workers):
    """Processes of this machine, which share its cores and end when this one does."""

    number: int
    memory: int

    def outcomes(self, make: Make, runs: Sequence[PlannedRun]) -> Outcomes:
        """Make as many runs at the same time as there are processes."""
        with self.pool() as pool:
            futures = {pool.submit(make, run): run for run in runs}
            for future in as_completed(futures):
                yield futures[future], _process_outcome(future)

    @contextmanager
    def pool(self) -> Iterator[ProcessPoolExecutor]:
        """Start the processes, for anything that is to be done in one of its own."""
        spawn = get_context("spawn")
        end, lifeline = spawn.Pipe(duplex=False)
        with ProcessPoolExecutor(
            self.number, spawn, _prepare_process, (self.number, self.memory, end)
        ) as pool:
            try:
                yield pool
            finally:
                lifeline.close()


_process = ExitStack()  # closed by nobody: what is in it lasts as long as a worker does


def _prepare_process(jobs: int, memory: int, lifeline: Connection) -> None:
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    _process.enter_context(keep_decoded(memory))


def _end_with(lifeline: Connection) -> None:
    """End this process when the sweep's is stopped or dies: the next sweep continues the same runs."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


def _process_outcome(future: Future[str]) -> str:
    try:
        return future.result()
    except BrokenProcessPool:
        return _KILLED


@dataclass(frozen=True)
class Job:
    """One run as a cluster makes it.

    Where an earlier job of the run is still at work, since its sweep was killed, this one waits for its end.
    Then it continues the run, or finds it finished.
    """

    make: Make
    run: PlannedRun
    lock: Path
    memory: int

    def __call__(self) -> str:
        """Make the run; return the reason if it failed."""
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        with _turn, FileLock(self.lock), keep_decoded(self.memory):
            return self.make(self.run)

    def checkpoint(self) -> Any:
        """Let Slurm queue the run again when its time is over, or when a more urgent job takes its place."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


_turn = threading.Lock()  # for one run: two in one process would draw from the same random numbers


class Cluster(Workers):
    """Workers that may be on other machines.

    Args:
        folder: the sweep's folder; all machines must see it under this path.
        memory: bytes of decoded images that each run keeps.
        each: what each run asks for.
    """

    elsewhere: ClassVar[bool] = True
    number = 8
    package: ClassVar[str]

    def __init__(self, folder: Path, memory: int, each: Mapping[str, str]) -> None:
        try:
            self.library: Any = import_module(self.package)
        except ImportError as error:
            raise ConfigError(f"--workers needs {self.package}: pip install 'medfedaug[cluster]'") from error
        self.folder, self.memory, self.each = folder.absolute(), memory, each

    def _job(self, make: Make, run: PlannedRun) -> Job:
        folder = self.folder / run.folder
        return Job(make, run, folder.with_name(f".{folder.name}.lock"), self.memory)


class SlurmJobs(Cluster):
    """Jobs of Slurm, which `submitit` submits and watches.

    Args:
        folder: see `Cluster`; its folder ``cluster`` gets scripts and logs of the jobs.
        memory: see `Cluster`.
        each: options of ``sbatch``, such as ``time``, ``mem``, ``gpus``.
        partition: the partition of the jobs; empty for Slurm's default.
    """

    package: ClassVar[str] = "submitit"

    def __init__(self, folder: Path, memory: int, each: Mapping[str, str], partition: str) -> None:
        super().__init__(folder, memory, each)
        try:
            self.executor = self.library.SlurmExecutor(self.folder / "cluster")
        except RuntimeError as error:  # there is no `srun`
            raise ConfigError(f"--workers slurm: {first_line(error)}") from error
        options = {**({"partition": partition} if partition else {}), **each}
        # `submitit` would end every job after five minutes; without a time, the partition's is the limit.
        self.executor.update_parameters(time=None, additional_parameters=options)

    def outcomes(self, make: Make, runs: Sequence[PlannedRun]) -> Outcomes:
        """Submit a job for each run, and wait for their ends."""
        jobs: dict[Any, PlannedRun] = {}
        try:
            for run in runs:
                self.executor.update_parameters(job_name=f"medfedaug {run.folder}")
                try:
                    jobs[self.executor.submit(self._job(make, run))] = run
                except self.library.core.utils.FailedJobError as error:
                    raise ConfigError(f"--workers slurm: {first_line(error)}") from error
            for job in self.library.helpers.as_completed(list(jobs), poll_frequency=_POLL):
                yield jobs[job], self._outcome(job)
        finally:
            for job in jobs:
                if not job.done():
                    job.cancel()

    def _outcome(self, job: Any) -> str:
        try:
            reason: str = job.result()
        except Exception as error:
            return f"job {job.job_id} ended without a result ({first_line(error)}); see {job.paths.stderr}"
        return reason


class DaskWorkers(Cluster):
    """Workers of a Dask cluster, on which `distributed` places the runs.

    A run whose worker dies is placed on another one, which continues it.

    Args:
        folder: see `Cluster`.
        memory: see `Cluster`.
        each: resources of Dask's workers that each run takes, such as ``GPU=1``.
        address: the scheduler's address.
    """

    package: ClassVar[str] = "distributed"

    def __init__(self, folder: Path, memory: int, each: Mapping[str, str], address: str) -> None:
        super().__init__(folder, memory, each)
        self.address = address
        try:
            self.resources = {name: float(value) for name, value in each.items()}
        except ValueError as error:
            raise ConfigError(f"--each: resources of Dask are numbers, such as GPU=1 ({error})") from error

    def outcomes(self, make: Make, runs: Sequence[PlannedRun]) -> Outcomes:
        """Submit a task for each run, and wait for their ends."""
        try:
            client = self.library.Client(self.address, set_as_default=False, timeout=_ANSWER)
        except OSError as error:
            raise ConfigError(
                f"--workers: no scheduler of Dask answers at {self.address} ({first_line(error)})"
            ) from error
        with client:
            futures = {}
            for run in runs:
                job = self._job(make, run)
                key = f"medfedaug-{hashlib.sha256(str(job.lock).encode()).hexdigest()}"
                futures[client.submit(job, key=key, resources=self.resources, pure=False)] = run
            for future in self.library.as_completed(futures, loop=client.loop):
                yield futures[future], _dask_outcome(future)


def _dask_outcome(future: Any) -> str:
    try:
        reason: str = future.result()
    except Exception as error:
        return f"no worker of Dask finished it ({type(error).__name__}: {first_line(error)})"
    return reason
