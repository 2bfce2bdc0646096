"""The site's component: a thin shell around the engine-neutral trainer."""

import json
from abc import abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_def import JobMetaKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs
from nvflare.lighter.utils import verify_folder_signature_and_get_signers

from medfedaug.config import bundle_reference as bundles
from medfedaug.config.run import RunConfig
from medfedaug.errors import MedFedAugError
from medfedaug.federation.messages.messages import Reply
from medfedaug.federation.site.comparison import ComparisonSite
from medfedaug.federation.site.site import Gate, Site
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.privacy import JOBS_FOLDER, LEDGER_FILE, JobBook, Origin, Pseudonyms, public_text
from medfedaug.hospital.privacy.guard import SitePrivacy
from medfedaug.hospital.privacy.guarded_gate import GuardedGate
from medfedaug.hospital.privacy.pseudonyms import without_job_text
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.hospital.secure.history import HISTORY_FILE, SumHistory
from medfedaug.hospital.secure.identity import Certificates
from medfedaug.nvflare_jobs.job.loop import ScriptLoop
from medfedaug.nvflare_jobs.job.messages import EventLog, SiteNames, reply_to_model, request_from_model
from medfedaug.utils import plugins
from medfedaug.utils.files import parse_json
from medfedaug.utils.printable import printable

_LONGEST = 200
_ROOT = "rootCA.pem"


class AnsweringExecutor(Executor):
    """Give every task to the site, which is opened for the first one.

    Nothing that it logs becomes an event of NVFlare, which a job could send to the server.

    Data folder and device are settings of the site (`medfedaug.hospital.privacy.site_settings.SiteSettings`)
    and never come from the job.
    """

    def __init__(self, config: dict[str, Any], threads: int) -> None:
        super().__init__()
        self.config = config
        self.threads = threads
        self._site: Site | ComparisonSite | None = None
        self._gate: Gate | None = None
        self._events: EventLog | None = None

    @abstractmethod
    def open_site(
        self, name: str, settings: SiteSettings, gate: Gate, events: EventLog
    ) -> Site | ComparisonSite:
        """Open the site with its settings."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Register the decomposer for tensors when a run starts, and record its end at this site."""
        if event_type == EventType.START_RUN:
            fobs.register(TensorDecomposer)
        elif event_type == EventType.END_RUN and self._events is not None:
            self._events({"event": "ended"})
            self._events.close()
            try:
                if self._gate is not None:
                    self._gate.ended()
            except MedFedAugError as error:
                self.log_error(fl_ctx, f"not in the book of jobs: its end ({error})", fire_event=False)
        super().handle_event(event_type, fl_ctx)

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Answer a request; an error becomes an answer of one line, and does not stop other sites."""
        name = SiteNames().name(fl_ctx.get_identity_name())
        if self._events is None:
            run = Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id()))
            self._events = EventLog(run, f"site {name}")
        with self._events.warnings():
            reply = self._answered(name, self._events, shareable, fl_ctx, abort_signal)
        return FLModelUtils.to_shareable(reply_to_model(reply))

    def _answered(
        self, name: str, events: EventLog, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Reply:
        request = request_from_model(FLModelUtils.from_shareable(shareable))
        if self._site is None:
            try:
                self._site = self._opened(name, events, fl_ctx)
            except Exception as error:
                self.log_exception(fl_ctx, str(error), fire_event=False)
                if isinstance(error, MedFedAugError):
                    text = without_job_text(public_text(error), self.config, (name,))
                else:  # its text may have names of this site
                    text = (
                        f"{type(error).__name__} while its settings were opened; the site's own log says more"
                    )
                return Reply(request.task, error=f"site {name}: {text}")
        reply = self._site.answer(request, should_stop=lambda: bool(abort_signal.triggered))
        if reply.error:
            self.log_error(fl_ctx, reply.error, fire_event=False)
        return reply

    def _opened(self, name: str, events: EventLog, fl_ctx: FLContext) -> Site | ComparisonSite:
        kit = fl_ctx.get_workspace().get_root_dir()
        settings = SiteSettings.load(kit)
        plugins.restrict(settings.plugins)
        bundles.restrict(settings.bundles)
        self._gate = Gate() if settings.simulation else _gate(name, settings, kit, fl_ctx)
        return self.open_site(name, settings, self._gate, events)


class SiteExecutor(AnsweringExecutor):
    """Run the tasks of a federation at a site, with at most ``threads`` CPU threads; 0 is PyTorch's choice.

    If the run has a custom training loop, the site's rules decide whether it takes part, before the script
    starts (`medfedaug.nvflare_jobs.job.loop.ScriptLoop`). A job names the executor by its class path, so it
    carries no code.
    """

    def __init__(self, config: dict[str, Any], threads: int = 0) -> None:
        super().__init__(config, threads)
        self._run_config = RunConfig.from_dict(config)
        self._loop = ScriptLoop(self._run_config.loop) if self._run_config.loop else None

    def open_site(self, name: str, settings: SiteSettings, gate: Gate, events: EventLog) -> Site:
        """Open the site with its trainer."""
        trainer = site_trainer(name, self._run_config, settings, self.threads)
        trainer.loop = self._loop
        if self._loop is not None:
            self._loop.settings = settings
        return Site(name, trainer, gate, events)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """End the script with the job."""
        if self._loop is not None and event_type == EventType.END_RUN:
            self._loop.end()
        super().handle_event(event_type, fl_ctx)

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Answer a request."""
        if self._loop is not None:
            job = fl_ctx.get_job_id()
            self._loop.folder = Path(fl_ctx.get_workspace().get_app_custom_dir(job))
            self._loop.should_stop = lambda: bool(abort_signal.triggered)
        return super().execute(task_name, shareable, fl_ctx, abort_signal)


