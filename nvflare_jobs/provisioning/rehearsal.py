"""A deployment rehearsed on one machine, from empty folders to a model that is evaluated at a site.

``python -m medfedaug.nvflare_jobs.provisioning.rehearsal poc WORK`` goes through NVFlare's POC mode,
``... provisioned WORK`` through kits provisioned for four hospitals, over mutual TLS on the loopback
interface. Every step is a command of `docs/deploy.md`, on phantom data. WORK is a new folder; nothing outside
it is written, and nothing is left running.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import torch

from medfedaug.data.phantom import make_phantom
from medfedaug.errors import ConfigError, MedFedAugError, RunFailed

__all__ = ["Rehearsal", "rehearse_poc", "rehearse_provisioned"]

HOSPITALS = tuple(f"hospital-{letter}" for letter in "abcd")
SERVER, ADMIN, LEAD = "fl-server.example.org", "admin@example.org", "lead@example.org"

_METHODS = "fedrdn,fedfa+"

# Small, yet enough for a Dice that is not 0 after three rounds: instance norm needs no running statistics.
_TRAINING = (
    *("--rounds", "3", "--local-epochs", "2", "--batch-size", "4", "--lr", "0.005", "--threads", "1"),
    *("--network-args", '{"features": [8, 16, 16, 16, 16, 8], "norm": "instance"}'),
)


class Rehearsal:
    """Kits, data and processes of a rehearsal; leaving the context ends every process.

    Args:
        work: a folder that does not exist yet, or is empty.
        say: told what happens, a line at a time.

    Raises:
        ConfigError: when there is something in ``work``.
    """

    def __init__(self, work: str | Path, say: Callable[[str], None] = print) -> None:
        self.work, self.say = Path(work).resolve(), say
        if self.work.exists() and any(self.work.iterdir()):
            raise ConfigError(f"{work} is not empty; choose a new folder")
        self.home = self.work / "home"
        self.home.mkdir(parents=True)
        self.port = _free_port()
        self.kits = self.work
        self.data: dict[str, Path] = {}
        self.phases: dict[str, float] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("MEDFEDAUG_", "NVFLARE_", "NVFL_"))},
            # NVFlare keeps settings in the home folder, and starts the `python3` that it finds on the path.
            "HOME": str(self.home),
            "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "NVFLARE_POC_WORKSPACE": str(self.work / "poc"),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *exception: object) -> None:
        for _ in range(3):  # a kit's start script may have started one more in between
            left = self.processes()
            for process in left:
                _kill(process)
            psutil.wait_procs(left, timeout=10)

    # ------------------------------------------------------------------ means

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what happens inside."""
        started = time.perf_counter()
        yield
        self.phases[name] = time.perf_counter() - started
        self.say(f"{name}: {self.phases[name]:.1f} s")

    def run(self, *command: str | Path, timeout: float = 120, fails: bool = False) -> str:
        """Run a command and return what it prints.

        Raises:
            RunFailed: with the end of its output, when it fails and ``fails`` is not set, or takes too long.
        """
        shown = " ".join(map(str, command))
        try:
            done = subprocess.run(
                [str(part) for part in command],
                cwd=self.work,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"{shown}: not done within {timeout:g} s") from error
        if done.returncode and not fails:
            raise RunFailed(f"{shown}: exit code {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
        return done.stdout

    def medfedaug(self, *arguments: str | Path) -> str:
        """Run the command ``medfedaug``."""
        return self.run(sys.executable, "-c", "from medfedaug.cli import main; main()", *arguments)

    def nvflare(self, *arguments: str | Path, timeout: float = 120, fails: bool = False) -> dict[str, Any]:
        """Run the command ``nvflare`` and return the data that it answers with."""
        command = (sys.executable, "-m", "nvflare.cli", "--format", "json", *arguments)
        printed = self.run(*command, timeout=timeout, fails=fails)
        answer = next((line for line in reversed(printed.splitlines()) if line.startswith("{")), "{}")
        return dict(json.loads(answer).get("data") or {})

    def processes(self) -> list[psutil.Process]:
        """What this rehearsal started and still runs: all that has its private home folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOME") == str(self.home) and process.status() != "zombie":
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    # ------------------------------------------------------------------ steps

    def project(self) -> Path:
        """The project file that is shipped, with this machine as the server's host and a free port."""
        text = (resources.files("medfedaug.nvflare_jobs.provisioning") / "project.yml").read_text()
        here = f"fed_learn_port: {self.port}\n    default_host: localhost"
        path = self.work / "project.yml"
        path.write_text(re.sub(r"fed_learn_port: \d+", here, text))
        return path

    def kit(self, name: str) -> Path:
        """The kit of a participant."""
        return self.kits / name

    def make_data(self) -> None:
        """Phantom data for each hospital, enough for its statistics to be exchanged."""
        folders = make_phantom(self.work / "data", sites=len(HOSPITALS), patients=18, shape=(48, 48, 6))
        self.data = dict(zip(HOSPITALS, folders, strict=True))

    def configure(self, *, forbid_code: bool) -> None:
        """``medfedaug site-config`` for each kit."""
        policy = ["--forbid-code"] if forbid_code else []
        self.medfedaug("site-config", "--kit", self.kit(SERVER))
        for name, data in self.data.items():
            kit = self.kit(name)
            self.medfedaug("site-config", "--kit", kit, "--data", data, "--device", "cpu", *policy)

    def export(self, name: str, methods: str, resume: bool = False) -> Path:
        """A job of a few rounds with a small network, or one that continues the run of that name."""
        job = self.work / ("resumed" if resume else "jobs") / name
        sites, more = str(len(HOSPITALS)), ["--resume"] if resume else []
        self.medfedaug("export", "--methods", methods, "--min-sites", sites, *_TRAINING, *more, "--out", job)
        return job

    def submit(self, job: Path) -> str:
        """Submit a job as the lead.

        Returns:
            NVFlare's identifier of the job.
        """
        return str(self.nvflare("job", "submit", "-j", job, "--startup-kit", self.kit(LEAD))["job_id"])

    def wait(self, job_id: str, timeout: float = 300) -> None:
        """Wait until a job is over.

        Raises:
            RunFailed: when it did not complete, with what the server wrote last.
        """
        try:
            self.nvflare(
                *("job", "wait", job_id, "--timeout", f"{timeout:g}", "--startup-kit", self.kit(LEAD)),
                timeout=timeout + 30,
            )
        except RunFailed as error:
            events = self._events(job_id)
            last = events.read_text().splitlines()[-1:] if events.exists() else ["the job did not begin"]
            raise RunFailed(f"job {job_id}: {last} [{error}]") from error

    def _events(self, job_id: str) -> Path:
        return self.kit(SERVER) / job_id / "medfedaug" / "events.jsonl"

    def collect(self, job_id: str) -> Path:
        """Download what a job left behind.

        Returns:
            The folder with ``results.json`` and ``global_model.pt``.

        Raises:
            RunFailed: when there are no results.
        """
        target = self.work / "downloads"
        self.nvflare("job", "download", job_id, "-o", target, "--startup-kit", self.kit(LEAD))
        folder = target / job_id / "workspace" / "medfedaug"
        if not (folder / "results.json").is_file():
            raise RunFailed(f"job {job_id} left no results in {folder}")
        return folder

    def evaluate(self, results: Path, hospital: str) -> dict[str, Any]:
        """Score the model that was collected on the data of one hospital."""
        out = self.work / "scores.json"
        self.medfedaug(
            *("evaluate", "--model", results / "global_model.pt", "--data", self.data[hospital]),
            *("--device", "cpu", "--out", out),
        )
        (scores,) = json.loads(out.read_text())["sites"].values()
        return dict(scores)

    def kill_job_process(self, hospital: str, job_id: str, round_: int, timeout: float = 120) -> None:
        """Kill a hospital's job process, as a lack of memory would, once a round has begun.

        Raises:
            RunFailed: when the round does not begin in time, or there is no such process.
        """
        self._await_round(job_id, round_, timeout)
        for process in self.processes():
            command = process.cmdline()
            if "nvflare.private.fed.app.client.worker_process" in command and hospital in command:
                process.kill()
                return
        raise RunFailed(f"{hospital} has no job process")

    def kill_server(self, job_id: str, round_: int, timeout: float = 120) -> None:
        """Kill all processes of the server once a round has begun; its kit starts it again.

        Raises:
            RunFailed: when the round does not begin in time, or the sites do not find the server again.
        """
        self._await_round(job_id, round_, timeout)
        server = [p for p in self.processes() if any("fed.app.server" in part for part in p.cmdline())]
        for process in server:
            _kill(process)
        psutil.wait_procs(server, timeout=10)
        _wait_for_clients(self)

    def _await_round(self, job_id: str, round_: int, timeout: float) -> None:
        events = self._events(job_id)
        begun = f'"round_started", "round": {round_},'
        _until(
            lambda: events.exists() and begun in events.read_text(), timeout, f"round {round_} did not begin"
        )

    def refusal(self, job: Path) -> str:
        """Put a line of code into a copy of a job, submit it, and return why it did not run.

        Raises:
            RunFailed: when it did run.
        """
        with_code = shutil.copytree(job, job.with_name(f"{job.name}_with_code"))
        (with_code / "app/custom").mkdir()
        (with_code / "app/custom/mine.py").write_text("print('code that nobody at the site has seen')\n")
        job_id = self.submit(with_code)
        waiting = ("job", "wait", job_id, "--timeout", "120", "--startup-kit", self.kit(LEAD))
        self.nvflare(*waiting, timeout=150, fails=True)
        about = json.dumps(self.nvflare("job", "meta", job_id, "--startup-kit", self.kit(LEAD)))
        if "FAILED_TO_RUN" not in about:
            raise RunFailed(f"a job with code was not refused: {about[-600:]}")
        return about

    def is_kept(self, certificate: bool) -> bool:
        """Whether the server keeps a TLS connection, with a site's certificate or without one."""
        startup = self.kit(HOSPITALS[0]) / "startup"
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        if certificate:
            context.load_cert_chain(startup / "client.crt", startup / "client.key")
        with socket.create_connection(("localhost", self.port), timeout=10) as plain:
            try:
                with context.wrap_socket(plain, server_hostname="localhost") as secure:
                    secure.settimeout(3)
                    return bool(secure.recv(1))
            except TimeoutError:  # the server waits for what we have to say
                return True
            except (ssl.SSLError, ConnectionError):
                return False

    def shut_down(self, timeout: float = 60) -> None:
        """Shut the whole system down and wait until nothing of it runs any more.

        Raises:
            RunFailed: when something does.
        """
        self.nvflare("system", "shutdown", "all", "--force", "--startup-kit", self.kit(ADMIN))
        _until(lambda: not self.processes(), timeout, "the system did not end")


def rehearse_poc(work: str | Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """NVFlare's POC mode: prepare, configure, start, submit, collect, evaluate; a site and a server killed.

    Args:
        work: a new folder.
        say: told what happens.

    Returns:
        ``{"phases": seconds by name, "results": the job's, "scores": of one hospital,
        "killed": results of the job during which a site's process was killed, "resumed": of the job that
        continued one whose server was killed, "same": whether each of both gave the model of the first}``.

    Raises:
        MedFedAugError: one line that says which step failed, and why.
    """
    with Rehearsal(work, say) as system:
        with system.phase("prepare"):
            system.nvflare("poc", "prepare", "-i", system.project())
            system.kits = system.work / "poc" / "medfedaug" / "prod_00"
        system.make_data()
        with system.phase("configure kits"):
            system.configure(forbid_code=False)
        with system.phase("start"):
            system.nvflare("poc", "start", "--timeout", "120", timeout=180)
        folder, scores = _one_job(system)
        with system.phase("job with a killed site"):
            job_id = system.submit(system.export("killed", _METHODS))
            system.kill_job_process(HOSPITALS[1], job_id, round_=2)
            system.wait(job_id)
        killed = system.collect(job_id)
        with system.phase("job with a killed server, resumed"):
            system.kill_server(system.submit(system.export("interrupted", _METHODS)), round_=3)
            job_id = system.submit(system.export("interrupted", _METHODS, resume=True))
            system.wait(job_id)
        resumed = system.collect(job_id)
        with system.phase("stop"):
            # Not `poc stop`: it would abort the job of the killed server first, which NVFlare takes for
            # running and cannot abort.
            system.shut_down()
        return {
            "phases": system.phases,
            "results": _results(folder),
            "scores": scores,
            "killed": _results(killed),
            "resumed": _results(resumed),
            "same": [_same_model(folder, other) for other in (killed, resumed)],
        }


def rehearse_provisioned(work: str | Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Four hospitals provisioned with certificates, whose policy forbids code.

    Args:
        work: a new folder.
        say: told what happens.

    Returns:
        ``{"phases": seconds by name, "results": the job's, "scores": of one hospital, "doctor": what it said,
        "refusal": why a job with code did not run, "kept": whether a connection is, with a certificate and
        without}``.

    Raises:
        MedFedAugError: one line that says which step failed, and why.
    """
    with Rehearsal(work, say) as system:
        with system.phase("provision"):
            system.nvflare("provision", "-p", system.project(), "-w", "kits")
            system.kits = system.work / "kits" / "medfedaug" / "prod_00"
        system.make_data()
        with system.phase("configure kits"):
            system.configure(forbid_code=True)
        with system.phase("doctor"):
            doctor = system.medfedaug("doctor", "--kit", system.kit(HOSPITALS[0]))
        with system.phase("start"):
            for name in (SERVER, *HOSPITALS):
                _start_kit(system, system.kit(name))
            _wait_for_clients(system)
        folder, scores = _one_job(system)
        with system.phase("refuse a job with code"):
            refusal = system.refusal(system.work / "jobs" / "job")
        kept = {"with": system.is_kept(certificate=True), "without": system.is_kept(certificate=False)}
        with system.phase("shut down"):
            system.shut_down()
        return {
            "phases": system.phases,
            "results": _results(folder),
            "scores": scores,
            "doctor": doctor,
            "refusal": refusal,
            "kept": kept,
        }


def _one_job(system: Rehearsal) -> tuple[Path, dict[str, Any]]:
    with system.phase("export"):
        job = system.export("job", _METHODS)
    with system.phase("job"):
        job_id = system.submit(job)
        system.wait(job_id)
    with system.phase("collect"):
        folder = system.collect(job_id)
    with system.phase("evaluate"):
        scores = system.evaluate(folder, HOSPITALS[0])
    return folder, scores


def _start_kit(system: Rehearsal, kit: Path) -> None:
    # Its output goes to a file: the script leaves a process behind that would keep a pipe open.
    with (kit / "start.log").open("wb") as log:
        subprocess.run(
            [kit / "startup" / "start.sh"],
            cwd=kit,
            env=system.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=30,
            check=True,
        )


def _wait_for_clients(system: Rehearsal, timeout: float = 120) -> None:
    command = ("system", "status", "--startup-kit", system.kit(ADMIN))

    def all_there() -> bool:
        answer = json.dumps(system.nvflare(*command, fails=True))
        return all(name in answer for name in HOSPITALS)

    _until(all_there, timeout, "not all sites have joined")


def _results(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text()))


def _same_model(folder: Path, other: Path) -> bool:
    first, second = (torch.load(f / "final_model.pt", weights_only=True) for f in (folder, other))
    return all(torch.equal(first[key], second[key]) for key in first)


def _until(condition: Callable[[], bool], timeout: float, problem: str) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise RunFailed(f"{problem} within {timeout:g} s")
        time.sleep(0.5)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def _main() -> None:
    parser = argparse.ArgumentParser(prog="rehearsal", description=__doc__)
    parser.add_argument("kind", choices=("poc", "provisioned"))
    parser.add_argument("work", type=Path, help="a new folder")
    arguments = parser.parse_args()
    try:
        report = {"poc": rehearse_poc, "provisioned": rehearse_provisioned}[arguments.kind](arguments.work)
    except MedFedAugError as error:
        raise SystemExit(f"rehearsal: {error}") from error
    print(f"all done in {sum(report['phases'].values()):.0f} s; Dice {report['results']['test']['mean']}")


if __name__ == "__main__":
    _main()
