"""The site's half of an evaluation: scores of finished runs' models, and comparisons on its own cases."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from medfedaug.errors import ConfigError, DataError
from medfedaug.federation.messages.messages import SCORE, Reply, Request
from medfedaug.federation.messages.scoring import ScoringSpec
from medfedaug.federation.site.gate import Gate
from medfedaug.federation.site.site import Site, Stop
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.metrics.significance import patient_means
from medfedaug.utils.event_text import OnEvent


class EvaluationSite:
    """A site in an evaluation: a request in, a reply out, also after an error.

    It keeps the scores of its cases, which may not leave it, for later comparisons.

    Args:
        trainers: a trainer for each run, by the run's name in the evaluation.
    """

    def __init__(
        self,
        name: str,
        trainers: Mapping[str, SiteTrainer],
        gate: Gate | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.name = name
        scored: dict[str, dict[str, float]] = {}
        for trainer in trainers.values():
            trainer.saves_each_round = False
        self.runs = {
            key: ScoringSite(name, trainer, scored, gate, on_event) for key, trainer in trainers.items()
        }

    def answer(self, request: Request, should_stop: Callable[[], bool] | None = None) -> Reply:
        """Answer a request."""
        try:
            run = self.runs[ScoringSpec.from_dict(request.scoring).run]
        except (ConfigError, KeyError) as error:
            return Reply(request.task, error=f"site {self.name}: {error}")
        return run.answer(request, should_stop)


class ScoringSite(Site):
    """A site with the models of one run."""

    split = "test"

    def __init__(
        self,
        name: str,
        trainer: SiteTrainer,
        scored: dict[str, dict[str, float]],
        gate: Gate | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        super().__init__(name, trainer, gate, on_event)
        self.scored = scored

    def answers(self) -> dict[str, Callable[[Request, Stop], Reply]]:
        """Return the answer to the only task of an evaluation."""
        return {SCORE: self.score_model}

    def score_model(self, request: Request, should_stop: Stop) -> Reply:
        """Score a model, and compare it with earlier ones."""
        reply, started, self._scored = Reply(request.task, request.round), time.perf_counter(), True
        spec, trainer, split = ScoringSpec.from_dict(request.scoring), self.trainer, self.split
        if not trainer.folder.cases[split]:
            raise DataError(f"no case in the split {split!r}", site=self.name, path=trainer.folder.path)
        trainer.receive(request.weights, request.payload, request.once)
        if spec.own:
            scores = trainer.evaluate_round(split, request.round, full=split == "test" or not spec.against)
        else:
            scores = _score_given(trainer, request.weights, split)
            self._ready = False  # the network has held a model without the site's own entries
        released = self.gate.release(split, scores, trainer)
        cases = {case: score for case, score in scores["cases"].items() if score is not None}
        self.scored[spec.model] = cases
        against: dict[str, Any] = {}
        for other in spec.against:
            if difference := self._compared(spec.model, other):
                against[other] = difference
        reply.metrics = {**released, "against": against, "seconds": time.perf_counter() - started}
        return reply

    def _compared(self, model: str, other: str) -> dict[str, Any]:
        """Return the released difference of two models on common cases, by means over patients."""
        if other not in self.scored:
            return {}
        ours, theirs = self.scored[model], self.scored[other]
        pairs = {case: (ours[case], theirs[case]) for case in sorted(ours.keys() & theirs.keys())}
        patients = self.trainer.folder.patients(self.split)
        scores = patient_means(pairs, lambda case: patients.get(case, case)).values()
        differences = [value - baseline for value, baseline in scores]
        return self.gate.compare(self.split, differences, "patients" if patients else "cases", self.trainer)


def _score_given(trainer: SiteTrainer, weights: Mapping[str, Tensor], split: str) -> dict[str, Any]:
    """Score a model with the statistics of this site's images alone."""
    state = trainer.network.state_dict()
    lacking = [key for key in trainer.kept_keys if state[key].is_floating_point() and key not in weights]
    if lacking and not trainer.complete_network():
        return trainer.no_scores()
    trainer.network.load_state_dict(
        {key: weights[key] for key in state.keys() & weights.keys()}, strict=False
    )
    assert trainer.samples is not None
    return trainer.score(trainer.samples.evaluation(split), True)
