"""Bring a site back into its running jobs after a restart of its machine or parent process.

NVFlare 2.9 gives a site that registers again a new token, while the server's process of a running job knows
only the tokens of the job's start: the site has no job, and the job waits for it. The server accepts a job
process with the earlier token as the same site, and sends it the pending task.

Therefore the launcher writes a `JobSession` to the folder of each job that it starts, and `JobRejoiner`, a
component of the site's parent process, starts the job processes again with it.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, JobConstants, SystemComponents
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.job_launcher_spec import JobProcessArgs
from nvflare.apis.shareable import Shareable
from nvflare.apis.utils.fl_context_utils import gen_new_peer_ctx
from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.cellnet.core_cell import MessageHeaderKey
from nvflare.fuel.f3.cellnet.defs import ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.lighter.tool_consts import NVFLARE_SIG_FILE
from nvflare.lighter.utils import verify_folder_signature_and_get_signers
from nvflare.private.defs import CellChannel, CellChannelTopic, CellMessageHeaderKeys, new_cell_message
from nvflare.private.fed.utils.app_authz import AppAuthzService

from medfedaug.federation.job_folder import JOB_FOLDER, SESSION
from medfedaug.nvflare_jobs.kit.kit_process import command_line
from medfedaug.utils.files import write_json

_FILE = f"{JOB_FOLDER}/{SESSION}"
_IDENTITY = (JobProcessArgs.AUTH_TOKEN, JobProcessArgs.TOKEN_SIGNATURE, JobProcessArgs.SSID)
_WORKER = "nvflare.private.fed.app.client.worker_process"
_PAUSE = 5.0  # seconds between two attempts to reach the server
_PATIENCE = 60.0
"""Seconds in which an orphaned job process may end by itself; NVFlare's ends within about one."""


@dataclass(frozen=True)
class JobSession:
    """The identity under which the server's process of a job knows this site.

    ``meta`` is the job's metadata from the server, and ``token`` the site's token when the job began, with
    the server's signature. A different ``ssid``, the server's session, means that the server restarted and
    the job is over.
    """

    job: str
    meta: dict[str, Any]
    token: str
    signature: str
    ssid: str

    def save(self, workspace: str | Path) -> None:
        """Write it to the job's folder, readable only by the site: the token authenticates the site."""
        write_json(Path(workspace) / self.job / _FILE, asdict(self), private=True)

    @classmethod
    def load(cls, workspace: str | Path, job: str) -> JobSession | None:
        """Return the session of a job, if it has one."""
        file = Path(workspace) / job / _FILE
        return cls(**json.loads(file.read_text())) if file.exists() else None

    @classmethod
    def all_of(cls, workspace: str | Path) -> list[JobSession]:
        """Return the sessions of all jobs that have not ended at this site."""
        return [cls(**json.loads(path.read_text())) for path in sorted(Path(workspace).glob(f"*/{_FILE}"))]

    @classmethod
    def of(cls, job_meta: dict[str, Any], fl_ctx: FLContext) -> JobSession:
        """Return the session of a job that starts now, from NVFlare's arguments for its process."""
        arguments = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS)
        token, signature, ssid = (arguments[key][1] for key in _IDENTITY)
        return cls(job_meta[JobConstants.JOB_ID], dict(job_meta), token, signature, ssid)

    def apply(self, fl_ctx: FLContext) -> None:
        """Let the job's process present this identity instead of the site's current one."""
        arguments = fl_ctx.get_prop(FLContextKey.JOB_PROCESS_ARGS)
        for key, value in zip(_IDENTITY, (self.token, self.signature, self.ssid), strict=True):
            arguments[key] = (arguments[key][0], value)

    @staticmethod
    def forget(workspace: str | Path, job: str) -> None:
        """Remove the session of a job that is over at this site."""
        (Path(workspace) / job / _FILE).unlink(missing_ok=True)


