"""`Account`: entries of a job's releases in a site's ledger, within the limits of its policy."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

from torch import Tensor

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.quality.content_hash import case_identities
from medfedaug.errors import ConfigError, PrivacyRefused
from medfedaug.federation.messages.messages import (
    FINGERPRINT,
    LEND,
    MASK_TASKS,
    PREPARE,
    SCORE_EPSILON,
    TRAIN,
    Reply,
    by_method,
    digest_of,
)
from medfedaug.federation.messages.privacy_guard import spend_budget
from medfedaug.metrics.registry import METRICS
from medfedaug.metrics.significance import PatientTest
from medfedaug.privacy import (
    PrivacyLedger,
    PrivacyPolicy,
    Release,
    class_labels,
    released_difference,
    released_loss,
    released_scores,
)
from medfedaug.privacy.account_mark import bind_account
from medfedaug.privacy.ledger import Scored
from medfedaug.privacy.policy import SUMMARY
from medfedaug.utils.printable import counted

_TIMES = 3
"""The largest number of answers per round: a restarted server repeats some, and answers to other weights
reveal more of the cases each time."""

_TRAINING = (FINGERPRINT, PREPARE, TRAIN, LEND)
"""The tasks whose answers are about training cases."""

_DAYS = 30
"""The period of the budget of scores."""

_LOSS = "loss"

_BUDGETS = {
    "validation": "max_validation_scores",
    "test": "max_test_scores",
    "training": "max_validation_scores",  # of losses
}
"""The setting that limits the number of models with released scores on a split."""


@dataclass(frozen=True)
class ScoreRequest:
    """A model whose scores a server asks for.

    Args:
        split: ``"validation"``, ``"test"``, or for losses ``"training"``.
        model: a hash of everything but the cases that decides over the scores.
        place: ``"round 3"``, ``"test"``, ``"test of round 3"`` or ``"round 3: train_loss"``; a training job
            gets the scores of one model per place. Empty in an evaluation.
        identity: the hash by which the ledger knows models of training jobs; empty in a training job.
    """

    split: str
    model: str
    place: str = ""
    identity: str = ""


def enter_message(ledger: PrivacyLedger, site: str, job: str, text: str, *, failed: bool = False) -> None:
    """Enter the text of an error that the server receives in place of an answer.

    Failed training or scoring counts as an update, since a failure may reveal an image.
    """
    method = "model" if failed else "task"
    ledger.enter([Release(job, method, "message", text, digest=_hash(text), site=site)])


class Account:
    """View of one job on a site's ledger, with the site's budget of scores.

    Attributes:
        epsilon: the largest ε of the noisy releases on a split; ``None`` without noise.
    """

    def __init__(
        self,
        site: str,
        job: str,
        ledger: PrivacyLedger,
        policy: PrivacyPolicy,
        folder: SiteFolder,
        rounds: int,
    ) -> None:
        self.site, self.job, self.ledger, self.policy, self.folder = site, job, ledger, policy, folder
        self.rounds = rounds
        self.epsilon: float | None = None
        self._identities: dict[str, dict[bytes, bytes]] = {}
        self._release = partial(Release, job, site=site)

    def _refused(self, reason: str) -> PrivacyRefused:
        return PrivacyRefused(self.site, reason)

    def bind(self) -> None:
        """Bind the site's images to the ledger.

        Raises:
            PrivacyRefused: when they belong to another ledger, or to a newer copy of this one.
        """
        try:
            bind_account(self.ledger, self.folder)
        except ConfigError as error:
            raise self._refused(error.marked) from error

    def check_cases(self, split: str, sample: Sequence[Case] | None = None) -> None:
        """Check that a set of cases differs enough from those of earlier releases."""
        if self.policy.allow_differences or not self.folder.cases[split]:
            return
        near = self.ledger.nearest(split, self._cases(split, sample))
        if near is not None and near.apart < self.policy.min_images:
            when = datetime.fromtimestamp(near.time).isoformat(" ", "minutes")
            what = f" patient{'s' * (near.apart != 1)}" if self.folder.patients(split) else ""
            raise self._refused(
                f"its {split} cases differ by {near.apart}{what} from those of job {near.job} of {when}, and "
                f"this site sends nothing about sets that differ by fewer than {self.policy.min_images} "
                "(min_images of its privacy policy)"
            )

    def enter(self, reply: Reply) -> None:
        """Enter an answer, except for its scores, before it leaves.

        The ledger's lock covers checks and entry, so that simultaneous jobs are checked against each other.
        """
        with self.ledger.held():
            self._enter(reply)

    def _enter(self, reply: Reply) -> None:
        if reply.task in MASK_TASKS:
            texts = {key: value.hex() for key, value in reply.masks.items()}
            self.ledger.enter([self._release("masks", reply.task, _names(texts), digest=_hash(texts))])
            return
        if reply.task in _TRAINING:
            if self.epsilon is not None:
                reply.metrics[SCORE_EPSILON] = self.epsilon
            self.check_cases("training")
            if reply.weights or reply.masks:
                self.check_updates()
            payloads = by_method(reply.payload)
            self.ledger.enter(self._update(reply, payloads), self._cases("training"))
            if reply.task == PREPARE and self.folder.partial:
                self.ledger.enter(self._annotated(self.folder.annotated("training")))
            if "annotated" in reply.metrics:
                self.ledger.enter(self._annotated(reply.metrics["annotated"]))

    def release(self, request: ScoreRequest, scores: Mapping[str, Any]) -> dict[str, Any]:
        """Enter the scores of a model in the ledger, and return the part that leaves.

        The same model on the same cases has the same answer in every job, and counts once.
        """
        patients, labels = self.folder.patients(request.split), class_labels(self.folder, request.split)
        released = partial(released_scores, scores, self.policy, patients, labels)
        return self._release_once(request, "scores", released, exact=self.policy.scores != SUMMARY)

    def check_scores(self, request: ScoreRequest) -> None:
        """Check, before scoring a model, that its scores may leave.

        The duration of an answer and an error depend on the images too, so that a model beyond the budget
        must not cause either.
        """
        with self.ledger.held():
            failed, most = self.ledger.updates(self.job, self.site, failed=True), _TIMES * self.rounds
            if request.place and failed >= most:
                raise self._refused(
                    f"{failed} answers of this job have failed, and {most} may, {_TIMES} a round"
                )
            if self.ledger.scored(request.split, request.model, self._cases(request.split)) is None:
                self._check_new(request, self._known(request))

    def release_loss(
        self, what: str, round_: int, weights: Mapping[str, Tensor], by_case: Mapping[str, float | None]
    ) -> float | None:
        """Enter a loss over training cases in the ledger, and return the part that leaves.

        The rules are those of scores: equal answers for equal models, one model per job and round, one
        budget for all jobs.
        """
        policy, split = self.policy, "training"
        rules = (policy.min_images, policy.score_noise_multiplier)
        model = _hash([_LOSS, what, digest_of(weights), len(self.folder.classes), *rules])
        request = ScoreRequest(split, model, f"round {round_}: {what}")
        classes, patients = len(self.folder.classes), self.folder.patients(split)
        loss: float | None = self._release_once(
            request, "losses", lambda: {_LOSS: released_loss(by_case, policy, classes, patients)}
        )[_LOSS]
        return loss

    def _release_once(
        self, request: ScoreRequest, kind: str, released: Callable[[], dict[str, Any]], *, exact: bool = False
    ) -> dict[str, Any]:
        """Enter the answer on a model, and return it; repeat an earlier answer on the same model."""
        split, cases = request.split, self._cases(request.split)
        with self.ledger.held():
            if not exact:
                self.check_cases(split)
            earlier = self.ledger.scored(split, request.model, cases)
            if earlier is not None and earlier.answer:
                answer: dict[str, Any] = json.loads(earlier.answer)
                self._enter_scores(split, kind, answer, 0)
                return answer
            known = self._known(request)
            if earlier is None:
                self._check_new(request, known)
            answer = released()
            if not _scores_in(answer):
                note = str(answer.get("note", f"no {kind}"))
                self.ledger.enter([self._release("task", "message", note, digest=_hash(answer))])
                return answer
            if earlier is None:
                self._spend(split)
            # Counted before it is stored for repetition: a crash between the two reveals nothing.
            self._enter_scores(split, kind, answer, int(earlier is None))
            if earlier is None:
                scored = Scored(self.job, split, request.model, place=request.place, site=self.site)
                text = "" if exact else json.dumps(answer)
                self.ledger.score(replace(scored, known=known, answer=text), cases)
            return answer

    def compare(self, request: ScoreRequest, other: str, test: PatientTest, unit: str) -> dict[str, Any]:
        """Enter the difference between two models' scores in the ledger, and return the part that leaves."""
        split, cases = request.split, self._cases(request.split)
        if self.policy.scores != SUMMARY:  # it follows from the released scores of cases
            return released_difference(test, self.policy, unit)
        model = _hash(["difference", request.model, other])
        with self.ledger.held():
            earlier = self.ledger.scored(split, model, cases)
            if earlier is not None:
                difference: dict[str, Any] = json.loads(earlier.answer)
            else:
                self.check_cases(split)
                difference = released_difference(test, self.policy, unit)
                if not difference:
                    return difference
                self._check_budget(split)
            self._enter_scores(split, "differences", difference, int(earlier is None))
            if earlier is None:
                scored = Scored(self.job, split, model, answer=json.dumps(difference), site=self.site)
                self.ledger.score(scored, cases)
            return difference

    def _enter_scores(self, split: str, kind: str, answer: Mapping[str, Any], models: int) -> None:
        about = (_names(_scores_in(answer) or answer), split, len(self.folder.cases[split]))
        noise = self.policy.score_noise_multiplier
        release = self._release("task", kind, *about, noise, _hash(answer), models)
        self.ledger.enter([release], self._cases(split))

    def _known(self, request: ScoreRequest) -> bool:
        return not request.identity or self.ledger.met(request.identity)

    def _check_new(self, request: ScoreRequest, known: bool) -> None:
        """Check the limits of the job and of the period for the scores of one more model."""
        self._check_place(request, known)
        self._check_budget(request.split)

    def _check_place(self, request: ScoreRequest, known: bool) -> None:
        """Limit a training job to one model per place, and an evaluation to few unknown models."""
        earlier = self.ledger.scored_in(self.job, request.split, self.site)
        if request.place:
            if any(scored.place == request.place for scored in earlier):
                of = "in the test" if request.place == "test" else f"of {request.place}"
                what = _kind_of(request.split)
                raise self._refused(
                    f"the {what} of another model {of} have left in this job, and it gets one"
                )
            return
        most = self.policy.max_unknown_models
        if not known and sum(not scored.known for scored in earlier) >= most:
            raise self._refused(
                f"this site did not meet the model in a training job, and scores {most} such "
                f"model{'s' * (most != 1)} in an evaluation (max_unknown_models of its privacy policy)"
            )

    def _check_budget(self, split: str) -> None:
        rule = _BUDGETS[split]
        since = time.time() - _DAYS * 24 * 3600
        most, sent = getattr(self.policy, rule), self.ledger.queries(split, self._cases(split), since)
        if sent >= most:
            raise self._refused(
                f"{_kind_of(split)} of {counted(sent, 'model')} on its {split} cases have left, and "
                f"{rule} of its privacy policy is {most} within {_DAYS} days"
            )

    def _spend(self, split: str) -> None:
        """Enter noise on scores in the account of ε."""
        if noise := self.policy.score_noise_multiplier:
            what, cases = f"the {split} {_kind_of(split)} of one more model", partial(self._cases, split)
            epsilon = spend_budget(self.site, self.policy, self.ledger, what, noise, cases)
            self.epsilon = max(epsilon, self.epsilon or 0.0)

    def check_updates(self) -> None:
        """Check that the job may get one more update."""
        sent, most = self.ledger.updates(self.job, self.site), _TIMES * self.rounds
        if sent >= most:
            raise self._refused(
                f"{sent} updates have left in this job of {counted(self.rounds, 'round')}, "
                f"failed ones counted, and a site answers a round at most {_TIMES} times"
            )

    def _statistics(self, method: str, values: Mapping[str, Tensor], cases: int) -> Release:
        about = ("training", cases, self.policy.noise_multiplier)
        return self._release(method, "statistics", _size(values), *about, digest_of(values))

    def _annotated(self, classes: Sequence[str]) -> Iterator[Release]:
        """Yield the release of the names of the classes that the site has annotated for training."""
        names = ", ".join(classes) or "none"
        yield self._release("task", "numbers", f"annotated classes: {names}", digest=_hash(names))

    def _update(self, reply: Reply, payloads: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Release]:
        about, noise = ("training", len(self.folder.cases["training"])), self.policy.sgd_noise_multiplier
        kinds = {"weights": reply.weights, "masked weights and statistics": reply.masks}
        for kind, tensors in kinds.items():
            if tensors:
                yield self._release("model", kind, _size(tensors), *about, noise, digest_of(tensors))
        for method, values in payloads.items():
            yield self._statistics(method, values, about[1])
        metrics = {key: value for key, value in reply.metrics.items() if value is not None}
        numbers = {"num_samples": reply.num_samples, **metrics}
        yield self._release("task", "numbers", _names(numbers), *about, digest=_hash(numbers))

    def _cases(self, split: str, sample: Sequence[Case] | None = None) -> dict[bytes, bytes]:
        if sample is not None:
            sampled = replace(self.folder, cases={**self.folder.cases, split: tuple(sample)})
            return case_identities(sampled, split, self.ledger)
        if split not in self._identities:
            self._identities[split] = case_identities(self.folder, split, self.ledger)
        return self._identities[split]


def _scores_in(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores in an answer: numbers of a site, or of its cases."""
    cases = {"cases": answer["cases"]} if answer.get("cases") else {}
    named = METRICS.keys() | {_LOSS}
    return cases | {key: value for key, value in answer.items() if key in named and value is not None}


def _kind_of(split: str) -> str:
    """Return the noun for a model's numbers on a split."""
    return "losses" if split == "training" else "scores"


def _size(tensors: Mapping[str, Tensor]) -> str:
    return f"{sum(value.numel() for value in tensors.values())} numbers in {len(tensors)} entries"


def _names(entries: Mapping[str, Any]) -> str:
    return ", ".join(sorted(entries))


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
