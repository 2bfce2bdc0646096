"""NVFlare's receiver for Weights & Biases, without settings from a job."""

from __future__ import annotations

from pathlib import Path

from nvflare.apis.analytix import TrackConst
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_opt.tracking.wandb.wandb_receiver import WandBReceiver

from medfedaug.runs.folder import SERVER_TRACKING

_NUMBERS_ALONE = {
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_save_requirements": False,
    "disable_git": True,
    "disable_code": True,
    "console": "off",
    "host": "server",
}


class OfflineWandB(WandBReceiver):
    """Write the sites' metrics for ``wandb sync`` into the server's run folder, and send nothing.

    Each site is a run of the project ``medfedaug``. A run has the metrics, and nothing about the server's
    machine. The receiver takes no arguments, since `wandb.init` takes addresses and folders.
    """

    def __init__(self) -> None:
        names = {"project": "medfedaug", "group": "medfedaug", "job_type": "site", "name": "medfedaug"}
        super().__init__({**names, "settings": _NUMBERS_ALONE}, mode="offline")
        self._newest: dict[str, int] = {}

    def initialize(self, fl_ctx: FLContext) -> None:
        """Start a run for each site."""
        run = Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id()))
        folder = run / SERVER_TRACKING
        folder.mkdir(parents=True, exist_ok=True)
        self.wandb_args["dir"] = str(folder)
        super().initialize(fl_ctx)

    def save(self, fl_ctx: FLContext, shareable: Shareable, record_origin: str) -> None:
        """Write a number at its round, or the newest one: Weights & Biases drops earlier rounds."""
        dxo = from_shareable(shareable)
        round_ = max(dxo.data[TrackConst.GLOBAL_STEP_KEY], self._newest.get(record_origin, 0))
        self._newest[record_origin] = dxo.data[TrackConst.GLOBAL_STEP_KEY] = round_
        super().save(fl_ctx, dxo.to_shareable(), record_origin)