class JobRejoiner(FLComponent):
    """Start the processes of jobs that were running when the site's machine went down.

    It starts the jobs that still run at the server and that the site's current policy allows, as NVFlare
    checks when it deploys a job.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Begin once the site has registered; only its parent process sees this event."""
        if event_type == EventType.SYSTEM_START:
            engine = fl_ctx.get_engine()
            threading.Thread(target=self._rejoin, args=(engine,), name="rejoin", daemon=True).start()

    def _rejoin(self, engine: Any) -> None:
        try:
            workspace, client = str(engine.args.workspace), engine.client
            sessions = [s for s in JobSession.all_of(workspace) if not self._is_lost(s, client, workspace)]
            ended = self._ended(engine, [session.job for session in sessions]) if sessions else set()
            for session in sessions:
                if session.job in ended:
                    self.logger.info(f"job {session.job} ended while this site was away")
                    JobSession.forget(workspace, session.job)
                else:
                    self._start(engine, session, workspace)
        except Exception as error:
            self.logger.exception(f"no job was started again: {error}")

    def _is_lost(self, session: JobSession, client: Any, workspace: str) -> bool:
        """Return whether the server's restart has ended the job."""
        lost = session.ssid != str(client.ssid)
        if lost:
            self.logger.warning(
                f"job {session.job}: the server was started again too, and NVFlare cannot continue a job "
                "then; the lead submits it again with --resume"
            )
            JobSession.forget(workspace, session.job)
        return lost

    def _ended(self, engine: Any, jobs: list[str]) -> set[str]:
        """Ask the server, by a heartbeat, which jobs it does not run any more."""
        client = engine.client
        while not client.communicator.heartbeat_done:
            with engine.new_context() as fl_ctx:
                body = Shareable()
                body.set_peer_context(gen_new_peer_ctx(fl_ctx))
            project = next(iter(client.servers))
            headers = {CellMessageHeaderKeys.PROJECT_NAME: project, CellMessageHeaderKeys.JOB_IDS: jobs}
            answer = client.cell.send_request(
                target=FQCN.ROOT_SERVER,
                channel=CellChannel.SERVER_MAIN,
                topic=CellChannelTopic.HEART_BEAT,
                request=new_cell_message(headers, body),
                timeout=30.0,
            )
            code = answer.get_header(MessageHeaderKey.RETURN_CODE)
            if code == ReturnCode.OK:
                return set(answer.get_header(CellMessageHeaderKeys.ABORT_JOBS) or ())
            self.logger.warning(f"the server does not say yet which jobs still run ({code})")
            time.sleep(_PAUSE)
        return set(jobs)

    def _start(self, engine: Any, session: JobSession, workspace: str) -> None:
        job, name = session.job, engine.client.client_name
        if refused := _refusal(Workspace(workspace, site_name=name), session):
            self.logger.error(f"job {job} is not started again: {refused}")
            JobSession.forget(workspace, job)
            return
        _await_end(workspace, job)
        manager = engine.get_component(SystemComponents.RESOURCE_MANAGER)
        needs = (session.meta.get(JobMetaKey.RESOURCE_SPEC.value) or {}).get(name, {})
        with engine.new_context() as fl_ctx:
            enough, token = manager.check_resources(resource_requirement=needs, fl_ctx=fl_ctx)
            if not enough:
                self.logger.error(f"job {job} is not started again: its resources are not free ({token})")
                return
            resources = manager.allocate_resources(resource_requirement=needs, token=token, fl_ctx=fl_ctx)
        if resources:
            engine.get_component(SystemComponents.RESOURCE_CONSUMER).consume(resources)
        answer = engine.start_app(
            job,
            job_meta=dict(session.meta),
            allocated_resource=resources,
            token=token,
            resource_manager=manager,
        )
        self.logger.warning(f"job {job} was running when this site went down; it continues ({answer})")


def _refusal(workspace: Workspace, session: JobSession) -> str:
    """Return the reason why the site's current policy refuses the job; empty if it allows it."""
    app = workspace.get_app_dir(session.job)
    if not Path(app).is_dir():
        return "its folder is gone"
    problem, info = AppAuthzService.validate_app(app)
    if problem:
        return str(problem)
    info = AppAuthzService.derive_local_app_info(info, session.meta, workspace.site_name)
    keys = (JobMetaKey.SUBMITTER_NAME, JobMetaKey.SUBMITTER_ORG, JobMetaKey.SUBMITTER_ROLE)
    submitters = [tuple(session.meta.get(key.value, "") for key in keys)]
    if (Path(app) / NVFLARE_SIG_FILE).exists():
        root = workspace.get_file_path_in_startup("rootCA.pem")
        verified, submitters = verify_folder_signature_and_get_signers(app, root)
        if not verified or not submitters:
            return "its signature is not valid"
    for name, org, role in submitters:
        allowed, problem = AppAuthzService.authorize_app_info(info, name, org, role, job_meta=session.meta)
        if problem or not allowed:
            return str(problem or "not authorized")
    return ""


def _await_end(workspace: str, job: str) -> None:
    """Wait for an orphaned process of the job: two processes would write the same state."""
    orphans = [p for p in psutil.process_iter() if {_WORKER, job, workspace} <= {*command_line(p)}]
    _, alive = psutil.wait_procs(orphans, timeout=_PATIENCE)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=_PATIENCE)
