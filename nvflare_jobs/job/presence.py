"""Track the silent sites of a job.

NVFlare 2.9 reports a site as disconnected more than ten minutes after its machine went down, and never if the
site registers again before. A site's job process sends a heartbeat every ten seconds, also while it trains.
"""

import time
from collections.abc import Iterable
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.apis.wf_comm_spec import WFCommSpec

SILENT_AFTER = 45.0
"""Seconds without a heartbeat after which a site counts as away."""

_BEAT = "jobHeartbeat"


class Presence:
    """Keep the time of each site's last heartbeat.

    A site that never sent one, as in NVFlare's simulator, never counts as away.
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
