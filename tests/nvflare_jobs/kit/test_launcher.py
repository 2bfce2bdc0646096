"""A site's job process that dies comes back, and a site that cannot go on fails nobody else's."""

import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobProcessArgs, JobReturnCode
from nvflare.app_common.job_launcher.process_launcher import ProcessHandle
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.private.fed.client.client_executor import REPORTABLE_JOB_FAILURES
from nvflare.private.fed.utils.fed_utils import get_return_code
from nvflare.utils.process_utils import spawn_process

from medfedaug.nvflare_jobs.kit import launcher
from medfedaug.nvflare_jobs.kit.launcher import RestartingHandle, RestartingLauncher


class Process:
    """A process that ends at once with the code that it was given, or when it is killed."""

    def __init__(self, code: int | None) -> None:
        self.code, self.killed = code, threading.Event()

    def wait(self) -> None:
        if self.code is None:
            assert self.killed.wait(10)

    def poll(self) -> int:
        return JobReturnCode.EXECUTION_ERROR if self.code is None else self.code

    def terminate(self) -> None:
        self.killed.set()


class Starts:
    """Stands in for NVFlare's launcher: one code a start; text is written to the exit file."""

    def __init__(self, exit_file, *codes) -> None:
        self.exit_file, self.codes, self.processes = exit_file, list(codes), []

    def __call__(self) -> Process:
        code = self.codes.pop(0)
        self.exit_file.unlink(missing_ok=True)
        if isinstance(code, str):
            self.exit_file.write_text(code)
            code = 0
        self.processes.append(Process(code))
        return self.processes[-1]


@pytest.fixture
def handle(tmp_path, monkeypatch):
    def make(*codes, restarts: int = 3, pause: float = 0.0, healthy: float = 3600.0):
        for name, value in {"_RESTARTS": restarts, "_PAUSE": pause, "_HEALTHY": healthy}.items():
            monkeypatch.setattr(launcher, name, value)
        starts, log = Starts(tmp_path / "_process_rc.txt", *codes), []
        made = RestartingHandle(starts, exit_file=starts.exit_file, log=log.append)
        return made, starts, log

    return make


def reported(handle, tmp_path) -> int:
    """What NVFlare makes of the handle once it has waited for it."""
    return get_return_code(handle, "", str(tmp_path), None)


DIED, CRASHED = JobReturnCode.EXECUTION_ERROR, str(ProcessExitCode.EXCEPTION)


@pytest.mark.parametrize("death", [DIED, CRASHED])
def test_a_process_that_died_is_started_again(handle, tmp_path, death):
    made, starts, log = handle(death, death, 0)
    assert made.poll() == JobReturnCode.UNKNOWN
    made.wait()
    assert len(starts.processes) == 3
    assert reported(made, tmp_path) == JobReturnCode.SUCCESS
    assert "2 more times" in log[0]
    assert "1 more times" in log[1]


@pytest.mark.parametrize("death", [DIED, CRASHED])
def test_after_the_last_restart_the_site_is_silent(handle, tmp_path, death):
    made, starts, log = handle(*[death] * 4)
    made.wait()
    assert len(starts.processes) == 4
    assert "left out" in log[-1]
    assert reported(made, tmp_path) not in REPORTABLE_JOB_FAILURES


def test_deaths_far_apart_do_not_add_up(handle, tmp_path):
    made, starts, _ = handle(*[DIED] * 5, 0, restarts=1, healthy=0.0)
    made.wait()
    assert len(starts.processes) == 6
    assert reported(made, tmp_path) == JobReturnCode.SUCCESS


def test_a_site_that_cannot_run_the_job_does_not_try_again(handle, tmp_path):
    made, starts, log = handle(str(ProcessExitCode.CONFIG_ERROR), 0)
    made.wait()
    assert len(starts.processes) == 1
    assert "not started again" in log[0]
    assert reported(made, tmp_path) not in REPORTABLE_JOB_FAILURES


@pytest.mark.parametrize(("codes", "pause"), [((None, 0), 0.0), ((DIED, 0), 60.0)])
def test_after_an_abort_nothing_is_started(handle, tmp_path, codes, pause):
    """While the process runs, and in the pause before the next one."""
    made, starts, _ = handle(*codes, pause=pause)
    waiting = threading.Thread(target=made.wait)
    waiting.start()
    time.sleep(0.05)
    made.terminate()
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(starts.processes) == 1
    assert starts.processes[0].killed.is_set()
    assert made.poll() not in (JobReturnCode.SUCCESS, JobReturnCode.ABORTED)


def test_a_killed_process_is_started_again_by_nvflares_own_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(launcher, "_PAUSE", 0.0)
    marker = tmp_path / "seen"
    script = f"if [ -e {marker} ]; then exit 0; fi; touch {marker}; kill -9 $$"
    monkeypatch.setattr(RestartingLauncher, "get_command", lambda self, meta, ctx: f"/bin/sh -c '{script}'")
    workspace = SimpleNamespace(get_app_custom_dir=lambda job: "", get_root_dir=lambda: str(tmp_path))
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, workspace, private=True)
    identity = (JobProcessArgs.AUTH_TOKEN, JobProcessArgs.TOKEN_SIGNATURE, JobProcessArgs.SSID)
    context.set_prop(FLContextKey.JOB_PROCESS_ARGS, dict.fromkeys(identity, ("-t", "x")), private=True)
    launched = RestartingLauncher().launch_job({"job_id": "job"}, context)
    launched.wait()
    assert marker.exists()
    assert launched.poll() == JobReturnCode.SUCCESS


def test_a_real_process_that_may_not_run_the_job_is_not_started_again(tmp_path):
    """NVFlare's handle calls every failure the same; the exit code of the process says which it was."""
    started = []

    def start() -> ProcessHandle:
        started.append(1)
        code = f"raise SystemExit({int(ProcessExitCode.UNSAFE_COMPONENT)})"
        return ProcessHandle(process_adapter=spawn_process([sys.executable, "-c", code], dict(os.environ)))

    made = RestartingHandle(start, exit_file=tmp_path / "rc", log=lambda text: None)
    made.wait()
    assert len(started) == 1
    assert reported(made, tmp_path) == ProcessExitCode.UNSAFE_COMPONENT
