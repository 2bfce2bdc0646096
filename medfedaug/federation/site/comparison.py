"""The site's half of a comparison: one training at a time, scored on the site's validation cases."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import RunConfig
from medfedaug.federation.messages.messages import SCORE, TEST, Reply, Request
from medfedaug.federation.site.site import Gate, Site, Stop
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.metrics.significance import paired_by_patient
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.files import parse_versioned, write_versioned

_SCORES, _KIND, _VERSION = "compared.json", "compared", 1
_SPLIT = "validation"


class ComparisonSite:
    """A site in a comparison: a request in, a reply out, also after an error.

    It holds the network of one training at a time, and continues another one from its state in the folder,
    as after a restart. The scores of its cases, which may not leave it, stay in the folder for later
    comparisons.
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
        self._references = {str(training): str(training.reference) for training in config.trainings()}
        self._scored: dict[str, dict[str, float]] = {}
        if self.file.exists():
            self._scored = parse_versioned(self.file.read_text(encoding="utf-8"), _KIND, _VERSION)["scores"]
        self._training = ""
        self._site: _ComparedSite | None = None

    def answer(self, request: Request, should_stop: Stop = None) -> Reply:
        """Answer a request of one training."""
        name = request.training
        config = self.configs.get(name)
        if config is None:
            return Reply(request.task, error=f"site {self.name}: the job has no such training")
        if self._site is None or self._training != name:
            reference = self._references[name]
            self._site = _ComparedSite(self.name, self.trainer(config), self.gate, self.on_event)
            self._site.scored = self._scored
            self._site.training, self._site.reference = name, "" if reference == name else reference
            self._training = name
        reply = self._site.answer(request, should_stop)
        if request.task == SCORE and not reply.error:
            write_versioned(self.file, _KIND, _VERSION, {"scores": self._scored}, private=True)
        return reply


class _ComparedSite(Site):
    """A site in one training, which tests nothing.

    Attributes:
        reference: the name of the training to compare with; empty for the reference itself.
    """

    training: str
    reference: str
    scored: dict[str, dict[str, float]]

    def answers(self) -> dict[str, Callable[[Request, Stop], Reply]]:
        answers = super().answers()
        del answers[TEST]
        return {**answers, SCORE: self._score_model}

    def _score_model(self, request: Request, should_stop: Stop) -> Reply:
        reply, started, self._scored = Reply(request.task, request.round), time.perf_counter(), True
        trainer = self.trainer
        trainer.folder.cases_of(_SPLIT)
        trainer.receive(request.weights, request.payload, request.once)
        scores = trainer.evaluate_round(_SPLIT, request.round, full=not self.reference)
        released = self.gate.release(_SPLIT, scores, trainer)
        ours = self.scored[self.training] = {c: s for c, s in scores["cases"].items() if s is not None}
        compared: dict[str, Any] = {}
        if self.reference in self.scored:
            patients = trainer.folder.patients(_SPLIT)
            differences = paired_by_patient(ours, self.scored[self.reference], patients)
            unit = "patients" if patients else "cases"
            compared = self.gate.compare(_SPLIT, differences, unit, trainer)
        reply.metrics = {**released, "against": compared, "seconds": time.perf_counter() - started}
        return reply
