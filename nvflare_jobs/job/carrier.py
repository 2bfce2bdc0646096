"""NVFlare as the carrier of a federation: send tasks, receive results, prepare late sites."""

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.wf_comm_spec import WFCommSpec
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from medfedaug.config.run import Execution
from medfedaug.federation.messages.messages import TRAIN, Reply, Request
from medfedaug.federation.protocol import Accept, Carrier
from medfedaug.federation.server.server import FederationServer
from medfedaug.nvflare_jobs.job.messages import SiteNames, reply_from_model, request_to_model
from medfedaug.utils.event_text import OnEvent

SILENT_AFTER = 45.0  # seconds without a heartbeat after which a site counts as away

_BEAT = "jobHeartbeat"


class Presence:
    """Keep the time of each site's last heartbeat.

    NVFlare 2.9 reports a site as disconnected more than ten minutes after its machine went down, and never if
    the site registers again before. A site's job process sends a heartbeat every ten seconds, also while it
    trains. A site that never sent one, as in NVFlare's simulator, never counts as away.
    """

    def __init__(self) -> None:
        self._beats: dict[str, float] = {}

    def listen(self, communicator: WFCommSpec) -> None:
        """Note the heartbeats that reach the job's process."""
        is_active = communicator.client_is_active

        def noted(client_name: str, reason: str, fl_ctx: FLContext) -> Any:
            if reason == _BEAT:
                self._beats[client_name] = time.monotonic()
            return is_active(client_name, reason, fl_ctx)

        setattr(communicator, "client_is_active", noted)  # noqa: B010, NVFlare makes the object itself

    def away(self, sites: Iterable[str]) -> dict[str, float]:
        """Return the silent sites, each with the seconds since its last heartbeat."""
        now = time.monotonic()
        silences = {site: now - self._beats[site] for site in sites if site in self._beats}
        return {site: passed for site, passed in silences.items() if passed > SILENT_AFTER}


class Aborted(Exception):
    """The job was stopped from outside."""


