"""The site's component: a thin shell around the engine-neutral trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.fuel.utils import fobs

from medfedaug.config import RunConfig
from medfedaug.federation.site import Site, SiteTrainer
from medfedaug.nvflare_jobs.messages import reply_to_model, request_from_model
from medfedaug.nvflare_jobs.state import state_folder

__all__ = ["DEVICE_VARIABLE", "SiteExecutor"]

DEVICE_VARIABLE = "MEDFEDAUG_DEVICE"


class SiteExecutor(Executor):
    """Runs the tasks ``prepare``, ``train``, ``validate`` and ``test`` at a site.

    It is named by its class path, so that a job carries no code. The data folder comes from the site's own
    environment variable ``MEDFEDAUG_DATA``, the device from ``MEDFEDAUG_DEVICE`` (``auto`` by default).

    Args:
        config: `medfedaug.config.RunConfig` as a dictionary.

    Raises:
        ConfigError: when the configuration is not one.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self._run_config = RunConfig.from_dict(config)
        self._site: Site | None = None

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
        if self._site is None:
            name = fl_ctx.get_identity_name()
            state = state_folder(Path(fl_ctx.get_workspace().get_root_dir())) / name
            device = os.environ.get(DEVICE_VARIABLE, "auto")
            self._site = Site(name, SiteTrainer(self._run_config, device=device, state_dir=state))
        reply = self._site.answer(request, should_stop=lambda: bool(abort_signal.triggered))
        if reply.error:
            self.log_error(fl_ctx, reply.error)
        return FLModelUtils.to_shareable(reply_to_model(reply))
