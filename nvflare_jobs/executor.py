"""The site's component: a thin shell around the engine-neutral trainer."""

from __future__ import annotations

from typing import Any

from monai.fl.utils.constants import ExtraItems
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from medfedaug.config import RunConfig
from medfedaug.errors import MedFedAugError
from medfedaug.federation.messages import Reply, Request
from medfedaug.federation.site import SiteTrainer, answer
from medfedaug.nvflare_jobs.messages import reply_to_model, request_from_model
from medfedaug.settings import SiteSettings

__all__ = ["SiteExecutor"]


class SiteExecutor(Executor):
    """Runs the tasks ``prepare``, ``train``, ``validate`` and ``test`` at a site.

    It is named by its class path, so that a job carries no code. Data folder and device are the site's own
    (`medfedaug.settings.SiteSettings`) and never come from the job.

    Args:
        config: `medfedaug.config.RunConfig` as a dictionary.

    Raises:
        ConfigError: when the configuration is not one.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self._run_config = RunConfig.from_dict(config)
        self._trainer: SiteTrainer | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Register the decomposer for tensors when a run starts."""
        if event_type == EventType.START_RUN:
            fobs.register(TensorDecomposer)
        super().handle_event(event_type, fl_ctx)

    def execute(
        self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal
    ) -> Shareable:
        """Answer a request; trouble of this site is answered in one line and ends nobody else's work."""
        request = request_from_model(FLModelUtils.from_shareable(shareable))
        try:
            reply = self._answer(request, fl_ctx, abort_signal)
        except Exception as error:  # whatever happens here must reach the server as this site's trouble alone
            self.log_exception(fl_ctx, f"{task_name} failed")
            reply = Reply(request.task, request.round, error=f"site {fl_ctx.get_identity_name()}: {error!r}")
        if reply.error:
            self.log_error(fl_ctx, reply.error)
        return FLModelUtils.to_shareable(reply_to_model(reply))

    def _answer(self, request: Request, fl_ctx: FLContext, abort_signal: Signal) -> Reply:
        if self._trainer is None:
            try:
                settings = SiteSettings.load(fl_ctx.get_workspace().get_root_dir())
                trainer = SiteTrainer(self._run_config, settings.data, settings.device)
                trainer.initialize({ExtraItems.CLIENT_NAME: fl_ctx.get_identity_name()})
            except MedFedAugError as error:
                return Reply(request.task, request.round, error=str(error))
            self._trainer = trainer
        return answer(self._trainer, request, should_stop=lambda: bool(abort_signal.triggered))
