"""Ends jobs that a server which was started again cannot continue.

NVFlare 2.9 leaves such a job as RUNNING for ever: it can be neither waited for nor aborted.
"""

from __future__ import annotations

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import RunStatus

__all__ = ["LostJobs"]


class LostJobs(FLComponent):
    """Marks jobs as abnormally finished that were running when the server went down."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Look once, before the server takes any job; only its parent process sees this event."""
        if event_type != EventType.SYSTEM_BOOTSTRAP:
            return
        manager = fl_ctx.get_engine().get_component(SystemComponents.JOB_MANAGER)
        try:
            lost = manager.get_jobs_by_status([RunStatus.RUNNING, RunStatus.DISPATCHED], fl_ctx)
            for job in lost:
                manager.set_status(job.job_id, RunStatus.FINISHED_ABNORMAL, fl_ctx)
                self.logger.warning(
                    f"job {job.job_id} was running when this server went down, and is over; the lead submits "
                    "it again with --resume, and it goes on from its last round"
                )
        except Exception as error:
            self.logger.exception(f"jobs that were running are not looked after: {error}")
