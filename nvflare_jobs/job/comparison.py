"""The job of a comparison: short trainings of several methods, one after the other."""

import tempfile
from pathlib import Path
from typing import Any

from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import Execution, RunConfig
from medfedaug.federation.composition import Composition
from medfedaug.federation.job_folder import COMPARED
from medfedaug.federation.messages.messages import SCORE, TASKS, TEST
from medfedaug.federation.protocol import compare
from medfedaug.federation.server.comparison import Comparison
from medfedaug.federation.site.comparison import ComparisonSite
from medfedaug.federation.site.site import Gate
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.privacy.site_settings import SiteSettings
from medfedaug.nvflare_jobs.job.controller import ProtocolController, ServerJob
from medfedaug.nvflare_jobs.job.executor import AnsweringExecutor, site_trainer
from medfedaug.nvflare_jobs.job.messages import EventLog
from medfedaug.nvflare_jobs.job.recipe import JobRecipe
from medfedaug.utils.files import write_json

_PAGE = "compare.html"


class ComparisonController(ProtocolController):
    """Make the trainings of a comparison at the server, and write ``medfedaug/compare.json`` and a page.

    ``config`` is `medfedaug.config.comparison.ComparisonConfig` as a dictionary. No model stays.
    """

    def __init__(self, config: dict[str, Any], execution: dict[str, Any] | None = None) -> None:
        super().__init__(execution)
        self.config = config
        self._comparison = ComparisonConfig.from_dict(config)

    def carry(self, job: ServerJob) -> None:
        """Make the trainings to their end."""
        # Imported here: the pages of a job are made at its end.
        from medfedaug.analysis.gain_page import conclusions, write_gain_page

        with tempfile.TemporaryDirectory(prefix="medfedaug-") as state:
            comparison = Comparison(self._comparison, Path(state), self._execution, job.record)
            compare(comparison, job.carrier(None))
        results = comparison.results()
        results["conclusions"] = conclusions(results)
        write_json(job.folder / COMPARED, results)
        write_gain_page(results, job.folder / _PAGE, results["conclusions"])


class ComparisonExecutor(AnsweringExecutor):
    """Run the trainings of a comparison at a site, with at most ``threads`` CPU threads."""

    def __init__(self, config: dict[str, Any], threads: int = 0) -> None:
        super().__init__(config, threads)
        self._comparison = ComparisonConfig.from_dict(config)

    def open_site(self, name: str, settings: SiteSettings, gate: Gate, events: EventLog) -> ComparisonSite:
        """Open the site, whose gate admits the comparison as a whole."""
        gate.comparison = self._comparison

        def trainer(config: RunConfig) -> SiteTrainer:
            return site_trainer(name, config, settings, self.threads)

        # Of this job: scores of another comparison are no reference.
        return ComparisonSite(name, self._comparison, trainer, events.path.parent, gate, events)


class ComparisonRecipe(JobRecipe):
    """The job of a comparison, for simulator, POC mode and provisioned hospitals.

    `medfedaug.nvflare_jobs.MedFedAugRecipe` describes the arguments; ``config`` holds the trainings.
    """

    def __init__(
        self,
        *,
        config: ComparisonConfig,
        name: str = "compare",
        min_clients: int = 2,
        execution: Execution | None = None,
    ) -> None:
        for run in config.configs().values():
            Composition(run).check_apart("a job")
        execution, settings = execution or Execution(), config.to_dict()
        super().__init__(
            name=name,
            min_clients=min_clients,
            execution=execution,
            controller=ComparisonController(config=settings, execution=execution.to_dict()),
            executor=ComparisonExecutor(config=settings, threads=execution.threads),
            tasks=[*(task for task in TASKS if task != TEST), SCORE],
            settings=settings,
        )