class NVFlareCarrier(Carrier):
    """Broadcast a task for each request, and pass every result to the server.

    The carrier waits for all sites of a task, for at most ``grace`` seconds after enough good answers, and
    never longer than ``round_timeout``. Every ``period`` seconds it checks the answers. It reports a silent
    site, and does not wait for it after enough good answers, when all others have answered. Each training of
    a comparison has a checkpoint elsewhere.
    """

    def __init__(
        self,
        controller: Controller,
        execution: Execution,
        checkpoint: Path | None,
        fl_ctx: FLContext,
        abort_signal: Signal,
        period: float,
        presence: Presence,
        on_event: OnEvent,
    ) -> None:
        self.presence, self.on_event, self._names = presence, on_event, SiteNames()
        self._away: set[str] = set()
        self.controller, self.execution, self.checkpoint = controller, execution, checkpoint
        self.fl_ctx, self.abort_signal, self.period = fl_ctx, abort_signal, period
        self._preparing: set[str] = set()  # late sites without an answer so far
        self._training: dict[str, tuple[int, Task]] = {}  # by site, in buffered rounds
        self._arrived: queue.SimpleQueue[tuple[str, int, Reply | None]] = queue.SimpleQueue()

    def connected(self) -> list[str]:
        """List the sites that run this job and are not known to be disconnected."""
        names = (self._names.name(client.name) for client in self.fl_ctx.get_engine().get_clients())
        return sorted(name for name in names if not self._is_gone(name))

    def _is_gone(self, site: str) -> bool:
        return self.controller.get_client_disconnect_time(self._names.identifier(site)) is not None

    def away(self) -> set[str]:
        """Return the silent sites, and report changes."""
        return set(self._silent(self.connected()))

    def _silent(self, sites: Sequence[str]) -> dict[str, float]:
        away = self.presence.away(map(self._names.identifier, sites))
        silences = {self._names.name(identifier): seconds for identifier, seconds in away.items()}
        for site in sorted(set(sites) & (self._away ^ set(silences))):
            if site in silences:
                self._away.add(site)
                self.on_event({"event": "away", "site": site, "seconds": round(silences[site])})
            else:
                self._away.discard(site)
                self.on_event({"event": "returned", "site": site})
        return silences

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Send a task, and wait for the results, unless none is needed."""
        if self.abort_signal.triggered:
            raise Aborted
        if not needed:
            self._prepare(request, sites, accept)
            return {}
        self._begin(request)
        return self._end(request, self._ask(request, sites, needed, accept) if sites else {})

    def gather(
        self, request: Request, sites: Sequence[str], needed: int, accept: Accept
    ) -> Mapping[str, str]:
        """Send a task, and use the results that arrive first, of this task and of earlier ones."""
        self._begin(request)
        if sites:
            task = self._send_along(request, sites)
            self._training.update(dict.fromkeys(sites, (request.round, task)))
        good, silent, reported = 0, dict[str, str](), set[str]()
        while good < needed and self._training and not self.abort_signal.triggered:
            try:
                site, round_, reply = self._arrived.get(timeout=self.period)
            except queue.Empty:
                waiting = {*self._training}
                if waiting <= set(self._silent(sorted(waiting))):
                    reported = self._report_waiting(waiting, reported, good, needed)
                for site in sorted(waiting.difference(self.connected())):
                    silent[site] = self._reason(site, self._training.pop(site)[1])
                continue
            if self._training.get(site, (0,))[0] != round_:  # answered, or asked anew after it was lost
                continue
            _, task = self._training.pop(site)
            if reply is None:
                silent[site] = self._reason(site, task)
            elif accept(site, reply):
                good += 1
            else:
                self._warn(f"{request.task}, round {request.round}: {site} is left out")
        return self._end(request, silent)

    def under_way(self) -> Collection[str]:
        """Return the sites that train, or whose result has not been used."""
        return self._training.keys()

    def _send_along(self, request: Request, sites: Sequence[str]) -> Task:
        """Send a task whose results wait in a queue; ``None`` for missing ones."""

        def hold(site: str, reply: Reply) -> bool:
            self._arrived.put((site, request.round, reply))
            return True

        def ended(task: Task, fl_ctx: FLContext) -> None:
            for site in sites:
                self._arrived.put((site, request.round, None))

        return self._send(request, sites, hold, ended)

    def round_done(self, server: FederationServer) -> None:
        """Write the checkpoint."""
        if self.checkpoint is not None:
            server.save(self.checkpoint)

    def _begin(self, request: Request) -> None:
        if request.task == TRAIN:
            self.fl_ctx.set_prop(AppConstants.CURRENT_ROUND, request.round, private=True, sticky=True)

    def _end(self, request: Request, silent: Mapping[str, str]) -> Mapping[str, str]:
        if self.abort_signal.triggered:
            raise Aborted
        for reason in silent.values():
            self._warn(f"{request.task}, round {request.round}: {reason}")
        return silent

    def _prepare(self, request: Request, sites: Sequence[str], accept: Accept) -> None:
        """Send a task to late sites without waiting for their answers."""

        def take(site: str, reply: Reply) -> bool:
            self._preparing.discard(site)
            return accept(site, reply)

        def done(task: Task, fl_ctx: FLContext) -> None:
            self._preparing.difference_update(new)

        if new := sorted(set(sites) - self._preparing):
            self._preparing.update(new)
            self._send(request, new, take, done)

    def _ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        answered: set[str] = set()
        good: set[str] = set()
        lock, closed = threading.Lock(), False
        complete = threading.Event()  # NVFlare notices it 0.2 s later

        def take(site: str, reply: Reply) -> bool:
            with lock:
                if closed:
                    return False
                answered.add(site)
                used = accept(site, reply)
                if used:
                    good.add(site)
                if answered >= {*sites}:
                    complete.set()
            if not used:
                self._warn(f"{request.task}, round {request.round}: {site} is left out")
            return used

        task = self._send(request, sites, take)
        grace, enough_since, reported = self.execution.grace, None, set[str]()
        while not (complete.wait(self.period) or task.completion_status or self.abort_signal.triggered):
            if len(good) >= needed and enough_since is None:
                enough_since = time.monotonic()
            if grace is not None and enough_since is not None and time.monotonic() - enough_since >= grace:
                break
            waiting = set(sites) - answered
            if waiting and waiting <= set(self._silent(sites)):
                if enough_since is not None:
                    break
                reported = self._report_waiting(waiting, reported, len(good), needed)
        with lock:
            closed = True
        if task.completion_status is None and not complete.is_set():
            status = TaskCompletionStatus.CANCELLED
            self.controller.cancel_task(task, completion_status=status, fl_ctx=self.fl_ctx)
        return {site: self._reason(site, task) for site in sorted(set(sites) - answered)}

    def _report_waiting(self, waiting: set[str], reported: set[str], good: int, needed: int) -> set[str]:
        """Report that all awaited sites are silent, unless the last report was the same."""
        if waiting != reported:
            self.on_event({"event": "waiting", "sites": sorted(waiting), "answers": good, "needed": needed})
        return waiting

    def _send(
        self,
        request: Request,
        sites: Sequence[str],
        accept: Accept,
        done: Callable[[Task, FLContext], None] | None = None,
    ) -> Task:
        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            site, result = self._names.name(client_task.client.name), client_task.result
            client_task.result = None  # a site's model is large
            accept(site, _reply(site, request, result))

        data = FLModelUtils.to_shareable(request_to_model(request))
        seconds = self.execution.round_timeout
        timeout = max(1, round(seconds)) if seconds else 0  # NVFlare has whole seconds, and 0 for no limit
        task = Task(
            name=request.task, data=data, timeout=timeout, result_received_cb=received, task_done_cb=done
        )
        targets = [self._names.identifier(site) for site in sites]
        # 0 means all responses. This carrier decides how many are enough, since only good answers count.
        self.controller.broadcast(task=task, fl_ctx=self.fl_ctx, targets=targets, min_responses=0)
        return task

    def _warn(self, text: str) -> None:
        self.controller.log_warning(self.fl_ctx, text)

    def _reason(self, site: str, task: Task) -> str:
        if site in self._away:
            return f"site {site} is not heard from: its machine, its kit or its line is down"
        if self._is_gone(site):
            return f"site {site} is not connected any more"
        if task.completion_status == TaskCompletionStatus.TIMEOUT:
            return f"site {site} did not answer within {self.execution.round_timeout:g} s"
        return f"site {site} did not answer while the others were waited for"


def _reply(site: str, request: Request, result: Shareable | None) -> Reply:
    """Convert NVFlare's result to a reply, without checking its content."""
    code = result.get_return_code() if isinstance(result, Shareable) else "nothing"
    if code == ReturnCode.OK:
        try:
            return reply_from_model(FLModelUtils.from_shareable(result))
        except Exception as error:  # whatever a site sends
            text = f"site {site}: its answer cannot be read ({error!r})"[:500]
    else:
        text = f"site {site}: NVFlare delivered {code} in place of an answer"
    return Reply(request.task, request.round, error=text)
