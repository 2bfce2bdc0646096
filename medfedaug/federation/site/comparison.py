"""The site's half of a comparison: one training at a time, scored on the site's validation cases."""

from collections.abc import Callable
from pathlib import Path

from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import RunConfig
from medfedaug.federation.messages.messages import SCORE, TEST, Reply, Request
from medfedaug.federation.site.evaluation import ScoringSite
from medfedaug.federation.site.gate import Gate
from medfedaug.federation.site.site import Site, Stop
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.files import parse_versioned, write_versioned

_SCORES, _KIND, _VERSION = "compared.json", "compared", 1


class ComparisonSite:
    """A site in a comparison: a request in, a reply out, also after an error.

    It holds the network of one training at a time, and continues another one from its state in the folder,
    as after a restart. The scores of its cases, which may not leave it, stay in the folder for later
    comparisons.

    Args:
        config: the trainings.
        trainer: makes the trainer of a training.
        folder: a folder of the site for this comparison.
    """

    def __init__(
        self,
        name: str,
        config: ComparisonConfig,
        trainer: Callable[[RunConfig], SiteTrainer],
        folder: Path,
        gate: Gate | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.name, self.trainer, self.gate, self.on_event = name, trainer, gate, on_event
        self.configs, self.file = config.configs(), folder / _SCORES
        self._scored: dict[str, dict[str, float]] = {}
        if self.file.exists():
            self._scored = parse_versioned(self.file.read_text(encoding="utf-8"), _KIND, _VERSION)["scores"]
        self._training = ""
        self._site: _ComparedSite | None = None

    def answer(self, request: Request, should_stop: Stop = None) -> Reply:
        """Answer a request of one training."""
        config = self.configs.get(request.training)
        if config is None:
            return Reply(request.task, error=f"site {self.name}: the job has no such training")
        if self._site is None or self._training != request.training:
            trainer = self.trainer(config)
            self._site = _ComparedSite(self.name, trainer, self._scored, self.gate, self.on_event)
            self._training = request.training
        reply = self._site.answer(request, should_stop)
        if request.task == SCORE and not reply.error:
            write_versioned(self.file, _KIND, _VERSION, {"scores": self._scored}, private=True)
        return reply


class _ComparedSite(ScoringSite):
    """A site in one training, which tests nothing."""

    split = "validation"

    def answers(self) -> dict[str, Callable[[Request, Stop], Reply]]:
        """Return the answer to each task."""
        answers = Site.answers(self)
        del answers[TEST]
        return {**answers, SCORE: self.score_model}
