"""A hospital at which a job runs a training script."""

import shutil
from pathlib import Path
from types import SimpleNamespace

from hospitals import Hospital
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from medfedaug.config.run import RunConfig


class ScriptSite(Hospital):
    """A site with a script, in this process: the executor of the job.

    Args:
        root: holds its kit.
        data: its data.
        script: the job's.
        **settings: of its kit.
    """

    def __init__(self, root: Path, data: Path, script: Path, **settings) -> None:
        own = {"simulation": True, "privacy": {"min_images": 1}}
        super().__init__(root / "site_A", data, **{**own, **settings})
        if {**own, **settings}["simulation"]:  # which has no kit
            (self.kit / "startup/fed_client.json").unlink()
        self.script = script

    def start(self, config: RunConfig, job: str = "job", threads: int = 1) -> None:
        super().start(config, job, threads)
        workspace = Workspace(str(self.kit), self.name, "config")
        custom = Path(workspace.get_app_custom_dir(job))
        custom.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.script, custom)
        self.context = FLContext()
        for key, value in {
            ReservedKey.IDENTITY_NAME: self.name,
            FLContextKey.CURRENT_RUN: job,
            FLContextKey.CURRENT_JOB_ID: job,
            FLContextKey.WORKSPACE_OBJECT: workspace,
            # NVFlare logs an error through its engine where the script has ended before its first task.
            ReservedKey.ENGINE: SimpleNamespace(
                get_workspace=lambda: workspace, fire_event=lambda *event: None
            ),
        }.items():
            self.context.set_prop(key, value, private=True, sticky=True)

    def end(self) -> None:
        self.executor.handle_event(EventType.END_RUN, self.context)
