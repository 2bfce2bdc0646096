"""Runs are the same on every kind of worker, and go on after a worker was killed."""

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from orthanc import free_port
from sweeps import OFFICE_PRESET, planned, scores

from medfedaug.config.run import Execution
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.research.sweeps import workers
from medfedaug.research.sweeps.sweep import run_all
from medfedaug.research.sweeps.workers import Processes, SlurmJobs, find_workers

ONE = Execution(threads=1)


def workers_of(where, each=(), folder=Path()):
    return find_workers(where, folder, memory=2**20, each=each)


def test_a_text_names_the_workers():
    pytest.importorskip("distributed")
    assert workers_of("1").alone
    assert workers_of("local:3").number == workers_of("3").number == 3
    dask = workers_of("dask://head:8786", ["GPU=1"])
    assert (dask.address, dask.resources, dask.elsewhere) == ("tcp://head:8786", {"GPU": 1.0}, True)
    for wrong in ("0", "-1", "local", "local:x", "slurm:", "dask:head", "dask://", "kubernetes", ""):
        with pytest.raises(ConfigError, match="must be a number of processes"):
            workers_of(wrong)
    with pytest.raises(ConfigError, match="only clusters read it"):
        workers_of("4", ["mem=1G"])
    with pytest.raises(ConfigError, match="--each takes NAME=VALUE"):
        workers_of("dask://head:8786", ["GPU"])
    with pytest.raises(ConfigError, match="are numbers"):
        workers_of("dask://head:8786", ["GPU=two"])


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs POSIX signals")
def test_ctrl_c_reaches_the_sweep_and_not_its_processes(monkeypatch):
    """The terminal sends it to all; a process that still imports would print a traceback."""
    monkeypatch.setattr(workers, "_prepare_process", slice)  # takes three arguments, and imports nothing
    mask = partial(signal.pthread_sigmask, signal.SIG_BLOCK)
    ((_, held),) = Processes(1, 2**20).outcomes(mask, [()])
    assert signal.SIGINT in held
    assert signal.SIGINT not in mask(())


def test_a_missing_package_and_a_missing_cluster_are_named(monkeypatch, office, tmp_path):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError, match=r"--workers needs distributed: pip install 'medfedaug\[cluster\]'"):
        workers_of("dask://head:8786")
    monkeypatch.undo()
    pytest.importorskip("distributed")
    monkeypatch.setattr(workers, "_ANSWER", "1s")
    with pytest.raises(ConfigError, match=r"no scheduler of Dask answers at tcp://127\.0\.0\.1:9"):
        run_all(
            planned(office, seeds=1),
            OFFICE_PRESET,
            office,
            tmp_path,
            workers=workers_of("dask://127.0.0.1:9"),
        )
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="--workers slurm: "):
        workers_of("slurm", folder=tmp_path)


def alive() -> set[str]:
    running = (p for p in psutil.process_iter(["status"]) if p.info["status"] != psutil.STATUS_ZOMBIE)
    return {str(process.pid) for process in running}


@pytest.fixture
def slurm(monkeypatch):
    """`submitit`'s own executor for a machine without Slurm; its jobs are processes."""
    submitit = pytest.importorskip("submitit")

    class Local(submitit.LocalExecutor):
        most = 100

        def update_parameters(self, **_):
            """Take Slurm's parameters, of which processes have none."""

        def submit(self, job):
            if len(self.jobs & alive()) >= self.most:
                raise submitit.core.utils.FailedJobError("sbatch: QOSMaxSubmitJobPerUserLimit")
            submitted = super().submit(job)
            self.jobs.add(str(submitted.job_id))
            return submitted

        jobs: ClassVar[set[str]] = set()

    monkeypatch.setattr(workers, "_POLL", 0.2)
    monkeypatch.setattr(workers, "_queued", alive)
    monkeypatch.setattr(submitit, "SlurmExecutor", Local)
    return Local