def site_trainer(name: str, config: RunConfig, settings: SiteSettings, threads: int) -> SiteTrainer:
    """Build a site's trainer from the site's settings."""
    assert settings.state is not None  # a kit always has one
    state, privacy = settings.state / name, SitePrivacy(settings.privacy, settings.state / LEDGER_FILE)
    return SiteTrainer(
        config, settings.data, settings.device, state, privacy, threads=threads, machine=settings
    )


def _gate(name: str, settings: SiteSettings, kit: str, fl_ctx: FLContext) -> Gate:
    assert settings.state is not None
    state = settings.state / name
    return GuardedGate(
        name,
        settings.jobs,
        Pseudonyms.of_site(state),
        JobBook(state / JOBS_FOLDER),
        fl_ctx.get_job_id(),
        f"medfedaug site approve {kit}",
        partial(kit_identity, Path(kit)),
        origin=job_origin(fl_ctx),
        history=SumHistory(state / HISTORY_FILE),
    )


def kit_identity(kit: Path) -> Certificates:
    """Return the certificates in a site's kit; the server's names are not a site's."""
    startup = kit / "startup"
    servers = parse_json((startup / "fed_client.json").read_text())["servers"]
    names = [server[key] for server in servers for key in ("identity", "name") if key in server]
    certificate, key, root = (startup / name for name in ("client.crt", "client.key", "rootCA.pem"))
    return Certificates(certificate, key, root, names)


def job_origin(fl_ctx: FLContext) -> Origin:
    """Read a job's name and submitter at a site.

    The server gives the name. The submitter comes from the project's certificate that signed the job's
    content, or else from the server.
    """
    workspace, job = fl_ctx.get_workspace(), fl_ctx.get_job_id()
    file = Path(workspace.get_job_meta_path(job))
    meta = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    name = _text(meta.get(JobMetaKey.JOB_NAME.value))
    root = Path(workspace.get_startup_kit_dir()) / _ROOT
    app = Path(workspace.get_app_dir(job))
    if root.is_file() and app.is_dir():
        verified, signers = verify_folder_signature_and_get_signers(str(app), str(root))
        if verified and len(signers) == 1:
            submitter, organisation, role = map(_text, signers[0])
            return Origin(name, submitter, organisation, role, signed=True)
    claimed = (JobMetaKey.SUBMITTER_NAME, JobMetaKey.SUBMITTER_ORG, JobMetaKey.SUBMITTER_ROLE)
    submitter, organisation, role = (_text(meta.get(key.value)) for key in claimed)
    return Origin(name, submitter, organisation, role)


def _text(value: object) -> str:
    return printable("" if value is None else value)[:_LONGEST]
