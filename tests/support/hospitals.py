"""Hospitals with kits of their own, whose executors answer a server in this process as they do a real one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from medfedaug.config import bundle_reference as bundles
from medfedaug.config.run import Execution, RunConfig
from medfedaug.federation import FederationServer
from medfedaug.federation.in_process import SitesInProcess
from medfedaug.federation.messages.messages import Reply, Request
from medfedaug.federation.protocol import run as run_protocol
from medfedaug.hospital.privacy.ledger import ACCOUNT_MARK
from medfedaug.nvflare_jobs.job.executor import SiteExecutor
from medfedaug.nvflare_jobs.job.messages import reply_from_model, request_to_model
from medfedaug.utils import plugins


class Hospital:
    """A site's kit, and the executor of the job that runs there.

    Args:
        kit: its folder; the name is the site's.
        data: the site's data.
        first: whether no other kit has used these images, which tests share: a mark of another test goes.
        settings: of ``local/medfedaug.json``.
    """

    def __init__(self, kit: Path, data: Path, *, first: bool = True, **settings: Any) -> None:
        self.kit, self.name, self.data = kit, kit.name, data
        if first:
            (data / ACCOUNT_MARK).unlink(missing_ok=True)
        (kit / "local").mkdir(parents=True, exist_ok=True)
        (kit / "startup").mkdir(exist_ok=True)
        if not (kit / "startup/fed_client.json").exists():
            (kit / "startup/fed_client.json").write_text("{}")
        (kit / "local/authorization.json.default").write_text('{"permissions": {}}')
        self.set(data=str(data), device="cpu", **settings)
        self.logged: list[str] = []
        self.signal = Signal()

    def set(self, **settings: Any) -> None:
        (self.kit / "local/medfedaug.json").write_text(json.dumps(settings))

    def start(self, config: RunConfig, job: str, threads: int = 1) -> None:
        """A job begins at the site."""
        self.context = SimpleNamespace(
            get_identity_name=lambda: self.name,
            get_workspace=lambda: SimpleNamespace(
                get_root_dir=lambda: str(self.kit),
                get_run_dir=lambda job: str(self.kit / job),
                get_startup_kit_dir=lambda: str(self.kit / "startup"),
                get_app_dir=lambda job: str(self.kit / job / f"app_{self.name}"),
                get_job_meta_path=lambda job: str(self.kit / job / "meta.json"),
            ),
            get_job_id=lambda: job,
        )
        self.executor = SiteExecutor(config=json.loads(json.dumps(config.to_dict())), threads=threads)
        self.executor.log_error = lambda fl_ctx, text, *more, **others: self.logged.append(text)
        self.executor.log_exception = self.executor.log_error

    def end(self) -> None:
        """The job ends at the site."""
        self.executor.handle_event(EventType.END_RUN, self.context)

    def answer(self, request: Request) -> Reply:
        # As a server that does not keep to NVFlare's own checks would send it.
        model = request_to_model(replace(request, round=0))
        model.meta["medfedaug"]["round"] = request.round
        shareable = FLModelUtils.to_shareable(model)
        try:
            result = self.executor.execute(request.task, shareable, self.context, self.signal)
        finally:
            plugins.restrict(None)
            bundles.restrict(None)
        return reply_from_model(FLModelUtils.from_shareable(result))


class Deployment(SitesInProcess):
    """A federation of hospitals: `Deployment(hospitals).run(config)` is a job, from submission to its end."""

    def __init__(self, hospitals: Sequence[Hospital]) -> None:
        super().__init__({hospital.name: hospital for hospital in hospitals})
        self.hospitals, self.jobs = self.sites, 0
        self.events: list[dict[str, Any]] = []
        self.replies: list[tuple[str, Reply]] = []

    def run(self, config: RunConfig, min_sites: int = 2, **given: Any) -> FederationServer:
        self.jobs += 1
        self.events, self.replies = [], []
        for hospital in self.hospitals.values():
            hospital.start(config, f"job-{self.jobs}")
        server = FederationServer(config, self.events.append, Execution(min_sites=min_sites), **given)
        try:
            run_protocol(server, self)
        finally:
            for hospital in self.hospitals.values():
                hospital.end()
        return server

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Any) -> Mapping[str, str]:
        def noted(name: str, reply: Reply) -> bool:
            self.replies.append((name, reply))
            return bool(accept(name, reply))

        return super().ask(request, sites, needed, noted)
