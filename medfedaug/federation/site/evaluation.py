"""The site's half of an evaluation: it scores models of finished runs, and compares them on its own cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from medfedaug.errors import ConfigError, DataError, PrivacyRefused
from medfedaug.federation.messages.messages import (
    LEND,
    SCORING_TASKS,
    Reply,
    Request,
    namespaced,
    own_entries,
)
from medfedaug.federation.messages.scoring import Asked
from medfedaug.federation.site.gate import Door
from medfedaug.federation.site.release_log import ScoreRequest
from medfedaug.federation.site.site import Site
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.methods.base import Payload
from medfedaug.metrics.registry import METRICS
from medfedaug.metrics.significance import compare_patients, patient_means
from medfedaug.utils.event_text import OnEvent

_NO_MODEL = "the model needs layers that each site keeps, and this site has none"


class EvaluationSite:
    """A site in an evaluation: a request in, a reply out, also after an error.

    It keeps the scores of its cases, which may not leave it, for the comparisons that later requests ask for.

    Args:
        name: the site's name in the federation.
        trainers: one for each run of the evaluation, by the run's name there.
        door: what the site checks before it answers and before it sends; by default nothing.
        on_event: see `Site`.
    """

    def __init__(
        self,
        name: str,
        trainers: Mapping[str, SiteTrainer],
        door: Door | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.name = name
        scored: dict[str, _Scored] = {}
        self.runs = {
            key: _EvaluatedSite(name, trainer, scored, door, on_event) for key, trainer in trainers.items()
        }

    def answer(self, request: Request, should_stop: Callable[[], bool] | None = None) -> Reply:
        """Do what the server asks."""
        try:
            run = self.runs[Asked.from_dict(request.scoring).run]
        except (ConfigError, KeyError) as error:
            return Reply(request.task, error=f"site {self.name}: {error}")
        return run.answer(request, should_stop)


@dataclass(frozen=True)
class _Scored:
    """A model that was scored in this job: what it is known by, and the scores of its cases."""

    asked: ScoreRequest
    cases: dict[str, float]


class _EvaluatedSite(Site):
    """A site with the models of one run."""

    tasks = SCORING_TASKS

    def __init__(
        self,
        name: str,
        trainer: SiteTrainer,
        scored: dict[str, _Scored],
        door: Door | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        super().__init__(name, trainer, door, on_event)
        self.scored = scored

    def _do(self, request: Request, should_stop: Callable[[], bool] | None) -> Reply:
        reply, started = Reply(request.task, request.round), time.perf_counter()
        asked, trainer = Asked.from_dict(request.scoring), self.trainer
        trainer.saves_each_round = False
        if request.task == LEND:
            if not trainer.policy.lend_models:
                raise PrivacyRefused(
                    self.name, "its own models stay here (lend_models of its privacy policy)"
                )
            trainer.receive(request.weights, request.payload, request.once)
            reply.weights, reply.payload = _lend(trainer, request.round)
            return reply
        if not trainer.folder.cases["test"]:
            raise DataError("no case in the split 'test'", site=self.name, path=trainer.folder.path)
        trainer.receive(request.weights, request.payload, request.once)
        model = self.door.asked(request, trainer, "")
        self.door.check_scores(model, trainer)
        if asked.own:
            found = trainer.evaluate_round("test", request.round)
        else:
            found = _score_given(trainer, request.weights, request.method_states)
            self._ready = False  # the network has had another site's model in it
        left = self.door.release(model, found, trainer)
        known = {case: score for case, score in found["cases"].items() if score is not None}
        self.scored[asked.model] = _Scored(model, known)
        against: dict[str, Any] = {}
        for other in asked.against:
            try:
                against[other] = self._compared(asked.model, other)
            except PrivacyRefused as error:
                left.setdefault("note", f"not compared with the {other} model: {error}")
        reply.metrics = {
            **left,
            "against": {other: difference for other, difference in against.items() if difference},
            "seconds": time.perf_counter() - started,
        }
        return reply

    def _compared(self, model: str, other: str) -> dict[str, Any]:
        """Return the part that leaves of the difference between two models, on cases with scores of both.

        A patient's score is the mean over the patient's cases.
        """
        if other not in self.scored:
            return {}
        asked, ours, theirs = self.scored[model].asked, self.scored[model].cases, self.scored[other].cases
        pairs = {case: (ours[case], theirs[case]) for case in sorted(ours.keys() & theirs.keys())}
        patients = self.trainer.folder.patients("test")
        scores = [*patient_means(pairs, lambda case: patients.get(case, case)).values()]
        if len(scores) < 2:
            return {}
        metric = self.trainer.task.metric
        higher = METRICS[metric].higher_is_better
        test = compare_patients(*zip(*scores, strict=True), higher_is_better=higher)
        unit = "patients" if patients else "cases"
        return self.door.compare(asked, self.scored[other].asked.model, test, unit, self.trainer)


def _lend(trainer: SiteTrainer, round_: int) -> tuple[dict[str, Tensor], Payload]:
    """The model that the site is scored with: all entries of its network, and what methods keep for it."""
    trained = trainer.memory.latest(round_) or (trainer.composition.epochs_before_test and trainer.trains)
    if not trained or not trainer.recall_round(round_):
        raise DataError("has no model of its own in this run", site=trainer.name)
    trainer.fine_tune(round_ + 1)
    state = trainer.network.state_dict()
    weights = {key: value.detach().cpu().clone() for key, value in state.items() if value.is_floating_point()}
    states: Payload = {}
    for name in trainer.composition.personalising:
        states.update(namespaced(trainer.parts[name].state(), name))
    return weights, {key: value.detach().cpu().clone() for key, value in states.items()}


def _score_given(trainer: SiteTrainer, weights: Mapping[str, Tensor], lent: Payload) -> dict[str, Any]:
    """Score a model with nothing of this site's but the statistics of its images."""
    state = trainer.network.state_dict()
    lacking = [key for key in trainer.kept_keys if state[key].is_floating_point() and key not in weights]
    if lacking and not trainer.complete_network():
        return {trainer.task.metric: None, "cases": {}, "note": _NO_MODEL}
    trainer.network.load_state_dict(
        {key: weights[key] for key in state.keys() & weights.keys()}, strict=False
    )
    assert trainer.samples is not None
    cases = trainer.samples.evaluation("test")
    if not lent:
        return trainer.score(cases, True)
    for name in trainer.composition.personalising:
        trainer.parts[name].restore(own_entries(lent, name))
    with trainer.scoring():
        return trainer.score(cases, True)
