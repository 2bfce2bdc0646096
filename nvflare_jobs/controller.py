"""The server's component: carries the engine-neutral server's requests, and waits for the sites' replies."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from medfedaug import plugins
from medfedaug.config import RunConfig
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation.checkpoint import server_checkpoint
from medfedaug.federation.messages import PREPARE, TEST, TRAIN, VALIDATE, Reply, Request
from medfedaug.federation.output import write_models, write_run
from medfedaug.federation.server import FederationServer
from medfedaug.nvflare_jobs.messages import reply_from_model, request_to_model
from medfedaug.settings import SiteSettings

__all__ = ["EVENTS_FILE", "OUTPUT_FOLDER", "TASKS", "FederationController"]

OUTPUT_FOLDER, EVENTS_FILE = "medfedaug", "events.jsonl"

TASKS = [PREPARE, TRAIN, VALIDATE, TEST]

Accept = Callable[[str, Reply], bool]


class FederationController(Controller):
    """Channel statistics first, then rounds, then the test of the best model.

    What a reply is worth is decided by `medfedaug.federation.FederationServer`; this class sends, waits and
    saves. It waits for all sites that were asked, for ``grace`` seconds more once ``min_sites`` gave a good
    answer, never longer than ``round_timeout``. A site that raises, hangs, dies or sends nothing usable is
    left out of that round with a reason and asked again in the next one; a site that connects later is
    prepared beside the round in progress.

    After every round a checkpoint goes to the state folder (`medfedaug.settings.SiteSettings`), outside the
    folder of the job. NVFlare cannot continue a job whose server was restarted; a new job with ``resume`` and
    the same name continues the run from there.

    In the server's run folder it leaves ``medfedaug/`` with ``results.json``, ``global_model.pt``,
    ``final_model.pt`` and ``events.jsonl``; after a failure the models of the last good round and no results.

    Args:
        config: `medfedaug.config.RunConfig` as a dictionary.
        run_name: under which its checkpoint is found again.
        resume: continue the run of that name from its checkpoint.
        task_check_period: seconds between two looks at whether a round is complete.

    Raises:
        ConfigError: when the configuration is not one.
    """

    def __init__(
        self,
        config: dict[str, Any],
        run_name: str = "medfedaug",
        resume: bool = False,
        task_check_period: float = 0.05,
    ) -> None:
        super().__init__(task_check_period=task_check_period)
        self.config = config
        self.run_name = run_name
        self.resume = resume
        self.task_check_period = task_check_period
        self._run_config = RunConfig.from_dict(config)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_name):
            raise ConfigError(f"{run_name!r} is not a name for a run: letters, digits, '.', '_' and '-'")

    # ------------------------------------------------------------------ NVFlare's interface

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Find the engine, and let tensors be read."""
        fobs.register(TensorDecomposer)
        self.engine = fl_ctx.get_engine()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """The whole federation."""
        self._abort, self._fl_ctx = abort_signal, fl_ctx
        workspace = self.engine.get_workspace()
        folder = Path(workspace.get_run_dir(fl_ctx.get_job_id())) / OUTPUT_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        settings = SiteSettings.load(workspace.get_root_dir())
        assert settings.state is not None  # a kit always has one
        self._checkpoint = server_checkpoint(settings.state, self.run_name)
        plugins.restrict(settings.plugins)
        with (folder / EVENTS_FILE).open("w", buffering=1) as events:
            lock = threading.Lock()  # sites answer in threads of their own

            def record(event: dict[str, Any]) -> None:
                with lock:
                    events.write(json.dumps(event) + "\n")

            self.server: FederationServer | None = None
            try:
                self.server = FederationServer(self._run_config, record)
                self._federate(self.server)
                if abort_signal.triggered:
                    if self.server.round > 1:
                        write_models(folder, self.server)
                    record({"event": "failed", "message": "the job was aborted"})
                    return
                write_run(folder, self.server)
                record({"event": "finished"})
            except Exception as error:
                message = str(error) if isinstance(error, MedFedAugError) else repr(error)
                self.log_exception(fl_ctx, message)
                if self.server is not None and self.server.round > 1:
                    write_models(folder, self.server)
                record({"event": "failed", "message": message})
                self.system_panic(message, fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing is left to do."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """An answer that came when nobody waited for it any longer: the site has been told as left out."""
        self.log_warning(
            fl_ctx, f"site {client.name}: its answer to {task_name} came too late and is not used"
        )

    # ------------------------------------------------------------------ the federation

    def _federate(self, server: FederationServer) -> None:
        self._late: set[str] = set()
        if self.resume:
            server.restore(self._checkpoint)
        else:
            if self._checkpoint.exists():  # of an earlier run of this name, which may still be wanted
                os.replace(self._checkpoint, self._checkpoint.with_suffix(".previous.pt"))
            everybody = self._connected()
            self._ask(server.prepare(), everybody, len(everybody), server.accept_preparation)
            server.finish_preparation()
        while server.round < self._run_config.rounds and not self._abort.triggered:
            self._round(server)
        if self._abort.triggered:
            return
        sites = sorted(server.sites.keys() & set(self._connected()))
        self._ask(server.validate(), sites, server.needed, server.accept_validation)
        server.finish_validation()
        # Every site's test counts, so that all are waited for, but for those that were silent just now.
        known = sorted(server.known & set(self._connected()))
        silent = {trouble["site"] for trouble in server.rounds[-1]["missing"]}
        self._ask(server.test(), known, len(set(known) - silent), server.accept_test)

    def _round(self, server: FederationServer) -> None:
        self._invite(server)
        connected = self._connected()
        targets = server.choose_sites(connected)
        request = server.start_round(targets)
        for site in sorted(server.sites.keys() - set(connected)):
            server.no_answer(TRAIN, site, f"site {site} is not connected")
        self._set(AppConstants.CURRENT_ROUND, server.round)
        self._set(AppConstants.NUM_ROUNDS, self._run_config.rounds)
        self.fire_event(AppEventType.ROUND_STARTED, self._fl_ctx)
        self._ask(request, targets, server.needed, server.accept)
        if self._abort.triggered:
            return
        self.fire_event(AppEventType.BEFORE_AGGREGATION, self._fl_ctx)
        server.finish_round()
        self.fire_event(AppEventType.AFTER_AGGREGATION, self._fl_ctx)
        server.save(self._checkpoint)
        self.fire_event(AppEventType.ROUND_DONE, self._fl_ctx)

    def _set(self, name: str, value: Any) -> None:
        self._fl_ctx.set_prop(name, value, private=True, sticky=True)

    def _connected(self) -> list[str]:
        """The sites that run this job and are not known to be gone."""
        names = (client.name for client in self.engine.get_clients())
        return sorted(name for name in names if self.get_client_disconnect_time(name) is None)

    def _invite(self, server: FederationServer) -> None:
        """Prepare sites that are new, or could not be prepared before, beside the round about to begin."""

        def accept(site: str, reply: Reply) -> bool:
            self._late.discard(site)
            joined = server.accept_preparation(site, reply)
            if joined:
                server.finish_preparation()
            return joined

        def done(task: Task, fl_ctx: FLContext) -> None:
            self._late.difference_update(new)

        new = sorted(set(self._connected()) - server.known - self._late)
        if new:
            self._late.update(new)
            self._send(server.prepare(), new, accept, done)

    # ------------------------------------------------------------------ requests and replies

    def _send(
        self,
        request: Request,
        targets: Sequence[str],
        accept: Accept,
        done: Callable[[Task, FLContext], None] | None = None,
    ) -> Task:
        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            site, result = client_task.client.name, client_task.result
            client_task.result = None  # a site's model is large
            fl_ctx.set_prop(AppConstants.CURRENT_ROUND, request.round, private=True, sticky=True)
            self.fire_event(AppEventType.BEFORE_CONTRIBUTION_ACCEPT, fl_ctx)
            used = accept(site, _reply(site, request, result))
            fl_ctx.set_prop(AppConstants.AGGREGATION_ACCEPTED, used, private=True, sticky=False)
            self.fire_event(AppEventType.AFTER_CONTRIBUTION_ACCEPT, fl_ctx)

        data = FLModelUtils.to_shareable(request_to_model(request))
        task = Task(
            name=request.task,
            data=data,
            timeout=_whole_seconds(self._run_config.round_timeout),
            result_received_cb=received,
            task_done_cb=done,
        )
        # 0 responses stand for all: when enough is enough is decided by what the answers are worth.
        self.broadcast(task=task, fl_ctx=self._fl_ctx, targets=list(targets), min_responses=0)
        return task

    def _ask(self, request: Request, targets: Sequence[str], needed: int, accept: Accept) -> None:
        """Send a request and wait for the replies; who gave none is named to the server."""
        answered: set[str] = set()
        good: set[str] = set()
        lock, closed = threading.Lock(), False

        def take(site: str, reply: Reply) -> bool:
            with lock:
                if closed:
                    return False
                answered.add(site)
                used = accept(site, reply)
                if used:
                    good.add(site)
            if not used:
                self.log_warning(self._fl_ctx, f"{request.task}, round {request.round}: {site} is left out")
            return used

        if not targets:
            return
        task = self._send(request, targets, take)
        grace, enough_since = self._run_config.grace, None
        while task.completion_status is None and not self._abort.triggered:
            if len(good) >= needed and enough_since is None:
                enough_since = time.monotonic()
            if grace is not None and enough_since is not None and time.monotonic() - enough_since >= grace:
                break
            time.sleep(self.task_check_period)
        with lock:
            closed = True
        if task.completion_status is None:
            self.cancel_task(task, completion_status=TaskCompletionStatus.CANCELLED, fl_ctx=self._fl_ctx)
        if self._abort.triggered:
            return
        for site in sorted(set(targets) - answered):
            reason = self._reason(site, task)
            assert self.server is not None
            self.server.no_answer(request.task, site, reason)
            self.log_warning(self._fl_ctx, f"{request.task}, round {request.round}: {reason}")

    def _reason(self, site: str, task: Task) -> str:
        if self.get_client_disconnect_time(site) is not None:
            return f"site {site} is not connected any more"
        if task.completion_status == TaskCompletionStatus.TIMEOUT:
            return f"site {site} did not answer within {self._run_config.round_timeout:g} s"
        return f"site {site} did not answer while the others were waited for"


def _reply(site: str, request: Request, result: Shareable | None) -> Reply:
    """What NVFlare delivered, as a reply; nothing in it has been checked yet."""
    failed = Reply(request.task, request.round)
    code = result.get_return_code() if isinstance(result, Shareable) else "nothing"
    if code != ReturnCode.OK:
        failed.error = f"site {site}: NVFlare delivered {code} in place of an answer"
        return failed
    try:
        return reply_from_model(FLModelUtils.from_shareable(result))
    except Exception as error:  # whatever a site sends
        failed.error = f"site {site}: its answer cannot be read ({error!r})"[:500]
        return failed


def _whole_seconds(timeout: float) -> int:
    """NVFlare counts in whole seconds, and 0 stands for no limit."""
    return 0 if not timeout else max(1, round(timeout))
