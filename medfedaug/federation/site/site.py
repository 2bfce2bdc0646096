"""An engine's view of a site: a request in, a reply out, through the site's gate."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import RunConfig
from medfedaug.errors import MedFedAugError, PrivacyRefused
from medfedaug.federation.composition import masking
from medfedaug.federation.messages.messages import (
    FINGERPRINT,
    NUMBER_OF_SAMPLES,
    PREPARE,
    TEST,
    TRAIN,
    UNSCORED,
    VALIDATE,
    Reply,
    Request,
    by_method,
    num_bytes,
    own_entries,
)
from medfedaug.federation.site.trainer import SiteTrainer, site_fingerprint
from medfedaug.methods.census import Contributors
from medfedaug.metrics.significance import difference
from medfedaug.utils.event_text import OnEvent
from medfedaug.utils.validation import is_number


class Delivery:
    """The way of an update from its training to the server: here as it is."""

    tasks: tuple[str, ...] = ()

    def answer(self, request: Request) -> dict[str, Any]:
        """Return the answer to one of the further requests, for `Reply.masks`."""
        return {}

    def begin(self, request: Request) -> None:
        """Check the request for a training, before it begins."""

    def finish(self, request: Request, reply: Reply) -> None:
        """Change an update into what leaves."""

    def failed(self, task: str, error: Exception) -> None:
        """Forget what a failed request leaves behind."""


class Gate:
    """No-op gate for simulations on one machine.

    `medfedaug.hospital.privacy.guarded_gate.GuardedGate` is that of a site in a real federation.

    Attributes:
        comparison: the comparison of which the admitted configurations are trainings; ``None`` in other jobs.
    """

    comparison: ComparisonConfig | None = None

    def delivery(self, site: str, trainer: SiteTrainer) -> Delivery:
        """Return the way of the site's updates."""
        masks = masking(trainer.config)
        return Delivery() if masks is None else cast(Delivery, masks.MaskedDelivery(site, trainer))

    def admit(self, config: RunConfig, should_stop: Callable[[], bool]) -> None:
        """Admit a configuration before anything is built for it."""

    def opened(self, trainer: SiteTrainer) -> None:
        """Check the opened data and network."""

    def incoming(self, request: Request) -> None:
        """Check a request before its use."""

    def release(self, split: str, scores: Mapping[str, Any], trainer: SiteTrainer) -> dict[str, Any]:
        """Return the part of a model's scores that may leave."""
        return all_scores(scores, trainer.folder.patients(split))

    def compare(
        self, split: str, differences: Sequence[float], unit: str, trainer: SiteTrainer
    ) -> dict[str, Any]:
        """Return the part of a comparison of two models that may leave."""
        return difference(differences, unit)

    def outgoing(self, reply: Reply, trainer: SiteTrainer) -> Reply:
        """Check and record a reply before it is sent."""
        return reply

    def ended(self) -> None:
        """Record that the job has ended for this site."""

    def error_text(self, site: str, task: str, error: Exception, trainer: SiteTrainer) -> str:
        """Describe an error to the server in one line."""
        if isinstance(error, MedFedAugError):
            return str(error)
        return f"site {site}: {cause(error)!r}"[:500]


def all_scores(scores: Mapping[str, Any], patients: Mapping[str, int]) -> dict[str, Any]:
    """Return all scores of a simulation, with the number of the patient of each scored case."""
    known = {case: patients[case] for case in scores.get("cases", {}) if case in patients}
    return {**scores, "patients": known} if known else dict(scores)


