"""Workers of a sweep: this process, processes of this machine, jobs of Slurm, or workers of Dask.

A sweep gives each run to one worker. From a run's folder any worker can continue it: a run whose worker was
killed continues after its last finished round, on this machine or another with the same files.
"""

import hashlib
import os
import re
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
from filelock import FileLock

from medfedaug.data.preparation.cache import keep_decoded
from medfedaug.errors import ConfigError, RunFailed, config_errors, first_line
from medfedaug.federation.job_folder import STATE
from medfedaug.research.sweeps.run_list import PlannedRun
from medfedaug.utils.plugins import import_extra
from medfedaug.utils.validation import named_pairs

Make = Callable[..., str]  # makes one run, and returns the reason if it failed
MEMORY = 4 * 2**30  # default memory of a process for decoded images, in bytes
Outcomes = Generator[tuple[PlannedRun, str], None, None]

_FORMS = "a number of processes (4 or local:4), slurm, slurm:PARTITION or dask://HOST:PORT"
_POLL = 5.0  # seconds between two looks at the jobs of Slurm
_TRIES, _LONGEST = 8, 300.0  # to submit a job while none is queued; longest pause between two, seconds
_LIMITS = ("limit", "Limit", "temporarily")  # in Slurm's refusals of a job that it would take later
_ANSWER = "20s"  # for a scheduler of Dask to answer
_KILLED = "its process was killed, for instance since memory ran out"


class Workers(ABC):
    """Base of the workers of a sweep."""

    elsewhere: ClassVar[bool] = False
    """Flag: workers may be on other machines, where relative paths mean nothing."""
    alone: ClassVar[bool] = False
    """Flag: this process makes the runs, one after the other."""
    number: int
    """Runs that a search proposes at the same time."""

    @abstractmethod
    def outcomes(self, make: Make, runs: Sequence[PlannedRun]) -> Outcomes:
        """Make runs; yield each as it ends, with the reason if it failed.

        When the caller stops, no further run begins.
        """


def find_workers(
    where: str, folder: str | Path, *, memory: int = MEMORY, each: Sequence[str] = ()
) -> Workers:
    """Return the workers that a text names.

    Args:
        where: ``N`` or ``local:N``, ``slurm``, ``slurm:PARTITION``, ``dask://HOST:PORT``.
        memory: bytes of decoded images that each process keeps.
        each: requests of each run to the cluster, as ``NAME=VALUE``: options of ``sbatch``, or resources of
            Dask's workers.
    """
    requests = named_pairs("--each", "gpus=1", each, first=True)
    kind, _, rest = where.partition(":")
    count = rest if kind == "local" else where
    if count.isdecimal() and int(count) > 0:
        if each:
            raise ConfigError(f"--each {each[0]}: only clusters read it; --workers names none")
        return Processes(int(count), memory) if int(count) > 1 else ThisProcess(memory)
    if kind == "slurm" and (rest or where == kind):
        return SlurmJobs(Path(folder), memory, requests, rest)
    if kind == "dask" and rest.startswith("//") and len(rest) > 2:
        return DaskWorkers(Path(folder), memory, requests, f"tcp:{rest}")
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
        """Make runs in all processes at the same time."""
        spawn = get_context("spawn")
        end, lifeline = spawn.Pipe(duplex=False)
        before = {*active_children()}
        with ProcessPoolExecutor(
            self.number, spawn, _prepare_process, (self.number, self.memory, end)
        ) as pool:
            try:
                with _interrupts_held():
                    futures = {pool.submit(make, run): run for run in runs}
                for future in as_completed(futures):
                    try:
                        reason = future.result()
                    except BrokenProcessPool:
                        reason = _KILLED
                    yield futures[future], reason
            except BaseException:
                for child in {*active_children()} - before:
                    child.terminate()  # also one that still imports, and does not read its lifeline
                raise
            finally:
                lifeline.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back here, and for good in processes that start meanwhile: they would print tracebacks.

    It reaches the sweep, which ends its processes.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else it starts with the first process, and lets Ctrl-C through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_process = ExitStack()  # never closed: its contexts last as long as a worker


