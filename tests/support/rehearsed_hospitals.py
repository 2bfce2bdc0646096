"""A federation of four hospitals on one machine for a rehearsal: kits, data, jobs and processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
from running import command

from medfedaug.data.phantom import make_phantom
from medfedaug.errors import RunFailed
from medfedaug.hospital.privacy import JOBS_FOLDER

PATIENT = "Grotewohl_Alma"
"""Invented name: part of all file names at the hospitals, and of nothing that leaves them."""

HOSPITALS = tuple(f"hospital-{letter}" for letter in "abcd")
SERVER, ADMIN, LEAD = "fl-server.example.org", "admin@example.org", "lead@example.org"

# Small, but with a Dice above 0 after three rounds, since instance norm needs no running statistics.
_TRAINING = (
    *("--rounds", "3", "--local-epochs", "2", "--batch-size", "4", "--lr", "0.005", "--threads", "1"),
    *("--network-args", '{"features": [8, 16, 16, 16, 16, 8], "norm": "instance"}'),
)

_SITE = ("--device", "cpu", "--min-images", "4")


class Rehearsal:
    """The kits, data and processes of a rehearsal. Leaving the context ends every process.

    Args:
        work: a folder that does not exist yet, or is empty.
        hospitals: those of the project that take part.
    """

    def __init__(self, work: Path, hospitals: Sequence[str] = HOSPITALS) -> None:
        self.work, self.hospitals = work.resolve(), tuple(hospitals)
        self.home = self.work / "home"
        self.home.mkdir(parents=True)
        self.port = _free_port()
        self.kits = self.work
        self.data: dict[str, Path] = {}
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
        for _ in range(3):  # a kit's start script may start another one in between
            left = self.processes()
            for process in left:
                _kill(process)
            psutil.wait_procs(left, timeout=10)

    # ------------------------------------------------------------------ means

    def run(self, *command: str | Path, timeout: float = 300, fails: bool = False) -> str:
        """Run a command and return its output."""
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
        """Run the command ``medfedaug`` in this process, which has imported everything already."""
        code, out, err = command(*arguments)
        assert code == 0, (out, err)
        return out

    def nvflare(self, *arguments: str | Path, timeout: float = 300, fails: bool = False) -> dict[str, Any]:
        """Run the command ``nvflare`` and return the data of its answer."""
        command = (sys.executable, "-m", "nvflare.cli", "--format", "json", *arguments)
        printed = self.run(*command, timeout=timeout, fails=fails)
        answer = next((line for line in reversed(printed.splitlines()) if line.startswith("{")), "{}")
        return dict(json.loads(answer).get("data") or {})

    def processes(self) -> list[psutil.Process]:
        """The running processes of this rehearsal: all with its private home folder."""
        running = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOME") == str(self.home) and process.status() != "zombie":
                    running.append(process)
            except (psutil.Error, OSError):
                continue
        return running

    # ------------------------------------------------------------------ steps

    def project(self) -> Path:
        """The package's project file, with this machine as the server's host and a free port."""
        text = (resources.files("medfedaug.nvflare_jobs.provisioning") / "project.yml").read_text()
        for absent in set(HOSPITALS) - set(self.hospitals):
            text = re.sub(rf"  - name: {absent}\n    type: client\n    org: \w+\n", "", text)
        here = f"fed_learn_port: {self.port}\n    default_host: localhost"
        path = self.work / "project.yml"
        path.write_text(re.sub(r"fed_learn_port: \d+", here, text))
        return path

    def kit(self, name: str) -> Path:
        """The kit of a participant."""
        return self.kits / name

    def make_data(self) -> None:
        """Make phantom data for each hospital, enough to exchange statistics."""
        folders = make_phantom(self.work / "data", sites=len(self.hospitals), patients=18, shape=(48, 48, 6))
        for folder in folders:
            _name_a_patient(folder)
        self.data = dict(zip(self.hospitals, folders, strict=True))

    def prepare_poc(self) -> None:
        """Make the kits of NVFlare's POC mode."""
        self.nvflare("poc", "prepare", "-i", self.project())
        self.kits = self.work / "poc" / "medfedaug" / "prod_00"

    def provision(self) -> None:
        """Make kits with certificates for four hospitals."""
        self.nvflare("provision", "-p", self.project(), "-w", "kits")
        self.kits = self.work / "kits" / "medfedaug" / "prod_00"

    def request_kits(self) -> None:
        """Make the root, and enrol server, hospitals, administrator and lead."""
        here = ("--server", "localhost", "--port", str(self.port))
        self.medfedaug("enrol", "project", *here, "--own-keys", self.work / "project")
        self.kits = self.work / "kits"
        self.enrol("localhost", "server", kit=SERVER)
        for hospital in self.hospitals:
            self.enrol(hospital)
        for person, kind in ((ADMIN, "admin"), (LEAD, "lead")):
            self.enrol(person, kind)

    def enrol(self, name: str, kind: str = "site", *, kit: str = "") -> None:
        """Enrol a participant, or renew its certificate."""
        requests, sent = self.work / "requests", self.work / "sent"
        sent.mkdir(exist_ok=True)
        part = ("--as", kind)
        options = (*part, "--port", str(self.port), "--requests", requests)
        printed = self.medfedaug("enrol", "request", name, *options)
        request = Path(shutil.copy(requests / name / f"{name}.request.zip", sent))
        signing = (*part, "--project", self.work / "project", "--fingerprint", _read_aloud(printed))
        root = _read_aloud(self.medfedaug("enrol", "sign", request, *signing))
        answer = sent / f"{name}.signed.zip"
        for archive in (request, answer):
            _refuse_private_key(archive)
        keeping = ("--requests", requests, "--kit", self.kit(kit or name))
        self.medfedaug("enrol", "accept", answer, "--fingerprint", root, *keeping)
        answer.unlink()

    def start_poc(self) -> None:
        """Start server and sites in POC mode."""
        self.nvflare("poc", "start", "--timeout", "300", timeout=360)

    def start_kits(self) -> None:
        """Start server and sites with the start scripts of their kits, and wait until all have joined."""
        for name in (SERVER, *self.hospitals):
            self.switch_on(name)
        self.wait_for_clients()

    def configure(self, *, forbid_code: bool = False) -> None:
        """``medfedaug site configure`` for each kit.

        Args:
            forbid_code: whether the sites refuse jobs that carry code.
        """
        policy = ["--forbid-code" if forbid_code else "--allow-code"]
        self.medfedaug("site", "configure", self.kit(SERVER), "--allow-code")
        for name, data in self.data.items():
            kit = self.kit(name)
            self.medfedaug("site", "configure", kit, "--data", data, *_SITE, *policy)

    def configure_site(self, name: str, *options: str) -> None:
        """More options of ``medfedaug site configure``, for one hospital."""
        self.medfedaug("site", "configure", self.kit(name), "--allow-code", *options)

    def jobs_seen(self) -> set[str]:
        """The hashes of the jobs that have come to the first hospital."""
        return {file.stem for file in self.kit(self.hospitals[0]).rglob(f"{JOBS_FOLDER}/*.json")}

    def approve(self, before: Collection[str], timeout: float = 300) -> str:
        """Read at the first hospital which job waits that was not there `before`, and approve it at each.

        Returns:
            The page about the job.
        """
        page, waiting = "", set[str]()

        def waits() -> bool:
            nonlocal page, waiting
            page = self.medfedaug("site", "jobs", self.kit(self.hospitals[0]))
            waiting = set(re.findall(r"^job ([0-9a-f]{64})$", page, re.MULTILINE)) - set(before)
            return bool(waiting)

        _until(waits, timeout, "no job waits for approval")
        (job,) = waiting
        for name in self.hospitals:
            self.await_file(self.kit(name), f"{JOBS_FOLDER}/{job}.json", timeout)
            self.medfedaug("site", "approve", self.kit(name), job[:12])
        return page

    def export(self, name: str, methods: str, *options: str, resume: bool = False) -> Path:
        """Export a job of a few rounds with a small network, or one that continues the run of this name."""
        job = self.work / ("resumed" if resume else "jobs") / name
        sites, more = str(len(self.hospitals)), [*options, *(["--resume"] if resume else [])]
        self.medfedaug("export", "--methods", methods, "--min-sites", sites, *_TRAINING, *more, "--out", job)
        return job

    def submit(self, job: Path) -> str:
        """Submit a job as the lead.

        Returns:
            NVFlare's identifier of the job.
        """
        return str(self.nvflare("job", "submit", "-j", job, "--startup-kit", self.kit(LEAD))["job_id"])

    def wait(self, job_id: str, timeout: float = 900) -> None:
        """Wait until a job is over."""
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
        """Download the results of a job.

        Returns:
            The folder with ``results.json`` and ``global_model.pt``.
        """
        target = self.work / "downloads"
        self.nvflare("job", "download", job_id, "-o", target, "--startup-kit", self.kit(LEAD))
        folder = target / job_id / "workspace" / "medfedaug"
        if not (folder / "results.json").is_file():
            raise RunFailed(f"job {job_id} left no results in {folder}")
        return folder

    def evaluate(self, results: Path, hospital: str) -> dict[str, Any]:
        """Score the downloaded model on the data of one hospital."""
        out = self.work / "scores.json"
        self.medfedaug(
            *("evaluate", "--model", results / "global_model.pt", "--data", self.data[hospital]),
            *("--device", "cpu", "--out", out),
        )
        (scores,) = json.loads(out.read_text())["sites"].values()
        return dict(scores)

    def kill_job_process(self, hospital: str, job_id: str, round_: int, timeout: float = 300) -> None:
        """Kill a hospital's job process after a round has begun, as the system does when memory runs out."""
        self._await_round(job_id, round_, timeout)
        for process in self.processes():
            command = process.cmdline()
            if "nvflare.private.fed.app.client.worker_process" in command and hospital in command:
                process.kill()
                return
        raise RunFailed(f"{hospital} has no job process")

    def switch_off(self, hospital: str) -> None:
        """Kill all processes of a hospital at once, as a machine that loses its power does."""
        for _ in range(3):  # its start script may start another one in between
            kit = str(self.kit(hospital))
            left = [p for p in self.processes() if any(kit in part for part in _command(p))]
            for process in left:
                _kill(process)
            psutil.wait_procs(left, timeout=10)

    def switch_on(self, name: str) -> None:
        """Start the kit of a hospital or of the server."""
        kit = self.kit(name)
        # Its output goes to a file, since the script leaves a process behind that would keep a pipe open.
        with (kit / "start.log").open("wb") as log:
            subprocess.run(
                [kit / "startup" / "start.sh"],
                cwd=kit,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=30,
                check=True,
            )

    def events(self, job_id: str) -> list[dict[str, Any]]:
        """List the events that the server's process of a job has reported so far."""
        path = self._events(job_id)
        # The writer may be in the middle of the last line.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def await_event(self, job_id: str, timeout: float = 300, **expected: Any) -> dict[str, Any]:
        """Wait until the server's process of a job has reported an event with these entries."""
        events: list[dict[str, Any]] = []

        def reported() -> bool:
            events[:] = [e for e in self.events(job_id) if expected.items() <= e.items()]
            return bool(events)

        _until(reported, timeout, f"no event {expected}")
        return events[-1]

    def until(self, condition: Callable[[], bool | None], problem: str, timeout: float = 300) -> None:
        """Wait for something."""
        _until(lambda: bool(condition()), timeout, problem)

    def await_file(self, folder: Path, pattern: str, timeout: float = 300) -> Path:
        """Wait until there is a file of this name below a folder."""
        _until(lambda: any(folder.rglob(pattern)), timeout, f"no {pattern} below {folder}")
        return next(folder.rglob(pattern))

    def kill_server(self, job_id: str, round_: int, timeout: float = 300) -> None:
        """Kill all processes of the server after a round has begun. Its kit starts it again."""
        self._await_round(job_id, round_, timeout)
        server = [p for p in self.processes() if any("fed.app.server" in part for part in p.cmdline())]
        for process in server:
            _kill(process)
        psutil.wait_procs(server, timeout=10)
        self.wait_for_clients()

    def _await_round(self, job_id: str, round_: int, timeout: float) -> None:
        def begun() -> bool:
            events = self.events(job_id)
            return any(e["event"] == "round_started" and e["round"] >= round_ for e in events)

        _until(begun, timeout, f"round {round_} did not begin")

    def outcome(self, job_id: str, timeout: float = 300) -> str:
        """Wait until a job is over, in whatever way, and return NVFlare's status of it."""
        lead = ("--startup-kit", self.kit(LEAD))
        waiting = ("job", "wait", job_id, "--timeout", f"{timeout:g}", *lead)
        self.nvflare(*waiting, timeout=timeout + 30, fails=True)
        return json.dumps(self.nvflare("job", "meta", job_id, *lead))

    def refusal(self, job: Path) -> str:
        """Add a line of code to a copy of a job, submit it, and return the reason why it did not run."""
        with_code = shutil.copytree(job, job.with_name(f"{job.name}_with_code"))
        (with_code / "app/custom").mkdir()
        (with_code / "app/custom/mine.py").write_text("print('code that nobody at the site has seen')\n")
        about = self.outcome(self.submit(with_code))
        if "FAILED_TO_RUN" not in about:
            raise RunFailed(f"a job with code was not refused: {about[-600:]}")
        return about

    def named(self, folder: Path) -> list[Path]:
        """The files below a folder in which the patient's name is."""
        name = PATIENT.encode()
        return [path for path in folder.rglob("*") if path.is_file() and name in path.read_bytes()]

    def is_kept(self, certificate: bool) -> bool:
        """Return whether the server keeps a TLS connection with or without a site's certificate."""
        startup = self.kit(self.hospitals[0]) / "startup"
        context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
        context.set_alpn_protocols(["h2"])  # gRPC's, without which it closes the connection
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

    def shut_down(self, timeout: float = 300) -> None:
        """Shut down the whole system, and wait until none of its processes runs."""
        # The command waits only for half a minute, and a busy machine may need longer.
        self.nvflare("system", "shutdown", "all", "--force", "--startup-kit", self.kit(ADMIN), fails=True)
        _until(lambda: not self.processes(), timeout, "the system did not end")

    def stop_kits(self, timeout: float = 300) -> None:
        """Stop every hospital and the server, and wait until none of their processes runs."""
        for name in (*self.hospitals, SERVER):
            self.medfedaug("site", "stop", self.kit(name))
        _until(lambda: not self.processes(), timeout, "the system did not end")

    def wait_for_clients(self, timeout: float = 300) -> None:
        """Wait until all hospitals have joined."""
        command = ("system", "status", "--startup-kit", self.kit(ADMIN))

        def all_there() -> bool:
            answer = json.dumps(self.nvflare(*command, fails=True))
            return all(name in answer for name in self.hospitals)

        _until(all_there, timeout, "not all sites have joined")


def _read_aloud(printed: str) -> str:
    """The fingerprint in what a command printed."""
    fingerprints = re.findall(r"fingerprint(?: of the root)?: ([0-9A-F ]+)", " ".join(printed.split()))
    return str(fingerprints[-1])


def _refuse_private_key(archive: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        for member in opened.namelist():
            if b"PRIVATE KEY" in opened.read(member):
                raise RunFailed(f"{archive.name}: {member} holds a private key")


def _name_a_patient(site: Path) -> None:
    listing = site / "dataset.json"
    content = json.loads(listing.read_text())
    for case in (case for split in ("training", "validation", "test") for case in content[split]):
        for kind in ("image", "label"):
            path = Path(case[kind])
            case[kind] = str(path.with_name(f"{PATIENT}_{path.name}"))
            (site / path).rename(site / case[kind])
    listing.write_text(json.dumps(content))


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


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
