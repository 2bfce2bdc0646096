"""The server's part of a plan from the sites' fingerprints."""

import threading
from collections.abc import Mapping
from typing import Any

from medfedaug.config.run import RunConfig
from medfedaug.errors import RunFailed, UpdateRefused
from medfedaug.federation.messages.messages import (
    FINGERPRINT,
    Reply,
    Request,
    own_entries,
    raise_error,
    refusal,
)
from medfedaug.federation.messages.tensor_checks import check_tensors
from medfedaug.federation.planning.fingerprint import PLAN, check_fingerprint, fingerprint_shapes
from medfedaug.federation.planning.planner import Planned, make_plan
from medfedaug.methods.base import Payload


class Planning:
    """Gathers fingerprints and makes the plan of a run."""

    def __init__(self, config: RunConfig, run: str) -> None:
        self.config, self.run = config, run
        self.sites: dict[str, Payload] = {}
        self.refused: dict[str, str] = {}
        self.result: Planned | None = None
        self._lock = threading.Lock()  # sites answer in separate threads

    def request(self) -> Request:
        """Ask a site for its fingerprint."""
        return Request(FINGERPRINT, run=self.run)

    def accept(self, site: str, reply: Reply) -> bool:
        """Accept a fingerprint, empty from a site that does not train; return whether it could be used."""

        def check() -> None:
            raise_error(reply)
            if reply.payload:
                payload = own_entries(reply.payload, PLAN)
                if len(payload) != len(reply.payload):
                    raise UpdateRefused(site, PLAN, expected="entries of a fingerprint", got="others")
                check_tensors(site, payload, shapes)
                check_fingerprint(site, payload)
                accepted.update({key: value.float() for key, value in payload.items()})

        shapes = fingerprint_shapes(self.config.num_classes, self.config.in_channels)
        accepted: Payload = {}
        reason = refusal(site, check)
        with self._lock:
            if reason is not None:
                self.refused[site] = reason
            elif accepted:
                self.sites[site] = accepted
        return reason is None

    def finish(self, needed: int) -> None:
        """Make the plan."""
        if len(self.sites) < max(needed, 1) or (self.refused and not needed):
            reasons = "; ".join(reason for _, reason in sorted(self.refused.items()))
            raise RunFailed(f"no plan could be made: {reasons or 'no site sent a fingerprint'}")
        self.result = make_plan(self.sites, self.config)

    def configured(self) -> RunConfig:
        """Return the run with its plan."""
        return self.config if self.result is None else self.result.configure(self.config)

    def saved(self) -> dict[str, Any]:
        """Return the planning's part of a checkpoint."""
        return {} if self.result is None else {"sites": self.sites, **self.result.to_dict()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore a result of `saved`."""
        if saved:
            self.sites, self.result = dict(saved["sites"]), Planned.from_dict(saved)

    def planned(self) -> dict[str, Any]:
        """Return the settings for the sites, as JSON types; empty if they are those of the job."""
        return self.result.to_dict()["changes"] if self.result is not None else {}

    def to_results(self) -> dict[str, Any]:
        """Return the planning's part of a run's record."""
        if self.result is None:
            return {}
        fingerprints = {
            site: {key: value.tolist() for key, value in sorted(payload.items())}
            for site, payload in sorted(self.sites.items())
        }
        reasons = self.result.to_dict()["reasons"]
        return {"planned": {"asked": self.config.to_dict(), "reasons": reasons, "fingerprints": fingerprints}}