def _prepare_process(jobs: int, memory: int, lifeline: Connection) -> None:
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
    _process.enter_context(keep_decoded(memory))


def _end_with(lifeline: Connection) -> None:
    """End this process when the sweep's process stops or dies: the next sweep continues the same runs."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


@dataclass(frozen=True)
class Job:
    """One run on a cluster.

    It waits for an earlier job of the run, whose sweep was killed; then it continues the run, if unfinished.
    """

    make: Make
    run: PlannedRun
    lock: Path
    memory: int

    def __call__(self) -> str:
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        with _turn, FileLock(self.lock), keep_decoded(self.memory):
            if "SLURM_JOB_ID" in os.environ:
                signal.signal(signal.SIGUSR2, partial(self._requeue, os.getpid(), self._progress()))
            return self.make(self.run)

    def _progress(self) -> float:
        """Return the time of the run's last checkpoint; 0 without one."""
        state = self.lock.parent / self.run.folder.name / STATE
        return state.stat().st_mtime if state.exists() else 0.0

    def _requeue(self, process: int, before: float, *_: Any) -> None:
        """Let Slurm queue this job again: its time is nearly over, or a more urgent job replaces it.

        `submitit`'s own handler needs the limit in minutes, which only the partition may know. A job in which
        no round has ended since its start would never finish, and fails.
        """
        if os.getpid() != process:  # a fork, which inherited the handler
            return
        if self._progress() == before:
            raise RunFailed("no round ended within the job's time limit; ask for more with --each time=...")
        subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
        os._exit(1)  # files are whole at any time, and Slurm starts the job again


_turn = threading.Lock()  # one run at a time: two in one process would share the random numbers


class Cluster(Workers):
    """Workers that may be on other machines, all of which see the sweep's folder under one path."""

    elsewhere: ClassVar[bool] = True
    number = 8
    package: ClassVar[str]

    def __init__(self, folder: Path, memory: int, each: Mapping[str, str]) -> None:
        self.library = import_extra(self.package, "cluster", "--workers")
        self.folder, self.memory, self.each = folder.absolute(), memory, each

    def _job(self, make: Make, run: PlannedRun) -> Job:
        folder = self.folder / run.folder
        return Job(make, run, folder.with_name(f".{folder.name}.lock"), self.memory)


