"""The NVFlare job, from a run's configuration."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ConfigVarName
from nvflare.apis.impl.controller import Controller
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from medfedaug._version import __version__
from medfedaug.config.run import Execution, RunConfig
from medfedaug.config.training_scripts import find_loop
from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.initial_weights import INITIAL_FILE, InitialWeights
from medfedaug.federation.messages.messages import TASKS
from medfedaug.nvflare_jobs.job.controller import FederationController
from medfedaug.nvflare_jobs.job.executor import SiteExecutor
from medfedaug.nvflare_jobs.kit.app_validator import VERSION_KEY, keys_with_variables

_LEAST_PATIENCE, _NO_END = 60.0, 1e9  # seconds
_REQUEST_INTERVAL = 0.1
"""Seconds after which an idle site asks for work; NVFlare's 2 s would be most of a small model's round."""


class JobRecipe(Recipe):
    """A job that names classes of this package, and neither has their code nor any path or data.

    Each site finds its data by its environment variable ``MEDFEDAUG_DATA``.
    """

    def __init__(
        self,
        *,
        name: str,
        min_clients: int,
        execution: Execution,
        controller: Controller,
        executor: Executor,
        tasks: list[str],
        settings: Mapping[str, Any],
    ) -> None:
        for key in keys_with_variables(settings):
            raise ConfigError(f"{key}: a job has no text with braces, which NVFlare takes for variables")
        self.job = FedJob(name=name, min_clients=min_clients)
        self.job.to_server(controller)
        self.job.to_clients(executor, tasks=tasks)
        _name_classes_only(self.job)
        super().__init__(self.job)
        # NVFlare would end a job a minute after fewer than ``min_clients`` sites are left. The server waits
        # for a site as long as the run says, so that it can come back.
        patience = max(execution.round_timeout, _LEAST_PATIENCE) if execution.round_timeout else _NO_END
        server = {"task_request_interval": _REQUEST_INTERVAL}
        self.add_server_config(
            {"server": server, ConfigVarName.DEAD_CLIENT_GRACE_PERIOD: patience, VERSION_KEY: __version__}
        )
        self.add_client_config({VERSION_KEY: __version__})


class MedFedAugRecipe(JobRecipe):
    """The job that simulator, POC mode and provisioned hospitals run unchanged.

    With a custom script it has that code.

    Args:
        config: the run.
        name: the job's name.
        min_clients: the number of connected sites that NVFlare needs to start the job, and below which it
            ends it; by default ``min_sites`` of the run, or two.
        resume: whether to continue the run of this name from the server's checkpoint.
        execution: see `medfedaug.config.run.Execution`.
        initial: the initial weights, if the run is configured with them: a file of numbers in the job's
            folder of configuration.
        script: the file of the run's training loop, if it is not in a package
            (`medfedaug.config.training_scripts`). The job then carries code.

    Raises:
        ConfigError: when methods, network and options cannot be combined.

    Example:
        >>> from medfedaug.methods import parse_methods
        >>> config = RunConfig(methods=parse_methods("fedrdn,fedfa"), rounds=2)
        >>> MedFedAugRecipe(config=config).name
        'medfedaug'
    """

    def __init__(
        self,
        *,
        config: RunConfig | Mapping[str, Any],
        name: str = "medfedaug",
        min_clients: int | None = None,
        resume: bool = False,
        execution: Execution | None = None,
        initial: InitialWeights | None = None,
        script: str | Path | None = None,
    ) -> None:
        run = config if isinstance(config, RunConfig) else RunConfig.from_dict(config)
        Composition(run).check_apart("a job")
        execution, settings = execution or Execution(), run.to_dict()
        waits = execution.to_dict()
        super().__init__(
            name=name,
            min_clients=min_clients or execution.min_sites or 2,
            execution=execution,
            controller=FederationController(config=settings, execution=waits, run_name=name, resume=resume),
            executor=SiteExecutor(config=settings, threads=execution.threads),
            tasks=list(TASKS),
            settings=settings,
        )
        if initial is not None:
            self._folder = tempfile.TemporaryDirectory(prefix="medfedaug-")  # until the job is written
            path = Path(self._folder.name) / INITIAL_FILE
            initial.save(path)
            self.job.add_file_to_server(str(path), app_folder_type="config")
        if script is not None:
            find_loop(str(run.loop), Path(script).parent)
            self.job.add_file_to_clients(str(script))


def _name_classes_only(job: FedJob) -> None:
    """Let the job name this package's classes without a copy of their source.

    `FedJob.set_app_packages` has the same purpose, but refuses a development install, whose folders have
    other names than its modules.
    """
    exporter = job.job
    copy_source = exporter._get_custom_file

    def only_foreign(custom_dir: str, module: str, source_file: str, *args: Any, **kwargs: Any) -> None:
        if module.split(".")[0] != "medfedaug":
            copy_source(custom_dir, module, source_file, *args, **kwargs)

    exporter._get_custom_file = only_foreign
