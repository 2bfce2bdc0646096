"""Simulated hours at which the sites of a simulation answer."""

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from medfedaug.config.run import Execution
from medfedaug.errors import ConfigError
from medfedaug.federation.messages.messages import Reply


class SimulatedTime:
    """A clock for sites of different speed, and the replies that have not arrived.

    A round of training takes a site of speed 1 one hour, and everything else no time. A site trains one round
    at a time. Simultaneous replies arrive in the order of their requests. Without speeds no time passes.
    """

    def __init__(self, execution: Execution, sites: Collection[str]) -> None:
        unknown = sorted(execution.site_speed.keys() - {*sites})
        if unknown:
            raise ConfigError(f"site_speed: no site {unknown[0]}; there are {', '.join(sorted(sites))}")
        self.speeds, self.now = execution.site_speed, 0.0
        self._free: dict[str, float] = {}
        self._coming: list[tuple[float, int, str, Reply]] = []
        self._sent = 0

    def finishes(self, site: str) -> float:
        """Return the hour at which a site finishes a training requested now."""
        start = max(self.now, self._free.get(site, 0.0))
        return start + (1 / self.speeds.get(site, 1.0) if self.speeds else 0.0)

    def trains(self, site: str) -> float:
        """Let a site train; return the hour at which it finishes."""
        self._free[site] = self.finishes(site)
        return self._free[site]

    def train_together(self, sites: Iterable[str]) -> None:
        """Let sites train at the same time, and wait for the last."""
        self.now = max((self.trains(site) for site in sites), default=self.now)

    def send(self, site: str, reply: Reply) -> None:
        """Let a site train; its reply arrives when it finishes."""
        self._sent += 1
        heapq.heappush(self._coming, (self.trains(site), self._sent, site, reply))

    def next_reply(self) -> tuple[str, Reply]:
        """Return the next reply, and advance to its arrival."""
        arrival, _, site, reply = heapq.heappop(self._coming)
        self.now = max(self.now, arrival)
        return site, reply

    def coming(self) -> list[str]:
        """Return the sites whose reply has not arrived."""
        return [site for _, _, site, _ in self._coming]

    def state(self) -> dict[str, Any]:
        """Return the part of a checkpoint; empty at hour 0 without pending replies."""
        coming = [(arrival, sent, site, vars(reply)) for arrival, sent, site, reply in self._coming]
        passed = {"now": self.now, "free": self._free, "coming": coming, "sent": self._sent}
        return passed if self.now or coming else {}

    def restore(self, saved: Mapping[str, Any], device: torch.device) -> None:
        """Restore a result of `state`, with models on a device."""
        self.now, self._free, self._sent = saved["now"], dict(saved["free"]), saved["sent"]
        for arrival, sent, site, reply in saved["coming"]:
            weights = {key: value.to(device) for key, value in reply["weights"].items()}
            self._coming.append((arrival, sent, site, Reply(**{**reply, "weights": weights})))