@pytest.mark.slow  # processes of a cluster
def test_jobs_of_submitit_give_what_this_process_gives_under_a_limit_of_one(
    slurm, office, tmp_path, monkeypatch, onednn
):
    slurm.most = 1
    runs = planned(office, "fedavg fedprox", ["fedprox.mu=1e38"], seeds=1, scale=0.001)
    events = []
    monkeypatch.chdir(tmp_path)  # a relative folder means the same to a worker
    far = {"workers": workers_of("slurm", folder=Path("far")), "execution": ONE, "on_event": events.append}
    failed = run_all(runs, OFFICE_PRESET, office, "far", **far)
    assert list(failed) == [runs[1].folder]
    assert "0 of 4 needed updates" in failed[runs[1].folder]
    assert sorted(event["event"] for event in events) == ["failed", "run"]
    assert run_all(runs[:1], OFFICE_PRESET, office, tmp_path / "near", execution=ONE) == {}
    assert scores(tmp_path / "far" / runs[0].folder) == scores(tmp_path / "near" / runs[0].folder)


def test_a_cluster_that_takes_no_job_at_all_is_named(slurm, office, tmp_path, monkeypatch):
    slurm.most = 0
    monkeypatch.setattr(workers, "_TRIES", 2)
    (run,) = planned(office, "fedavg", seeds=1)
    with pytest.raises(ConfigError, match="QOSMaxSubmitJobPerUserLimit"):
        list(SlurmJobs(tmp_path, 2**20, {}, "").outcomes(str, [run]))


def test_requests_to_slurm_are_checked(slurm, tmp_path):
    with pytest.raises(ConfigError, match="a number of jobs"):
        SlurmJobs(tmp_path, 2**20, {"parallel": "0"}, "")


def test_decoded_images_take_half_of_a_jobs_memory(slurm, tmp_path):
    assert SlurmJobs(tmp_path, 2**34, {"mem": "8G"}, "").memory == 2**32


