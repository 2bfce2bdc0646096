"""A component that records the state of a kit's process, and logs problems.

A site asks the server over NVFlare's connection whether it is there: no message of gRPC shows it.
"""

import logging
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import date
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

from medfedaug.errors import StorageError
from medfedaug.nvflare_jobs.kit.kit_process import PARENTS, ProcessRecord
from medfedaug.nvflare_jobs.kit.startup import check_certificates

LEAST_DISK = 2 * 2**30  # bytes that must be free for a kit's state: a job writes logs and checkpoints

_CHANNEL, _TOPIC = "medfedaug", "status"
_FLAGS = ("shutdown.fl", "restart.fl")
_LOG_PATIENCE = 60.0  # seconds


class KitStatus(FLComponent):
    """Write the `ProcessRecord` of a server's or a site's parent process every ``period`` seconds.

    It logs low disk space, and once a day problems of the certificate. It begins when NVFlare builds it: a
    site without a valid certificate waits for its first connection, and NVFlare fires no event before.
    """

    def __init__(self, period: float = 30.0) -> None:
        super().__init__()
        self.period = period
        self._cell: Any = None
        self._low, self._checked = False, date.min
        main = getattr(sys.modules.get("__main__"), "__spec__", None)
        if getattr(main, "name", "") in PARENTS:  # a job's process builds this component as well
            kit, now = Path.cwd(), time.time()
            record = ProcessRecord(os.getpid(), now, now)
            with suppress(StorageError):  # the next record reports it
                record.save(kit)  # at once, in case the process dies in its next line
            threading.Thread(target=self._run, args=(kit, record), name="status", daemon=True).start()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Answer the sites at the server, and begin to ask it at a site that has registered."""
        engine = fl_ctx.get_engine()
        if event_type == EventType.SYSTEM_BOOTSTRAP and (server := getattr(engine, "server", None)):
            server.cell.register_request_cb(
                channel=_CHANNEL, topic=_TOPIC, cb=lambda _: make_reply(ReturnCode.OK)
            )
        elif event_type == EventType.SYSTEM_START and (client := getattr(engine, "client", None)):
            self._cell = client.cell

    def _run(self, kit: Path, record: ProcessRecord) -> None:
        _await_log()
        due = 0.0
        while not record.stopping:
            if time.monotonic() >= due or (self._cell is not None and record.heard is None):
                try:
                    record = self._refresh(kit, record)
                    record.save(kit)
                except Exception as error:
                    self.logger.error(f"the state of the kit is not known: {error}")
                due = time.monotonic() + self.period
            time.sleep(1.0)
            if any((kit / flag).exists() for flag in _FLAGS):
                record = replace(record, stopping=True, written=time.time())
                record.save(kit)

    def _refresh(self, kit: Path, record: ProcessRecord) -> ProcessRecord:
        free = shutil.disk_usage(kit).free
        if (low := free < LEAST_DISK) and not self._low:
            self.logger.error(f"disk: {free / 2**30:.1f} GiB are free, and jobs need more: make room")
        self._low = low
        if self._checked != (today := date.today()):
            self._checked = today
            for check in check_certificates(kit):
                if not check.ok:
                    log = self.logger.warning if check.ok is None else self.logger.error
                    log(f"{check.name}: {check.found}. {check.advice}")
        heard = time.time() if self._cell is not None and self._is_heard() else record.heard
        return replace(record, heard=heard, written=time.time())

    def _is_heard(self) -> bool:
        """Ask the server whether it is there."""
        answer = self._cell.send_request(
            target=FQCN.ROOT_SERVER,
            channel=_CHANNEL,
            topic=_TOPIC,
            request=new_cell_message({}, Shareable()),
            timeout=10.0,
        )
        silent = (ReturnCode.TIMEOUT, ReturnCode.TARGET_UNREACHABLE, ReturnCode.COMM_ERROR)
        return answer.get_header(MessageHeaderKey.RETURN_CODE) not in silent


def _await_log() -> None:
    """Wait for the log, which NVFlare sets up after the components: earlier lines would be lost."""
    deadline = time.monotonic() + _LOG_PATIENCE
    while time.monotonic() < deadline:
        if any(isinstance(handler, logging.FileHandler) for handler in logging.getLogger().handlers):
            return
        time.sleep(0.1)