class SlurmJobs(Cluster):
    """Jobs of Slurm, which `submitit` submits.

    A job whose time is over, or that a more urgent one replaces, is queued again and continues its run. Where
    Slurm refuses a further job because of a limit, the job waits for the end of an earlier one.

    Args:
        each: options of ``sbatch``, such as ``time``, ``mem``, ``gpus``; ``parallel``, the largest number of
            jobs at a time; ``setup``, a shell command before each run. With ``mem`` decoded images
            take half of it at most.
    """

    package: ClassVar[str] = "submitit"

    def __init__(self, folder: Path, memory: int, each: Mapping[str, str], partition: str) -> None:
        options = {**({"partition": partition} if partition else {}), **each}
        parallel, setup = options.pop("parallel", "1000"), options.pop("setup", None)
        if not parallel.isdecimal() or int(parallel) < 1:
            raise ConfigError(f"--each parallel={parallel}: must be a number of jobs, 1 or more")
        if match := re.fullmatch(r"(\d+)([KMGT]?)B?", options.get("mem", "").upper()):  # without a unit in MB
            size = int(match[1]) * 1024 ** (" KMGT".index(match[2]) if match[2] else 2)
            memory = min(memory, size // 2)
        super().__init__(folder, memory, each)
        self.parallel = int(parallel)
        with config_errors("--workers slurm", RuntimeError):  # `srun` is missing
            self.executor = self.library.SlurmExecutor(self.folder / "cluster")
        # By default `submitit` ends every job after five minutes; with None the partition's limit counts.
        self.executor.update_parameters(
            time=None, setup=[setup] if setup else None, additional_parameters=options
        )

    def outcomes(self, make: Make, runs: Sequence[PlannedRun]) -> Outcomes:
        """Keep up to `parallel` jobs submitted, and yield each run when its job has ended."""
        waiting, jobs = deque(runs), dict[Any, PlannedRun]()
        gone, refused = set[Any](), 0
        try:
            while waiting or jobs:
                while waiting and len(jobs) < self.parallel:
                    job = self._submit(self._job(make, waiting[0]), last_try=not jobs and refused == _TRIES)
                    refused = 0 if job else refused + 1
                    if job is None:
                        break
                    jobs[job] = waiting.popleft()
                queued = _queued()
                # Its result may reach this machine's file system after its end.
                missing = {job for job in jobs if str(job.job_id) not in queued}
                ended = [job for job in jobs if job.paths.result_pickle.exists() or job in gone & missing]
                gone = missing
                for job in ended:
                    yield jobs.pop(job), _result(job)
                if not ended:
                    time.sleep(min(_POLL * 2**refused, _LONGEST) if not jobs else _POLL)
        finally:
            for job in jobs:
                job.cancel(check=False)

    def _submit(self, job: Job, *, last_try: bool) -> Any:
        """Submit a job; return None where a limit of the cluster has been reached."""
        self.executor.update_parameters(job_name=f"medfedaug {job.run.folder}")
        try:
            return self.executor.submit(job)
        except self.library.core.utils.FailedJobError as error:
            text = str(error)
            if last_try or not any(word in text for word in _LIMITS):
                raise ConfigError(f"--workers slurm: {first_line(error)}") from error
            return None


def _queued() -> set[str]:
    """Return the numbers of this user's jobs that wait or run; no accounting is needed."""
    listed = subprocess.run(["squeue", "--me", "-h", "-o", "%A"], capture_output=True, text=True, check=False)
    if listed.returncode:
        raise RunFailed(f"squeue: {listed.stderr.strip()}")
    return set(listed.stdout.split())


def _result(job: Any) -> str:
    """Return the reason why a job's run failed; empty if it did not."""
    if not job.paths.result_pickle.exists():
        return f"job {job.job_id} ended without a result; see {job.paths.stderr}"
    try:
        return str(job.result())
    except Exception as error:
        return f"job {job.job_id}: {first_line(error)}; see {job.paths.stderr}"


class DaskWorkers(Cluster):
    """Workers of a Dask cluster, to which `distributed` sends the runs.

    A run whose worker dies goes to another worker, which continues it. ``each`` has resources of Dask's
    workers that each run takes, such as ``GPU=1``.
    """

    package: ClassVar[str] = "distributed"

    def __init__(self, folder: Path, memory: int, each: Mapping[str, str], address: str) -> None:
        super().__init__(folder, memory, each)
        self.address = address
        if not all(re.fullmatch(r"\d+(\.\d+)?", value) for value in each.values()):
            raise ConfigError("--each: resources of Dask are numbers, such as GPU=1")
        self.resources = {name: float(value) for name, value in each.items()}

    def outcomes(self, make: Make, runs: Sequence[PlannedRun]) -> Outcomes:
        """Submit a task for each run, and wait for their ends."""
        with config_errors(f"--workers: no scheduler of Dask answers at {self.address}", OSError):
            client = self.library.Client(self.address, set_as_default=False, timeout=_ANSWER)
        with client:
            futures = {}
            for run in runs:
                job = self._job(make, run)
                key = f"medfedaug-{hashlib.sha256(str(job.lock).encode()).hexdigest()}"
                futures[client.submit(job, key=key, resources=self.resources, pure=False)] = run
            for future in self.library.as_completed(futures, loop=client.loop):
                try:
                    reason = future.result()
                except Exception as error:
                    reason = f"no worker of Dask finished it ({type(error).__name__}: {first_line(error)})"
                yield futures[future], reason