@pytest.mark.slow  # processes of a cluster
def test_a_killed_job_is_named_with_its_log(slurm, office, tmp_path, monkeypatch):
    (tmp_path / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    jobs = SlurmJobs(tmp_path, 2**20, {}, "")
    (run,) = planned(office, "fedavg", seeds=1)
    outcomes = list(jobs.outcomes(str, [run]))
    assert outcomes[0][0] == run
    assert "ended without a result" in outcomes[0][1]
    assert str(tmp_path / "cluster") in outcomes[0][1]


def _logged(out, text):
    return sum(text in log.read_text() for log in out.glob("*/*/*.log"))


@pytest.fixture
def dask(tmp_path):
    """A scheduler and two workers, each a process of its own."""
    pytest.importorskip("distributed")
    started = []

    def start(program, *arguments):
        command = [sys.executable, "-m", f"distributed.cli.{program}", "--no-dashboard", *arguments]
        started.append(subprocess.Popen(command, cwd=tmp_path))
        return started[-1]

    file = tmp_path / "scheduler.json"
    start("dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(file))
    while not file.exists():
        time.sleep(0.1)
    address = json.loads(file.read_text())["address"].removeprefix("tcp:")
    pair = [start("dask_worker", f"tcp:{address}", "--nthreads", "1", "--no-nanny") for _ in range(2)]
    yield f"dask:{address}", pair
    for process in started[::-1]:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_dask_worker_that_is_killed_loses_nothing(office, tmp_path, dask, onednn):
    where, pair = dask
    runs = planned(office, scale=0.03)
    assert len(runs) == 4
    assert runs[0].config.rounds > 2
    out = tmp_path / "far"
    sweep = _sweep(office, out, where)
    while sweep.poll() is None and _logged(out, "round_finished") < 2:  # one of each worker
        time.sleep(0.1)
    assert sweep.poll() is None, sweep.stdout.read()
    pair[0].kill()
    assert sweep.communicate(timeout=280)[0] == "{}\n"
    assert _logged(out, '"resumed"')
    assert run_all(runs, OFFICE_PRESET, office, tmp_path / "near", execution=ONE) == {}
    for run in runs:
        assert scores(out / run.folder) == scores(tmp_path / "near" / run.folder)


def test_a_job_whose_time_is_over_is_queued_again_if_a_round_has_ended(monkeypatch, office, tmp_path):
    """Slurm sends SIGUSR2 before a job's limit, and before a more urgent job replaces it."""
    (run,) = planned(office, "fedavg", seeds=1)
    state, called, handlers = tmp_path / run.folder.name / "state", [], {}
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(workers.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(workers.subprocess, "run", lambda command, check: called.append(command))
    monkeypatch.setattr(workers.os, "_exit", called.append)

    def make(run):
        with pytest.raises(RunFailed, match="no round ended within the job's time limit"):
            handlers[signal.SIGUSR2](signal.SIGUSR2, None)
        assert not called
        state.mkdir(parents=True)  # with the checkpoint of a round
        handlers[signal.SIGUSR2](signal.SIGUSR2, None)
        return ""

    assert workers.Job(make, run, tmp_path / "lock", 2**20)() == ""
    assert called == [["scontrol", "requeue", "7"], 1]


@pytest.fixture
def real_slurm(monkeypatch):
    """A controller and a node of Slurm on loopback, with their own munge; ended with the test."""
    programs = [shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("munged", "slurmctld", "slurmd")]
    if None in programs or os.geteuid():
        pytest.skip("needs root, and Debian's packages slurmctld, slurmd and munge")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # a short path, for munge's socket
    folder.chmod(0o755)
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o711)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    host, socket = platform.node().split(".")[0], folder / "munge/socket"
    ports = [free_port(), free_port()]
    (folder / "slurm.conf").write_text(_SLURM.format(host=host, folder=folder, socket=socket, ports=ports))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    munged, controller, node = programs
    names = {"key-file": key, "socket": socket, "log-file": folder / "munge/log"}
    names |= {"pid-file": folder / "munge/pid", "seed-file": folder / "munge/seed"}
    started = []
    try:
        for command, ready in (
            ([munged, "-F", *(f"--{name}={value}" for name, value in names.items())], socket.exists),
            ([controller, "-D"], lambda: "UP" in _output("scontrol", "ping")),
            ([node, "-D", "-N", host], lambda: "idle" in _output("sinfo", "--noheader")),
        ):
            started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            for _ in range(300):
                if ready():
                    break
                time.sleep(0.2)
            else:
                pytest.fail(f"{command[0]} did not start")
        yield
    finally:
        subprocess.run(["scancel", "--user=root"], check=False)
        time.sleep(1)
        for process in started[::-1]:
            process.terminate()
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


_SLURM = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={socket}
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=short Nodes={host} Default=YES MaxTime=60 State=UP
"""


def _output(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_slurm_queues_a_job_whose_time_is_over_again_and_it_continues_to_the_same_bits(
    office, tmp_path, real_slurm, onednn
):
    """Slurm sends this signal before a job's limit, and before a more urgent job replaces it."""
    pytest.importorskip("submitit")
    runs, out = planned(office, scale=0.03), tmp_path / "far"
    sweep = _sweep(office, out, "slurm:short")
    while sweep.poll() is None and not _logged(out, "round_finished"):
        time.sleep(0.1)
    assert sweep.poll() is None, sweep.stdout.read()
    (log,) = [log for log in out.glob("*/*/*.log") if "round_finished" in log.read_text()][:1]
    names = dict(line.split("|") for line in _output("squeue", "-h", "-t", "R", "-o", "%j|%A").splitlines())
    name = f"medfedaug {log.relative_to(out).with_suffix('')}"
    subprocess.run(["scancel", "--signal=USR2", names[name]], check=True)
    assert sweep.communicate(timeout=500)[0] == "{}\n"
    assert '"resumed"' in log.read_text()
    assert run_all(runs, OFFICE_PRESET, office, tmp_path / "near", execution=ONE) == {}
    for run in runs:
        assert scores(out / run.folder) == scores(tmp_path / "near" / run.folder)


def _sweep(data, out, where):
    script = """
import sys
from pathlib import Path
from sweeps import OFFICE_PRESET, planned
from medfedaug.config.run import Execution
from medfedaug.research.sweeps.sweep import run_all
from medfedaug.research.sweeps.workers import find_workers
ONE = Execution(threads=1)
data, out, where = sys.argv[1:]
workers = find_workers(where, out)
print(run_all(planned(Path(data), scale=0.03), OFFICE_PRESET, data, out, execution=ONE, workers=workers))
"""
    return subprocess.Popen(
        [sys.executable, "-c", script, str(data), str(out), where],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "support")},
        stdout=subprocess.PIPE,
        text=True,
    )
