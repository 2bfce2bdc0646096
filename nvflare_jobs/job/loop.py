"""A script with a training loop of its own, under NVFlare's Client API, in the process of the site's job."""

from __future__ import annotations

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

from medfedaug.client import DESK, META
from medfedaug.config.training_scripts import find_loop
from medfedaug.errors import MedFedAugError, withheld
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.site.local_training import LocalRound
from medfedaug.federation.site.script_training import Desk, ForeignLoop
from medfedaug.nvflare_jobs.public_paths import public_path

__all__ = ["ScriptLoop"]

_starts = count(1)


class _ClientAPI(ClientAPIExecutor):
    """NVFlare's executor for scripts. It is no component of the job: nothing of what it returns leaves."""

    def __init__(self, script: Path) -> None:
        super().__init__(
            execution_mode=ExecutionMode.IN_PROCESS,
            task_script_path=str(script.resolve()),
            params_exchange_format=ExchangeFormat.RAW,
            server_expected_format=ExchangeFormat.RAW,
        )

    def fire_log_analytics(self, fl_ctx: FLContext, dxo: DXO) -> None:
        """Keep what the script logs by NVFlare's tracking at the site: it would pass by the site's guard."""
        self.log_warning(fl_ctx, f"not sent: what the training script logs stays here ({dxo.data})")


@public_path
class ScriptLoop(ForeignLoop):
    """The script of a run's training loop.

    The site starts it once the run is admitted, hands it rounds by NVFlare's Client API, and sends what it
    collects itself of the network that the script has trained. What the script sends by the Client API says
    that a round is over, and goes nowhere.

    Args:
        loop: as the run names it (`medfedaug.config.training_scripts`).
    """

    def __init__(self, loop: str) -> None:
        self.loop = loop
        self._api: _ClientAPI | None = None
        self._context: FLContext | None = None
        self._signal: Signal | None = None
        self._error = ""
        DataBus().subscribe([TOPIC_ABORT], self._ended)

    def _ended(self, _topic: str, message: Any, _bus: DataBus) -> None:
        """Keep the last line of the script's traceback, with which NVFlare ends the task."""
        lines = [line for line in str(message).splitlines() if line.strip()]
        if any("Traceback" in line for line in lines):  # other messages say that the task has ended
            self._error = lines[-1]

    def enter(self, fl_ctx: FLContext, abort_signal: Signal) -> None:
        """A request has come, in this context."""
        self._context, self._signal = fl_ctx, abort_signal

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """The end of a task or of the job, for the script; its start is left to `start`."""
        if self._api is not None and event_type in (EventType.ABORT_TASK, EventType.END_RUN):
            self._api.handle_event(event_type, fl_ctx)
            if event_type == EventType.END_RUN:
                DataBus().put_data(DESK, None)
                DataBus().unsubscribe(TOPIC_ABORT, self._ended)

    def start(self, desk: Desk) -> None:
        """Run the script until it waits for its first round."""
        assert self._context is not None
        workspace, job = self._context.get_workspace(), self._context.get_job_id()
        script = find_loop(self.loop, Path(workspace.get_app_custom_dir(job)))
        if self._api is not None:
            self._api.handle_event(EventType.END_RUN, self._context)
        DataBus().put_data(DESK, (desk, f"medfedaug-{next(_starts)}"))
        self._api, self._error = _ClientAPI(script), ""
        self._api.handle_event(EventType.START_RUN, self._context)
        try:
            self._hand_over({}, 0)
        except MedFedAugError as error:
            if desk.error is not None:
                raise desk.error from error
            raise MedFedAugError(f"{error.marked}; it has to call medfedaug.client.join") from error

    def train(self, round_: LocalRound) -> None:
        """Let the script train for a round."""
        self._hand_over(asdict(round_), round_.number)

    def _hand_over(self, told: dict[str, Any], number: int) -> None:
        assert self._api is not None
        assert self._context is not None
        model = FLModel(metrics={"round": float(number)}, meta={META: told}, current_round=number)
        shareable = FLModelUtils.to_shareable(model)
        result = self._api.execute(TRAIN, shareable, self._context, self._signal)
        if result.get_return_code() != ReturnCode.OK:
            when = f"before round {number} was over" if number else "before its first round"
            reason = f" ({withheld(self._error)})" if self._error else ""
            raise MedFedAugError(
                f"site {self._context.get_identity_name()}: the training script {self.loop.split('@')[0]} "
                f"ended {when}{reason}; the site's log says why"
            )
