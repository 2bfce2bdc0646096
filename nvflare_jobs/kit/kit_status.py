"""A component that records the state of a kit's process, and logs problems.

A site asks the server for its clock and its version over NVFlare's connection: no message of gRPC has them.
"""

import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.private.defs import new_cell_message

from medfedaug._version import __version__
from medfedaug.errors import StorageError
from medfedaug.nvflare_jobs.kit.kit_process import (
    LATEST,
    RECENT,
    ProcessRecord,
    is_version,
    pid_namespace,
    settings_at_start,
)
from medfedaug.nvflare_jobs.kit.startup import MOST_CLOCK, await_log, is_parent

LEAST_DISK = 2 * 2**30
"""Bytes that must be free for a kit's state: a job writes logs and checkpoints."""

_CHANNEL, _TOPIC = "medfedaug", "status"
_FLAGS = ("shutdown.fl", "restart.fl")
_LOOPING = 3
_LEFT = 30 * 86400.0  # seconds of silence after which a site counts as gone


class KitStatus(FLComponent):
    """Write the `ProcessRecord` of a server's or a site's parent process every ``period`` seconds.

    It begins when NVFlare builds it, since a process that cannot continue fires no event.
    """

    def __init__(self, period: float = 30.0) -> None:
        super().__init__()
        self.period = period
        self._engine: Any = None
        self._reported: set[str] = set()
        if is_parent():  # its working folder is the kit; a job's process builds this component as well
            kit = Path.cwd()
            record = _first_record(kit)
            self._save(kit, record)  # at once, in case the process dies in its next line
            threading.Thread(target=self._run, args=(kit, record), name="status", daemon=True).start()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Answer the sites at the server, and begin to ask it at a site that has registered."""
        engine = fl_ctx.get_engine()
        if event_type == EventType.SYSTEM_BOOTSTRAP and (server := getattr(engine, "server", None)):
            server.cell.register_request_cb(channel=_CHANNEL, topic=_TOPIC, cb=_answer)
            self._engine = engine
        elif event_type == EventType.SYSTEM_START and hasattr(engine, "client"):
            self._engine = engine

    def _run(self, kit: Path, record: ProcessRecord) -> None:
        await_log()
        if len(record.starts) >= _LOOPING:
            passed = record.starts[-1] - record.starts[0]
            self.logger.error(
                f"crash loop: this kit was started {len(record.starts)} times within {passed:.0f} s, and "
                "each time ended without being asked to: the last lines before a start say why"
            )
        due = 0.0
        while not record.stopping:
            known = self._engine is not None
            if time.monotonic() >= due or (known and record.heard is None and not record.sites):
                record = self._refresh(kit, record)
                self._save(kit, record)
                due = time.monotonic() + self.period
            time.sleep(1.0)
            if any((kit / flag).exists() for flag in _FLAGS):
                record = replace(record, stopping=True, written=time.time())
                self._save(kit, record)

    def _save(self, kit: Path, record: ProcessRecord) -> None:
        try:
            record.save(kit)
        except StorageError as error:
            self._report("record", str(error))

    def _refresh(self, kit: Path, record: ProcessRecord) -> ProcessRecord:
        try:
            free = shutil.disk_usage(kit).free
            low = free < LEAST_DISK
            self._report("disk", f"disk: {free / 2**30:.1f} GiB are free, and jobs need more: make room", low)
            if self._engine is not None:
                record = self._ask(record) if hasattr(self._engine, "client") else self._sites(record)
        except Exception as error:
            self._report("status", f"the state of the kit is not known: {error}")
        return replace(record, written=time.time())

    def _ask(self, record: ProcessRecord) -> ProcessRecord:
        before = time.time()
        answer = self._engine.client.cell.send_request(
            target=FQCN.ROOT_SERVER,
            channel=_CHANNEL,
            topic=_TOPIC,
            request=new_cell_message({}, Shareable()),
            timeout=10.0,
        )
        after = time.time()
        code = answer.get_header(MessageHeaderKey.RETURN_CODE)
        if code in (ReturnCode.TIMEOUT, ReturnCode.TARGET_UNREACHABLE, ReturnCode.COMM_ERROR):
            return record
        record = replace(record, heard=after)
        payload = answer.payload if code == ReturnCode.OK and isinstance(answer.payload, dict) else {}
        clock, version = payload.get("time"), payload.get("version")
        if isinstance(clock, float) and 0 <= clock <= LATEST:
            apart = clock - (before + after) / 2
            record = replace(record, clock=apart)
            line = f"clock: {abs(apart):.0f} s from the server's: set it, and turn NTP on"
            self._report("clock", line, abs(apart) > MOST_CLOCK)
        if isinstance(version, str) and is_version(version):
            record = replace(record, server_version=version)
            line = f"version: medfedaug {__version__} here, {version} at the server: install one version"
            self._report("version", line, version != __version__)
        return record

    def _sites(self, record: ProcessRecord) -> ProcessRecord:
        clients = list(self._engine.client_manager.get_clients().values())
        times = {client.name: float(client.last_connect_time) for client in clients}
        return replace(record, sites={**record.sites, **times})

    def _report(self, problem: str, line: str, wrong: bool = True) -> None:
        """Log a problem once, and again after it was solved."""
        if not wrong:
            self._reported.discard(problem)
        elif problem not in self._reported:
            self.logger.error(line)
            self._reported.add(problem)


def _answer(message: Any) -> Any:
    """Answer a site, without reading its request."""
    return make_reply(ReturnCode.OK, "", {"time": time.time(), "version": __version__})


def _first_record(kit: Path) -> ProcessRecord:
    now, before = time.time(), ProcessRecord.load(kit)
    recent = []
    if before is not None and not before.stopping:
        recent = [when for when in before.starts if now - RECENT < when <= now]
    return ProcessRecord(
        pid=os.getpid(),
        started=now,
        namespace=pid_namespace(),
        starts=[*recent, now],
        settings=settings_at_start(kit),
        written=now,
        sites={site: at for site, at in (before.sites if before else {}).items() if now - at < _LEFT},
    )