def cause(error: BaseException) -> BaseException:
    """Return the cause of MONAI's error on a transform, which does not name the reason."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


_log = logging.getLogger(__name__)

Stop = Callable[[], bool] | None


class Site:
    """An engine's view of a site: a request in, a reply out, also after an error.

    All engines use this class to turn requests into calls of a `SiteTrainer`. An error at a site becomes
    `Reply.error`, one line for the server's log, and never an exception, which would end the federation.
    After an error the next request begins with a new network and the site's kept state.

    Args:
        on_event: called after every request with a summary, for the site's own log.
    """

    def __init__(
        self, name: str, trainer: SiteTrainer, gate: Gate | None = None, on_event: OnEvent | None = None
    ) -> None:
        self.name, self.trainer, self.on_event = name, trainer, on_event
        self.gate = gate or Gate()
        self.delivery = self.gate.delivery(name, trainer)
        self._answers = self.answers()
        self._planning, self._planned = trainer.config.planning is not None, dict[str, Any]()
        self._ready = False
        self._scored = False  # True if a request without signatures has changed the network

    def answers(self) -> dict[str, Callable[[Request, Stop], Reply]]:
        """Return the answer to each task."""
        return {
            FINGERPRINT: self._send_fingerprint,
            PREPARE: self._prepare,
            TRAIN: self._train,
            VALIDATE: self._score,
            TEST: self._score,
            **dict.fromkeys(self.delivery.tasks, self._deliver),
        }

    def answer(self, request: Request, should_stop: Stop = None) -> Reply:
        """Answer a request.

        Args:
            should_stop: called before every step; returns whether training has to end early.
        """
        try:
            self._check(request)
            self.gate.incoming(request)
            if self.trainer.take_plan(request.planned):
                self._ready = False
            if not self._ready or (request.task == TRAIN and self._scored and self.delivery.tasks):
                self._open(should_stop)
            self.trainer.enter_run(request.run)
            if self._is_behind(request):
                self.trainer.memory.start_over()
                self._open(should_stop)
            request = self.trainer.with_frozen(request)
            started = time.perf_counter()
            reply = self._answers[request.task](request, should_stop)
            sent = self.gate.outgoing(reply, self.trainer)
            sent.contributors = {}
            self._tell(sent, time.perf_counter() - started)
            return sent
        except Exception as error:
            self._ready = False
            self.delivery.failed(request.task, error)
            # An invalid round could not be sent back.
            round_ = request.round if type(request.round) is int and request.round >= 0 else 0
            if not isinstance(error, MedFedAugError):
                _log.exception("site %s: %s failed", self.name, request.task)
            text = self.gate.error_text(self.name, request.task, error, self.trainer)
            if self.on_event is not None:
                self.on_event({"event": "not_answered", "task": str(request.task)[:80], "reason": text})
            return Reply(request.task, round_, error=text)

    def _open(self, should_stop: Stop) -> None:
        """Admit the job, and build the network and the methods anew."""
        self.gate.admit(self.trainer.config, should_stop or (lambda: False))
        self.trainer.open(self.name)
        self.gate.opened(self.trainer)
        self._ready, self._scored = True, False

    def _is_behind(self, request: Request) -> bool:
        """Return whether the model of a request is older than all rounds of this site."""
        before = request.round - 1 if request.task == TRAIN else request.round
        return request.task in (TRAIN, VALIDATE, TEST) and self.trainer.memory.is_ahead(before)

    def _tell(self, reply: Reply, seconds: float) -> None:
        """Report a reply, without names of cases, and with only the sizes of statistics."""
        if self.on_event is None or reply.task in self.delivery.tasks:
            return
        methods = sorted(by_method(reply.payload))
        names = (f"val_{self.trainer.task.metric}", self.trainer.task.metric)
        scores = {name: reply.metrics[name] for name in names if is_number(reply.metrics.get(name))}
        if reply.task == TRAIN and is_number(self.trainer.last_loss):
            scores = {"train_loss": self.trainer.last_loss, **scores}
        note = reply.metrics.get(UNSCORED if reply.task == TRAIN else "note")
        self.on_event(
            {
                "event": "answered",
                "task": reply.task,
                "round": reply.round,
                "rounds": self.trainer.config.rounds,
                "scores": scores,
                **({"unscored": note} if isinstance(note, str) else {}),
                "samples": reply.num_samples,
                "cases": len(self.trainer.folder.cases["training"]),
                "seconds": seconds,
                "model": num_bytes(reply.weights or reply.masks),
                "statistics": {name: num_bytes(own_entries(reply.payload, name)) for name in methods},
            }
        )

    def _check(self, request: Request) -> None:
        """Check that a request belongs to the protocol and the job."""
        problem = ""
        if request.task not in self._answers:
            problem = f"no task {str(request.task)[:80]!r}; it answers {', '.join(self._answers)}"
        elif request.task == FINGERPRINT and not self._planning:  # an approval names it in planned jobs only
            problem = f"no task {FINGERPRINT!r} in a job that is not planned"
        elif request.planned and request.planned != self._planned:
            if self._planned:
                problem = "the server sent a second plan"
            elif not self._planning:
                problem = "the server sent a plan for a job that is not planned"
            else:
                self._planned = request.planned
        last = self.trainer.config.rounds
        for name, first in (("round", int(request.task == TRAIN)), ("selected_round", 0)):
            round_ = getattr(request, name)
            if type(round_) is not int or not first <= round_ <= last:
                got = f"{str(request.task)[:80]} with {name} {str(round_)[:80]}"
                problem = problem or f"{got}, and the run has the rounds {first} to {last}"
        if problem:
            raise MedFedAugError(f"site {self.name}: {problem}")

    def _send_fingerprint(self, request: Request, should_stop: Stop) -> Reply:
        trainer, reply = self.trainer, Reply(request.task, request.round)
        reply.payload = site_fingerprint(trainer)
        trainer.entry_patients.note(reply)
        reply.contributors[NUMBER_OF_SAMPLES] = trainer.census.everyone
        reply.num_samples = len(trainer.folder.cases["training"]) if reply.payload else 0
        return reply

    def _prepare(self, request: Request, should_stop: Stop) -> Reply:
        reply = self.trainer.prepare()
        cases = reply.metrics["cases"].items()
        reply.metrics["cases"] = {split: n for split, n in cases if not n or self._are_many(split)}
        return reply

    def _are_many(self, split: str) -> bool:
        """Return whether the number of cases of a split is about enough patients."""
        counts = torch.tensor([self.trainer.folder.cases_of_patients(split)])
        return bool(Contributors(counts).enough(self.trainer.min_patients))

    def _deliver(self, request: Request, should_stop: Stop) -> Reply:
        self._check_trains()
        return Reply(request.task, request.round, masks=self.delivery.answer(request))

    def _train(self, request: Request, should_stop: Stop) -> Reply:
        trainer, started = self.trainer, time.perf_counter()
        self._check_trains()
        self.delivery.begin(request)
        trainer.memory.forget(request.selected_round, request.round)
        trainer.start_round(request.round, request.weights, request.payload, request.once)
        # The request brings the model of the previous round; the initial model is untrained.
        score: dict[str, Any] = {}
        if trainer.config.validates(request.round - 1):
            scores = trainer.evaluate_round("validation", request.round - 1)
            score = self._validation_score(request, scores)
        reply = trainer.train(request.round, should_stop)
        reply.metrics = {**score, **reply.metrics}
        self.delivery.finish(request, reply)
        if not trainer.training.private:
            reply.metrics["seconds"] = time.perf_counter() - started
        return reply

    def _score(self, request: Request, should_stop: Stop) -> Reply:
        trainer, reply, self._scored = self.trainer, Reply(request.task, request.round), True
        split = "validation" if request.task == VALIDATE else "test"
        trainer.receive(request.weights, request.payload, request.once)
        reply.metrics = self.gate.release(split, trainer.evaluate_round(split, request.round), trainer)
        return reply

    def _validation_score(self, request: Request, scored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the score of the previous round's model for an update, or the reason for none."""
        trainer, metric = self.trainer, self.trainer.task.metric
        try:
            released = self.gate.release("validation", scored, trainer)
        except PrivacyRefused as error:
            released = {metric: None, "note": str(error)}
        score = {f"val_{metric}": released[metric]}
        if released[metric] is None and "note" in released:
            score[UNSCORED] = released["note"]
        return score

    def _check_trains(self) -> None:
        if not self.trainer.trains:  # its training cases are unchecked
            raise MedFedAugError(f"site {self.name}: it does not train in this job")
