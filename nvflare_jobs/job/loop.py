"""A script with a custom training loop, under NVFlare's Client API, in the process of the site's job."""

from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from nvflare.apis.dxo import DXO
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor, ExecutionMode
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.client.config import ExchangeFormat
from nvflare.client.in_process.api import TOPIC_ABORT
from nvflare.fuel.data_event.data_bus import DataBus

from medfedaug.client import META, SESSION_KEY
from medfedaug.config.training_scripts import find_loop
from medfedaug.errors import MedFedAugError, withheld
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.site.local_training import LocalRound
from medfedaug.federation.site.script_training import CustomLoop, ScriptSession
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.job.ranks import Ranks

_starts = count(1)


class _ClientAPI(ClientAPIExecutor):
    """NVFlare's executor for scripts. It is no component of the job: its results never leave the site."""

    def __init__(self, script: Path) -> None:
        super().__init__(
            execution_mode=ExecutionMode.IN_PROCESS,
            task_script_path=str(script.resolve()),
            params_exchange_format=ExchangeFormat.RAW,
            server_expected_format=ExchangeFormat.RAW,
        )

    def fire_log_analytics(self, fl_ctx: FLContext, dxo: DXO) -> None:
        """Keep the script's logs by NVFlare's tracking at the site: they would bypass the site's guard."""
        text = f"not sent: what the training script logs stays here ({dxo.data})"
        self.log_warning(fl_ctx, text, fire_event=False)


class _AbortSignal:
    """An abort signal of NVFlare, which a lost rank triggers, too."""

    def __init__(self, signal: Signal | None, ranks: Ranks) -> None:
        self._signal, self._ranks = signal, ranks

    @property
    def triggered(self) -> bool:
        """Return whether the script should stop."""
        aborted = self._signal is not None and bool(self._signal.triggered)
        return aborted or self._ranks.lost() is not None


class ScriptLoop(CustomLoop):
    """The script of a run's training loop, by its name in the run (`medfedaug.config.training_scripts`).

    The site starts it once the run is admitted, passes it rounds by NVFlare's Client API, and sends its own
    collection of the trained network. The script's messages by the Client API mark the end of a round, and
    are not sent.

    Attributes:
        settings: the site's settings, with the number of processes.
    """

    _ranks: Ranks

    def __init__(self, loop: str) -> None:
        self.loop, self.settings = loop, SiteSettings()
        self._api: _ClientAPI | None = None
        self._context: FLContext | None = None
        self._signal: Signal | None = None
        self._error = ""
        DataBus().subscribe([TOPIC_ABORT], self._ended)

    def _ended(self, _topic: str, message: Any, _bus: DataBus) -> None:
        """Keep the last line of the script's traceback, with which NVFlare ends the task."""
        lines = [line for line in str(message).splitlines() if line.strip()]
        if any("Traceback" in line for line in lines):  # other messages report the end of the task
            self._error = lines[-1]

    def enter(self, fl_ctx: FLContext, abort_signal: Signal) -> None:
        """Set the context of a request."""
        self._context, self._signal = fl_ctx, abort_signal

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Pass the end of a task or of the job to the script; `start` starts it."""
        if event_type == EventType.ABORT_TASK and self._api is not None:
            self._api.handle_event(event_type, fl_ctx)
        elif event_type == EventType.END_RUN:
            self._end(fl_ctx)
            DataBus().put_data(SESSION_KEY, None)
            DataBus().unsubscribe(TOPIC_ABORT, self._ended)

    def _end(self, fl_ctx: FLContext) -> None:
        """End the script in all its processes, if it runs."""
        if self._api is None:
            return
        self._ranks.over()
        with self._ranks.in_group():
            self._api.handle_event(EventType.END_RUN, fl_ctx)
        self._ranks.close()
        self._api = None

    def start(self, session: ScriptSession) -> None:
        """Run the script until it waits for its first round."""
        assert self._context is not None
        workspace, job = self._context.get_workspace(), self._context.get_job_id()
        script = find_loop(self.loop, Path(workspace.get_app_custom_dir(job)))
        self._end(self._context)
        self._error = ""
        self._ranks = Ranks(script, session, self.settings)
        DataBus().put_data(SESSION_KEY, (session, f"medfedaug-{next(_starts)}"))
        self._api = _ClientAPI(script)
        try:
            with self._ranks.in_group():
                self._api.handle_event(EventType.START_RUN, self._context)
            self._hand_over({}, 0)
        except MedFedAugError as error:
            if session.error is not None:
                raise session.error from error
            raise MedFedAugError(f"{error.marked}; it has to call medfedaug.client.join") from error

    def train(self, round_: LocalRound) -> None:
        """Let the script train for a round."""
        self._ranks.begin(round_)
        self._hand_over(asdict(round_), round_.number)
        self._ranks.finish()

    def _hand_over(self, meta: dict[str, Any], number: int) -> None:
        assert self._api is not None
        assert self._context is not None
        model = FLModel(metrics={"round": float(number)}, meta={META: meta}, current_round=number)
        shareable = FLModelUtils.to_shareable(model)
        signal = _AbortSignal(self._signal, self._ranks)
        with self._ranks.in_group():
            result = self._api.execute(TRAIN, shareable, self._context, signal)
        if result.get_return_code() != ReturnCode.OK or not self._ranks.collect(lambda: signal.triggered):
            # With a lost peer rank 0 fails, too, and may fail first.
            rank, cause = self._ranks.lost(1.0) or ("", self._error)
            when = f"before round {number} was over" if number else "before its first round"
            reason = f" ({withheld(cause)})" if cause else ""
            raise MedFedAugError(
                f"site {self._context.get_identity_name()}: {rank}the training script "
                f"{self.loop.split('@')[0]} ended {when}{reason}; the site's log says why"
            )
