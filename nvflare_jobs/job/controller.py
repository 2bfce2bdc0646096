"""The server's component: the federation's protocol as an NVFlare controller."""

import os
import re
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from nvflare.apis.client import Client
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.wf_comm_spec import WFCommSpec
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from medfedaug.config import bundle_reference as bundles
from medfedaug.config.run import Execution, RunConfig
from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation.job_folder import JOB_FOLDER, REPORT, server_checkpoint
from medfedaug.federation.messages.initial_weights import INITIAL_FILE, InitialWeights
from medfedaug.federation.protocol import run
from medfedaug.federation.server.output import write_models, write_run
from medfedaug.federation.server.server import FederationServer
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.job.carrier import Aborted, NVFlareCarrier, Presence
from medfedaug.nvflare_jobs.job.messages import EventLog
from medfedaug.runs.folder import locked
from medfedaug.utils import plugins
from medfedaug.utils.files import remove_unfinished

_CHECK_PERIOD = 0.05  # seconds between two looks at the answers


class ServerJob(NamedTuple):
    """A job at the server: its settings there, its folder, and what sends requests and records events."""

    settings: SiteSettings
    carrier: Callable[[Path | None], NVFlareCarrier]
    record: EventLog
    folder: Path
    fl_ctx: FLContext


class ProtocolController(Controller):
    """Run a protocol over NVFlare, and write its events to ``medfedaug/events.jsonl``."""

    def __init__(self, execution: dict[str, Any] | None) -> None:
        super().__init__()
        self.execution = execution or {}
        self._execution = Execution.from_dict(self.execution)
        self._presence = Presence()

    def set_communicator(self, communicator: WFCommSpec) -> None:
        """Set NVFlare's communicator, and listen to its messages."""
        super().set_communicator(communicator)
        self._presence.listen(communicator)

    @abstractmethod
    def carry(self, job: ServerJob) -> None:
        """Run the protocol."""

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Find the engine, and register the decomposer for tensors."""
        fobs.register(TensorDecomposer)
        self.engine = fl_ctx.get_engine()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run the protocol to its end."""
        workspace = self.engine.get_workspace()
        folder = Path(workspace.get_run_dir(fl_ctx.get_job_id())) / JOB_FOLDER
        folder.mkdir(parents=True, exist_ok=True)

        def carrier(checkpoint: Path | None) -> NVFlareCarrier:
            return NVFlareCarrier(
                self,
                self._execution,
                checkpoint,
                fl_ctx,
                abort_signal,
                period=_CHECK_PERIOD,
                presence=self._presence,
                on_event=record,
            )

        record = EventLog(folder.parent, "server")
        try:
            settings = SiteSettings.load(workspace.get_root_dir())
            plugins.restrict(settings.plugins)
            bundles.restrict(settings.bundles)
            with record.warnings():
                self.carry(ServerJob(settings, carrier, record, folder, fl_ctx))
            record({"event": "finished"})
        except Aborted:
            record({"event": "failed", "message": "the job was aborted"})
        except Exception as error:
            message = str(error) if isinstance(error, MedFedAugError) else repr(error)
            self.log_exception(fl_ctx, message)
            record({"event": "failed", "message": message})
            self.system_panic(message, fl_ctx)
        finally:
            record.close()

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Do nothing."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Ignore a late answer of a site that was reported as left out."""
        text = f"site {client.name}: its answer to {task_name} came too late and is not used"
        self.log_warning(fl_ctx, text)


class FederationController(ProtocolController):
    """Run a federation at the server, and write its results.

    `medfedaug.federation.protocol.run` defines the order of calls, `medfedaug.federation.FederationServer`
    checks and uses replies, and `NVFlareCarrier` sends and waits. If a site raises, hangs, dies or sends
    nothing usable, it is left out of the round with a reason and asked again in the next round. If a site
    connects later, it is prepared during the current round.

    After every round a checkpoint is written to the state folder
    (`medfedaug.hospital.privacy.site_settings.SiteSettings`), outside the folder of the job. NVFlare cannot
    continue a job whose server was restarted. A new job with ``resume`` and the same name continues the run
    from the checkpoint.

    The server's run folder then has ``medfedaug/`` with ``results.json``, ``global_model.pt``,
    ``final_model.pt`` and ``events.jsonl``; after a failure, the models of the last good round and no
    results.

    ``config`` and ``execution`` are `medfedaug.config.run.RunConfig` and `medfedaug.config.run.Execution` as
    dictionaries.
    """

    def __init__(
        self,
        config: dict[str, Any],
        execution: dict[str, Any] | None = None,
        run_name: str = "medfedaug",
        resume: bool = False,
    ) -> None:
        super().__init__(execution)
        self.config = config
        self.run_name = run_name
        self.resume = resume
        self._run_config = RunConfig.from_dict(config)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", run_name):
            raise ConfigError(f"{run_name!r} is not a name for a run: letters, digits, '.', '_' and '-'")

    def carry(self, job: ServerJob) -> None:
        """Run the federation to its end."""
        settings, carrier, record, folder, fl_ctx = job
        assert settings.state is not None  # a kit always has one
        checkpoint = server_checkpoint(settings.state, self.run_name)
        fl_ctx.set_prop(AppConstants.NUM_ROUNDS, self._run_config.rounds, private=True, sticky=True)
        server = FederationServer(self._run_config, record, self._execution, initial=self._initial(fl_ctx))
        with self._alone(checkpoint, settings):
            remove_unfinished(checkpoint.parent)
            try:
                if self.resume:
                    server.restore(checkpoint)
                elif checkpoint.exists():  # an earlier run of this name, which the user may still need
                    os.replace(checkpoint, checkpoint.with_suffix(".previous.pt"))
                run(server, carrier(checkpoint))
                write_run(folder, server, "" if settings.simulation else fl_ctx.get_job_id())
            except Exception:
                if server.round > 1:
                    write_models(folder, server)
                raise
        if not settings.simulation:  # a simulation writes its pages itself
            self._write_pages(folder, fl_ctx)

    def _alone(self, checkpoint: Path, settings: SiteSettings) -> AbstractContextManager[None]:
        """Lock the run's checkpoint, since NVFlare runs several jobs at a time."""
        if settings.simulation:  # its whole folder is locked
            return nullcontext()
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        return locked(
            checkpoint.with_suffix(".lock"),
            f"another job of the name {self.run_name} is under way at this server, and both would write one "
            "checkpoint: wait until it is over, or export this one under another name",
        )

    def _write_pages(self, folder: Path, fl_ctx: FLContext) -> None:
        """Write page and model card; an error must not fail a job with results."""
        # Imported here: matplotlib takes a second, and is needed only now.
        from medfedaug.analysis import write_report
        from medfedaug.analysis.model_card import write_model_card
        from medfedaug.runs.recorded_run import RecordedRun

        try:
            write_report([folder], folder / REPORT)
            write_model_card(RecordedRun.of(folder), folder)
        except Exception as error:
            text = f"no page or model card: {error!r}; `medfedaug report` writes them from the results"
            self.log_warning(fl_ctx, text)

    def _initial(self, fl_ctx: FLContext) -> InitialWeights | None:
        if not self._run_config.init or self.resume:
            return None
        path = Path(self.engine.get_workspace().get_app_config_dir(fl_ctx.get_job_id())) / INITIAL_FILE
        return InitialWeights.load(path)
