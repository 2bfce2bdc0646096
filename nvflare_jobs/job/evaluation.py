"""The job of an evaluation: sites score models of other sites."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.fl_context import FLContext
from nvflare.job_config.base_fed_job import BaseFedJob
from nvflare.recipe.spec import Recipe

from medfedaug._version import __version__
from medfedaug.config.run import Execution, RunConfig
from medfedaug.federation.job_folder import EVALUATION
from medfedaug.federation.messages.messages import SCORE
from medfedaug.federation.protocol import evaluate
from medfedaug.federation.server.evaluation import EvaluatedRun, Evaluation
from medfedaug.federation.site.evaluation import EvaluationSite
from medfedaug.federation.site.gate import Gate
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.job.carrier import NVFlareCarrier
from medfedaug.nvflare_jobs.job.controller import ProtocolController
from medfedaug.nvflare_jobs.job.events import EventLog
from medfedaug.nvflare_jobs.job.executor import AnsweringExecutor, site_trainer
from medfedaug.nvflare_jobs.job.recipe import name_classes_only, server_settings
from medfedaug.nvflare_jobs.kit.app_validator import VERSION_KEY
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.files import write_json
from medfedaug.utils.validation import check_printable


class EvaluationController(ProtocolController):
    """Run an evaluation at the server, and write ``medfedaug/evaluation.json`` to its run folder.

    ``runs`` has the settings of each run, `medfedaug.config.run.RunConfig` as a dictionary, by its name in
    the evaluation. The models are files of numbers with fixed names in the job's folder of configuration.
    """

    def __init__(
        self,
        runs: dict[str, Any],
        execution: dict[str, Any] | None = None,
        task_check_period: float = 0.05,
    ) -> None:
        super().__init__(execution, task_check_period)
        self.runs = runs
        self._configs = {key: RunConfig.from_dict(config) for key, config in runs.items()}

    def carry(
        self,
        settings: SiteSettings,
        carrier: Callable[[Path | None], NVFlareCarrier],
        record: OnEvent,
        folder: Path,
        fl_ctx: FLContext,
    ) -> None:
        """Run the evaluation to its end."""
        runs = {
            key: EvaluatedRun.load(self.config_file(_file(index), fl_ctx), config)
            for index, (key, config) in enumerate(self._configs.items())
        }
        evaluation = Evaluation(runs, on_event=record)
        evaluate(evaluation, carrier(None))
        write_json(folder / EVALUATION, evaluation.results())


class EvaluationExecutor(AnsweringExecutor):
    """Score models at a site, with the settings of each run by its name in the evaluation.

    It uses at most ``threads`` CPU threads; 0 leaves PyTorch's choice.
    """

    def __init__(self, runs: dict[str, Any], threads: int = 0) -> None:
        super().__init__()
        check_printable("runs", runs)
        self.runs = runs
        self.threads = threads
        self._configs = {key: RunConfig.from_dict(config) for key, config in runs.items()}

    def job_settings(self) -> dict[str, Any]:
        """Return the settings of all runs in the job."""
        return self.runs

    def open_site(self, name: str, settings: SiteSettings, gate: Gate, events: EventLog) -> EvaluationSite:
        """Open the site with a trainer for each run."""
        configs = self._configs.items()
        trainers = {key: site_trainer(name, config, settings, self.threads) for key, config in configs}
        return EvaluationSite(name, trainers, gate, events)


class EvaluationRecipe(Recipe):
    """The job of an evaluation, for simulator, POC mode and provisioned hospitals.

    It names classes of the installed package and has numbers, but no code, no path and no data.
    `medfedaug.federation.server.evaluation.Evaluation` describes ``runs``, and
    `medfedaug.nvflare_jobs.MedFedAugRecipe` the other arguments.
    """

    def __init__(
        self,
        *,
        runs: Mapping[str, EvaluatedRun],
        name: str = "evaluation",
        min_clients: int = 2,
        task_request_interval: float = 0.1,
        execution: Execution | None = None,
    ) -> None:
        Evaluation(runs)  # checks them
        self.name, execution = name, execution or Execution()
        job = BaseFedJob(name=name, min_clients=min_clients, key_metric="")
        settings, waits = {key: run.config.to_dict() for key, run in runs.items()}, execution.to_dict()
        job.to_server(EvaluationController(runs=settings, execution=waits))
        executor = EvaluationExecutor(runs=settings, threads=execution.threads)
        job.to_clients(executor, tasks=[SCORE])
        self._folder = tempfile.TemporaryDirectory(prefix="medfedaug-")  # until the job is written
        for index, run in enumerate(runs.values()):
            path = Path(self._folder.name) / _file(index)
            run.save(path)
            job.add_file_to_server(str(path), app_folder_type="config")
        name_classes_only(job)
        super().__init__(job)
        self.add_server_config(server_settings(execution, task_request_interval))
        self.add_client_config({VERSION_KEY: __version__})


def _file(index: int) -> str:
    return f"evaluated_{index}.safetensors"
