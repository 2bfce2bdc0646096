"""`Account`: enters in a site's ledger what a job takes from it, and keeps back what would tell too much."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor

from medfedaug.data.base import Case, SiteFolder
from medfedaug.data.quality.content_hash import case_identities
from medfedaug.errors import ConfigError, PrivacyRefused
from medfedaug.federation.messages.messages import (
    FINGERPRINT,
    LEND,
    MASK_TASKS,
    PREPARE,
    PROSPECT,
    SCORE_EPSILON,
    TRAIN,
    Reply,
    by_method,
)
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

__all__ = ["Account", "ScoreRequest", "digest_of", "enter_message"]

_TIMES = 3
"""How often a round is answered at most: a server that was started again repeats some. Answers to other
weights would tell more of the cases each time."""

_TRAINING = (FINGERPRINT, PROSPECT, PREPARE, TRAIN, LEND)
"""The tasks whose answers are about training cases."""

_NONE: Mapping[str, Sequence[Case]] = {}

_DAYS = 30
"""For which the scores of models are counted together."""

_LOSS = "loss"

_BUDGETS = {
    "validation": "max_validation_scores",
    "test": "max_test_scores",
    "training": "max_validation_scores",  # of losses
}
"""The setting that says of how many models something about the cases of a split may leave."""


@dataclass(frozen=True)
class ScoreRequest:
    """A model whose scores a server asks for.

    Args:
        split: on which cases: ``"validation"``, ``"test"``, or of losses ``"training"``.
        model: a hash of all that decides over the scores beside the cases.
        place: ``"round 3"``, ``"test"``, ``"test of round 3"`` or ``"round 3: train_loss"``: of each place a
            training job gets the scores of one model. Empty in an evaluation.
        identity: the hash by which the ledger knows models of training jobs; empty in a training job.
    """

    split: str
    model: str
    place: str = ""
    identity: str = ""


def enter_message(ledger: PrivacyLedger, site: str, job: str, text: str, *, failed: bool = False) -> None:
    """Enter a line that the server is told in place of an answer, which there may be before data are open.

    Args:
        ledger: the site's.
        site: its name.
        job: the job's identifier.
        text: the line.
        failed: whether training or scoring failed. It counts as an update then: that it failed may be about
            one image.
    """
    method = "model" if failed else "task"
    ledger.enter([Release(job, method, "message", text, digest=_hash(text), site=site)])


class Account:
    """View of one job on a site's ledger, with the budget of scores that the site keeps.

    Args:
        site: the site's name, for messages.
        job: the job's identifier.
        ledger: the site's.
        policy: the site's.
        folder: the site's data, as the job sees them.
        rounds: of the job's configuration.

    Attributes:
        epsilon: the largest of all releases with noise about the cases of a split; ``None`` without noise.
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

    def bind(self) -> None:
        """Bind the site's images to the ledger.

        Raises:
            PrivacyRefused: when they belong to another ledger, or this one is an older copy of theirs.
        """
        try:
            bind_account(self.ledger, self.folder)
        except ConfigError as error:
            raise PrivacyRefused(self.site, error.marked) from error

    def check_cases(self, split: str, sample: Sequence[Case] | None = None) -> None:
        """Check that a set of cases is not nearly that of an earlier release.

        Raises:
            PrivacyRefused: naming the number of patients or cases in which they differ, and the earlier job.
        """
        if self.policy.allow_differences or not self.folder.cases[split]:
            return
        near = self.ledger.nearest(split, self._cases(split, sample))
        if near is not None and near.apart < self.policy.min_images:
            when = datetime.fromtimestamp(near.time).isoformat(" ", "minutes")
            what = f" patient{'s' * (near.apart != 1)}" if self.folder.patients(split) else ""
            raise PrivacyRefused(
                self.site,
                f"its {split} cases differ by {near.apart}{what} from those of job {near.job} of {when}, and "
                f"this site sends nothing about sets that differ by fewer than {self.policy.min_images} "
                "(min_images of its privacy policy)",
            )

    def enter(self, reply: Reply, samples: Mapping[str, Sequence[Case]] = _NONE) -> None:
        """Enter all that an answer holds beside scores, before it leaves.

        No other job enters anything between the checks and the entry: of two jobs that run at the same time
        the second is checked against the first.

        Raises:
            PrivacyRefused: when no more updates may leave, or nothing about these cases.
        """
        with self.ledger.held():
            self._enter(reply, samples)

    def _enter(self, reply: Reply, samples: Mapping[str, Sequence[Case]]) -> None:
        if reply.task in MASK_TASKS:
            told = {key: value.hex() for key, value in reply.masks.items()}
            self.ledger.enter([self._release("masks", reply.task, _names(told), digest=_hash(told))])
            return
        if reply.task in _TRAINING:
            if self.epsilon is not None:
                reply.metrics[SCORE_EPSILON] = self.epsilon
            self.check_cases("training")
            if reply.weights or reply.masks:
                self.check_updates()
            payloads = by_method(reply.payload)
            sampled = {name: samples[name] for name in payloads if name in samples}
            for cases in sampled.values():
                self.check_cases("training", cases)
            for name, cases in sampled.items():
                release = self._statistics(name, payloads.pop(name), len(cases))
                self.ledger.enter([release], self._cases("training", cases))
            self.ledger.enter(self._update(reply, payloads), self._cases("training"))
            if reply.task == PREPARE and self.folder.partial:
                self.ledger.enter(self._annotated(self.folder.annotated("training")))
            if "annotated" in reply.metrics:
                self.ledger.enter(self._annotated(reply.metrics["annotated"]))

    def release(self, asked: ScoreRequest, found: Mapping[str, Any]) -> dict[str, Any]:
        """Enter the scores of a model in the ledger, and return the part that leaves.

        The same model on the same cases has the same answer, whichever job asks, and counts once.
        """
        folder, split = self.folder, asked.split
        whose, labels = folder.patients(split), class_labels(folder, split)

        def left() -> dict[str, Any]:
            return released_scores(found, self.policy, whose, labels)

        return self._release_once(asked, "scores", left, exact=self.policy.scores != SUMMARY)

    def check_scores(self, asked: ScoreRequest) -> None:
        """Check that scores of a model may leave, before the images are looked at with it.

        The time until an answer comes, and an error, depend on the images as a score does, and a model beyond
        the budget must not have them either.

        Raises:
            PrivacyRefused: when they may not, or when too many answers of the job have failed.
        """
        with self.ledger.held():
            failed, most = self.ledger.updates(self.job, self.site, failed=True), _TIMES * self.rounds
            if asked.place and failed >= most:
                raise PrivacyRefused(
                    self.site, f"{failed} answers of this job have failed, and {most} may, {_TIMES} a round"
                )
            if self.ledger.scored(asked.split, asked.model, self._cases(asked.split)) is None:
                self._check_new(asked, self._known(asked))

    def release_loss(
        self, what: str, round_: int, weights: Mapping[str, Tensor], by_case: Mapping[str, float | None]
    ) -> float | None:
        """Enter a loss over training cases in the ledger, and return the part that leaves.

        As of scores, the same model has the same answer, a job gets one model's in each round, and there is
        one budget for all jobs.
        """
        policy, split = self.policy, "training"
        rules = (policy.min_images, policy.score_noise_multiplier)
        model = _hash([_LOSS, what, digest_of(weights), len(self.folder.classes), *rules])
        asked, whose = ScoreRequest(split, model, f"round {round_}: {what}"), self.folder.patients(split)

        def left() -> dict[str, Any]:
            return {_LOSS: released_loss(by_case, policy, len(self.folder.classes), whose)}

        found: float | None = self._release_once(asked, "losses", left)[_LOSS]
        return found

    def _release_once(
        self, asked: ScoreRequest, kind: str, left: Callable[[], dict[str, Any]], *, exact: bool = False
    ) -> dict[str, Any]:
        """Enter what is said of a model, and return it; of the same model what was said before."""
        split, cases = asked.split, self._cases(asked.split)
        with self.ledger.held():
            if not exact:
                self.check_cases(split)
            earlier = self.ledger.scored(split, asked.model, cases)
            if earlier is not None and earlier.answer:
                told: dict[str, Any] = json.loads(earlier.answer)
                self._enter_scores(split, kind, told, 0)
                return told
            known = self._known(asked)
            if earlier is None:
                self._check_new(asked, known)
            told = left()
            if not _left(told):
                note = str(told.get("note", f"no {kind}"))
                self.ledger.enter([self._release("task", "message", note, digest=_hash(told))])
                return told
            if earlier is None:
                self._spend(split)
            # Counted before it is kept for others who ask: a crash in between gives nothing away.
            self._enter_scores(split, kind, told, int(earlier is None))
            if earlier is None:
                answer = "" if exact else json.dumps(told)
                scored = Scored(
                    self.job,
                    split,
                    asked.model,
                    place=asked.place,
                    known=known,
                    answer=answer,
                    site=self.site,
                )
                self.ledger.score(scored, cases)
            return told

    def compare(self, asked: ScoreRequest, other: str, test: PatientTest, unit: str) -> dict[str, Any]:
        """Enter the difference between two models' scores in the ledger, and return the part that leaves."""
        split, cases = asked.split, self._cases(asked.split)
        if self.policy.scores != SUMMARY:  # which follows from the scores of cases
            return released_difference(test, self.policy, unit)
        model = _hash(["difference", asked.model, other])
        with self.ledger.held():
            earlier = self.ledger.scored(split, model, cases)
            if earlier is not None:
                told: dict[str, Any] = json.loads(earlier.answer)
            else:
                self.check_cases(split)
                told = released_difference(test, self.policy, unit)
                if not told:
                    return told
                self._check_budget(split)
            self._enter_scores(split, "differences", told, int(earlier is None))
            if earlier is None:
                difference = Scored(self.job, split, model, answer=json.dumps(told), site=self.site)
                self.ledger.score(difference, cases)
            return told

    def _enter_scores(self, split: str, kind: str, told: Mapping[str, Any], models: int) -> None:
        about = (_names(_left(told) or told), split, len(self.folder.cases[split]))
        noise = self.policy.score_noise_multiplier
        release = self._release("task", kind, *about, noise, _hash(told), models)
        self.ledger.enter([release], self._cases(split))

    def _known(self, asked: ScoreRequest) -> bool:
        return not asked.identity or self.ledger.met(asked.identity)

    def _check_new(self, asked: ScoreRequest, known: bool) -> None:
        """Check that the job, and this month, may have the scores of one more model."""
        self._check_place(asked, known)
        self._check_budget(asked.split)

    def _check_place(self, asked: ScoreRequest, known: bool) -> None:
        """Check that a training job asks for one model in each place, an evaluation for few unknown ones."""
        earlier = self.ledger.scored_in(self.job, asked.split, self.site)
        if asked.place:
            if any(scored.place == asked.place for scored in earlier):
                of = "in the test" if asked.place == "test" else f"of {asked.place}"
                what = _said(asked.split)
                raise PrivacyRefused(
                    self.site, f"the {what} of another model {of} have left in this job, and it gets one"
                )
            return
        most = self.policy.max_unknown_models
        if not known and sum(not scored.known for scored in earlier) >= most:
            raise PrivacyRefused(
                self.site,
                f"this site did not meet the model in a training job, and scores {most} such "
                f"model{'s' * (most != 1)} in an evaluation (max_unknown_models of its privacy policy)",
            )

    def _check_budget(self, split: str) -> None:
        rule = _BUDGETS[split]
        since = time.time() - _DAYS * 24 * 3600
        most, sent = getattr(self.policy, rule), self.ledger.queries(split, self._cases(split), since)
        if sent >= most:
            raise PrivacyRefused(
                self.site,
                f"{_said(split)} of {counted(sent, 'model')} on its {split} cases have left, and "
                f"{rule} of its privacy policy is {most} within {_DAYS} days",
            )

    def _spend(self, split: str) -> None:
        """Enter noise on scores in the account of ε."""
        policy = self.policy
        if not policy.score_noise_multiplier:
            return
        assert policy.max_epsilon is not None
        budget = (policy.score_noise_multiplier, policy.delta, policy.max_epsilon)
        try:
            epsilon = self.ledger.spend(*budget, self._cases(split))
        except ConfigError as error:
            raise PrivacyRefused(self.site, str(error)) from error
        if epsilon is None:
            raise PrivacyRefused(
                self.site,
                f"privacy budget spent: the {split} {_said(split)} of one more model would exceed ε = "
                f"{policy.max_epsilon:g} (δ = {policy.delta:g})",
            )
        self.epsilon = max(epsilon, self.epsilon or 0.0)

    def check_updates(self) -> None:
        """Check that the job may have one more update."""
        sent, most = self.ledger.updates(self.job, self.site), _TIMES * self.rounds
        if sent >= most:
            raise PrivacyRefused(
                self.site,
                f"{sent} updates have left in this job of {counted(self.rounds, 'round')}, "
                f"failed ones counted, and a site answers a round at most {_TIMES} times",
            )

    def _statistics(self, method: str, values: Mapping[str, Tensor], cases: int) -> Release:
        about = ("training", cases, self.policy.noise_multiplier)
        return self._release(method, "statistics", _size(values), *about, digest_of(values))

    def _annotated(self, classes: Sequence[str]) -> Iterator[Release]:
        """The names of the classes that the site has annotated for training; they follow from its list."""
        names = ", ".join(classes) or "none"
        yield self._release("task", "numbers", f"annotated classes: {names}", digest=_hash(names))

    def _update(self, reply: Reply, payloads: Mapping[str, Mapping[str, Tensor]]) -> Iterator[Release]:
        about = ("training", len(self.folder.cases["training"]))
        if reply.weights:
            size, digest = _size(reply.weights), digest_of(reply.weights)
            noise = self.policy.sgd_noise_multiplier
            yield self._release("model", "weights", size, *about, noise, digest)
        if reply.masks:
            size, digest = _size(reply.masks), digest_of(reply.masks)
            kind, noise = "masked weights and statistics", self.policy.sgd_noise_multiplier
            yield self._release("model", kind, size, *about, noise, digest)
        for method, values in payloads.items():
            yield self._statistics(method, values, about[1])
        said = {key: value for key, value in reply.metrics.items() if value is not None}
        told = {"num_samples": reply.num_samples, **said}
        yield self._release("task", "numbers", _names(told), *about, digest=_hash(told))

    def _cases(self, split: str, sample: Sequence[Case] | None = None) -> dict[bytes, bytes]:
        if sample is not None:
            some = replace(self.folder, cases={**self.folder.cases, split: tuple(sample)})
            return case_identities(some, split, self.ledger)
        if split not in self._identities:
            self._identities[split] = case_identities(self.folder, split, self.ledger)
        return self._identities[split]


def _left(told: Mapping[str, Any]) -> dict[str, Any]:
    """The scores among what leaves: numbers of a site, or of its cases."""
    cases = {"cases": told["cases"]} if told.get("cases") else {}
    named = METRICS.keys() | {_LOSS}
    return cases | {key: value for key, value in told.items() if key in named and value is not None}


def _said(split: str) -> str:
    """The name of what is said of a model on the cases of a split."""
    return "losses" if split == "training" else "scores"


def _size(tensors: Mapping[str, Tensor]) -> str:
    return f"{sum(value.numel() for value in tensors.values())} numbers in {len(tensors)} entries"


def _names(told: Mapping[str, Any]) -> str:
    return ", ".join(sorted(told))


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors by name: of their numbers, types and shapes."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        value = tensors[key].detach().cpu().contiguous()
        digest.update(repr((key, str(value.dtype), tuple(value.shape))).encode())
        # As bytes, since NumPy has no bfloat16.
        digest.update(value.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _hash(told: Any) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
