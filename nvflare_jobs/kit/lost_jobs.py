"""Correct the status of the server's jobs after its machine or a site's went down.

NVFlare 2.9 leaves a job that was running when the server went down as RUNNING for ever. When the server's
process of a job has ended, NVFlare waits up to a quarter of an hour for every site's outcome, and calls a
finished job abnormal if a site dies meanwhile, or comes back without the job.
"""

import threading
import time
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus

_GONE_AFTER = 60.0  # seconds without a heartbeat after which the server does not wait for a site's outcome
_PERIOD = 1.0


class LostJobs(FLComponent):
    """Mark orphaned jobs as ended: a component of the server's parent process.

    Jobs that were running when the server went down are abnormally finished. A job whose process at the
    server has ended does not wait for a site that is gone or was started again: the server's outcome counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self._heard: dict[str, float] = {}
        self._restarted: set[str] = set()
        self._end = threading.Event()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin before the server takes any job; only its parent process sees these events."""
        engine = fl_ctx.get_engine()
        if event_type == EventType.SYSTEM_BOOTSTRAP:
            threading.Thread(target=self._watch, args=(engine,), name="lost jobs", daemon=True).start()
            self._end_lost(engine, fl_ctx)
        elif event_type == EventType.CLIENT_REGISTER_PROCESSED:
            # Before its first heartbeat, which would report that it does not have the job.
            peer = fl_ctx.get_peer_context()
            if peer is not None and (name := str(peer.get_identity_name())) in self._heard:
                self._restarted.add(name)
                self._release(engine)
        elif event_type == EventType.SYSTEM_END:
            self._end.set()

    def _end_lost(self, engine: Any, fl_ctx: FLContext) -> None:
        manager = engine.get_component(SystemComponents.JOB_MANAGER)
        for job in manager.get_jobs_by_status([RunStatus.RUNNING, RunStatus.DISPATCHED], fl_ctx):
            manager.set_status(job.job_id, RunStatus.FINISHED_ABNORMAL, fl_ctx)
            self.logger.warning(
                f"job {job.job_id} was running when this server went down, and is over; the lead submits "
                "it again with --resume, and it continues from its last round"
            )

    def _watch(self, engine: Any) -> None:
        while not self._end.wait(_PERIOD):
            try:
                self._release(engine)
            except Exception as error:
                self.logger.exception(f"jobs that wait for a site are not looked after: {error}")

    def _release(self, engine: Any) -> None:
        """Let ended jobs wait no longer for sites that cannot answer."""
        for client in list(engine.client_manager.get_clients().values()):
            self._heard[client.name] = float(client.last_connect_time)
        jobs, runner = set(engine.job_runner.get_client_outcome_jobs()), engine.job_runner
        for job in jobs - set(engine.run_processes) - set(engine.exception_run_processes):
            for name, heard in list(self._heard.items()):
                gone = name in self._restarted or time.time() - heard > _GONE_AFTER
                if gone and runner.is_client_outcome_pending(job, name):
                    runner.resolve_client_outcome(job, name)
                    self.logger.info(f"job {job} ended, and does not wait for {name}, which was down")
        if not jobs:
            self._restarted.clear()
