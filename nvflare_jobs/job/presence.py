"""Track the silent sites of a job.

NVFlare 2.9 reports a site as disconnected more than ten minutes after its machine went down, and never if the
site registers again before. A site's job process sends a heartbeat every ten seconds, also while it trains.
"""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.wf_comm_spec import WFCommSpec

SILENT_AFTER = 45.0
"""Seconds without a heartbeat after which a site counts as away."""

_BEAT = "jobHeartbeat"
_ASLEEP = 5.0


class Presence:
    """Keep the time of each site's last message.

    A site that never sent a heartbeat, as in NVFlare's simulator, never counts as away.
    """

    def __init__(
        self, silent_after: float = SILENT_AFTER, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.silent_after, self.clock = silent_after, clock
        self._heard: dict[str, float] = {}
        self._beating: set[str] = set()
        self._lock = threading.Lock()
        self._checked: float | None = None

    def listen(self, communicator: WFCommSpec) -> None:
        """Note every message of a site that reaches the job's process."""
        is_active = communicator.client_is_active

        def noted(client_name: str, reason: str, fl_ctx: FLContext) -> Any:
            self.heard(client_name, beat=reason == _BEAT)
            return is_active(client_name, reason, fl_ctx)

        setattr(communicator, "client_is_active", noted)  # noqa: B010, NVFlare makes the object itself

    def heard(self, site: str, *, beat: bool) -> None:
        """Note a message of a site."""
        with self._lock:
            self._heard[site] = self.clock()
            self._beating.update([site] if beat else [])

    def away(self, sites: Iterable[str]) -> dict[str, float]:
        """Return the silent sites, each with the seconds since its last message.

        It must be called often: a gap means that this process stood still, and received nothing.
        """
        with self._lock:
            now = self.clock()
            if self._checked is not None and now - self._checked > _ASLEEP:
                self._heard = dict.fromkeys(self._heard, now)
            self._checked = now
            silences = {site: now - self._heard[site] for site in sites if site in self._beating}
            return {site: passed for site, passed in silences.items() if passed > self.silent_after}
