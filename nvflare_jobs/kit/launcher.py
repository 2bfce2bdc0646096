"""A launcher that starts a site's job process again when it has died.

If a job process is killed, runs out of memory or crashes, NVFlare 2.9 reports this to the server, which ends
the job for all sites. Here the site's parent process starts the job process again, and NVFlare's server sends
it the pending task. If the process dies too often, the site stays silent, and the server's rules (its time
limits and the number of sites that it needs) decide how the job continues. After a crash of the parent
process, `medfedaug.nvflare_jobs.kit.rejoin.JobRejoiner` starts the job process.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey, FLMetaKey, JobConstants
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobHandleSpec, JobReturnCode
from nvflare.app_common.job_launcher.client_process_launcher import ClientProcessJobLauncher
from nvflare.fuel.common.exit_codes import ProcessExitCode

from medfedaug.nvflare_jobs.kit.rejoin import JobSession

# The site or its policy cannot run this job, so another attempt would fail too.
_PERMANENT = (ProcessExitCode.UNSAFE_COMPONENT, ProcessExitCode.CONFIG_ERROR)
# Reported to the server: the end of the job, and a job that names what the site forbids.
_REPORTED = (JobReturnCode.SUCCESS, JobReturnCode.ABORTED, ProcessExitCode.UNSAFE_COMPONENT)


_RESTARTS, _PAUSE = 3, 5.0
"""Restarts of a job's process, and the pause in seconds before the first one, which doubles each time."""
_HEALTHY = 3600.0  # seconds after which restarts are counted anew, since a job may run for weeks


class RestartingLauncher(ClientProcessJobLauncher):
    """Start a site's job process, and start it again when it has died.

    A clean exit, an abort, or an exit because this site cannot run the job is final.
    """

    def launch_job(self, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobHandleSpec:
        """Start the job process, and return a handle that restarts it when needed.

        A job that was running when the parent process died keeps its first token.
        """
        job_id = job_meta[JobConstants.JOB_ID]
        root = fl_ctx.get_prop(FLContextKey.WORKSPACE_OBJECT).get_root_dir()
        session = JobSession.load(root, job_id)
        if session is not None:
            session.apply(fl_ctx)
        else:
            JobSession.of(job_meta, fl_ctx).save(root)
        start = super().launch_job
        return RestartingHandle(
            lambda: start(job_meta, fl_ctx),
            exit_file=Path(root) / job_id / FLMetaKey.PROCESS_RC_FILE,
            log=lambda text: self.logger.warning(f"job {job_id}: {text}"),
            ended=lambda: JobSession.forget(root, job_id),
        )


class RestartingHandle(JobHandleSpec):
    """A job process and its successors, as one handle.

    A process may have written its exit code to ``exit_file``. ``log`` gets a line for every restart.
    ``ended`` is called when the job is over at this site, but not when its process died too often.
    """

    def __init__(
        self,
        start: Callable[[], JobHandleSpec],
        *,
        exit_file: Path,
        log: Callable[[str], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._start, self._exit_file, self._log, self._ended = start, exit_file, log, ended
        self._left, self._pause = _RESTARTS, _PAUSE
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._result: int | None = None
        self._process = start()

    def terminate(self) -> None:
        """Kill the process and do not start it again."""
        with self._lock:
            self._stopped.set()
            self._process.terminate()

    def poll(self) -> int:
        """Return the last process's code; `JobReturnCode.UNKNOWN` while one runs or will be started."""
        return JobReturnCode.UNKNOWN if self._result is None else self._result

    def wait(self) -> None:
        """Wait until the job is over at this site. Restarts happen during this call."""
        while True:
            started = time.monotonic()
            self._process.wait()
            code = self._exit_code()
            if self._stopped.is_set() or code in _REPORTED:
                self._result = code
                self._ended()
                return
            lasted = time.monotonic() - started
            if lasted >= _HEALTHY:
                self._left, self._pause = _RESTARTS, _PAUSE
            text = f"the job process died after {lasted:.0f} s (code {code})"
            if code in _PERMANENT or not self._left:
                self._log(f"{text}; it is not started again, and this site is left out")
                break
            self._left -= 1
            self._log(f"{text}; it is started again in {self._pause:g} s, {self._left} more times at most")
            if self._stopped.wait(self._pause):
                self._ended()
                break
            self._pause *= 2
            with self._lock:
                if self._stopped.is_set():
                    self._ended()
                    break
                self._process = self._start()
        # With any other code the server would end the job for all sites.
        self._exit_file.unlink(missing_ok=True)
        self._result = JobReturnCode.UNKNOWN

    def _exit_code(self) -> int:
        with suppress(OSError, ValueError):
            return int(self._exit_file.read_text())
        # NVFlare's handle knows only success and failure; its adapter has the process's code.
        code = getattr(self._process, "adapter", self._process).poll()
        return int(code if code in _PERMANENT else self._process.poll())
