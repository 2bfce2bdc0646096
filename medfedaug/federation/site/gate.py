"""`Door`: what a site does between the server and its own trainer, before and after each request."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from medfedaug.config.bundle_reference import find, known
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.errors import ConfigError, DataError, JobRefused, MedFedAugError, PrivacyRefused
from medfedaug.federation.messages.initial_weights import INITIAL
from medfedaug.federation.messages.messages import (
    FINGERPRINT,
    FROZEN,
    PREPARE,
    PROSPECT,
    TEST,
    TRAIN,
    VALIDATE,
    Reply,
    Request,
    by_method,
    num_bytes,
    split_frozen,
)
from medfedaug.federation.secure.history import SumHistory, SumRules
from medfedaug.federation.secure.identity import Identity
from medfedaug.federation.secure.masks import SiteMasks
from medfedaug.federation.site.data_folder import resolve_data_folder
from medfedaug.federation.site.job_text import without_job_text
from medfedaug.federation.site.release_log import Account, ScoreRequest, digest_of, enter_message
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.metrics.significance import PatientTest
from medfedaug.privacy import (
    JobBook,
    JobEntry,
    JobRules,
    Origin,
    Pseudonyms,
    class_labels,
    released_difference,
    released_scores,
)
from medfedaug.privacy.job_log import APPROVED, REFUSED, job_hash
from medfedaug.privacy.sent_numbers import sent_numbers

__all__ = ["ROUND", "Door", "GuardedDoor"]

_log = logging.getLogger(__name__)

ROUND = "round "
"""Begins the place of a validation score: see `medfedaug.federation.site.release_log.ScoreRequest`."""

_PERIOD = 1.0
"""Seconds between two looks whether a job was approved."""


class Door:
    """Lets everything pass, for sites that are all on one machine, which nothing leaves."""

    def masks(self, site: str) -> SiteMasks:
        """Return the site's half of secure aggregation, where nothing needs a signature."""
        return SiteMasks(site)

    def admit(self, config: RunConfig, should_stop: Callable[[], bool]) -> None:
        """Called before anything is built for a configuration."""

    def opened(self, trainer: SiteTrainer) -> None:
        """Called when the trainer has the site's data and the network."""

    def incoming(self, request: Request) -> None:
        """Called with each request, before anything is done with it."""

    def met(self, request: Request, trainer: SiteTrainer) -> None:
        """Called in a training job when the trainer has received the model of a request."""

    def asked(self, request: Request, trainer: SiteTrainer, place: str) -> ScoreRequest:
        """Name the model of a request whose scores are asked for, after the trainer has received it."""
        return ScoreRequest("validation" if place.startswith(ROUND) else "test", "", place)

    def check_scores(self, asked: ScoreRequest, trainer: SiteTrainer) -> None:
        """Called before a model is scored.

        Raises:
            MedFedAugError: when nothing of its scores would be sent.
        """

    def release(self, asked: ScoreRequest, found: Mapping[str, Any], trainer: SiteTrainer) -> dict[str, Any]:
        """Called with the scores of a model.

        Raises:
            MedFedAugError: when nothing of them is sent.
        """
        folder, split = trainer.folder, asked.split
        return released_scores(found, trainer.policy, folder.patients(split), class_labels(folder, split))

    def compare(
        self, asked: ScoreRequest, other: str, test: PatientTest, unit: str, trainer: SiteTrainer
    ) -> dict[str, Any]:
        """Called with the comparison of two models.

        Raises:
            MedFedAugError: when nothing of it is sent.
        """
        return released_difference(test, trainer.policy, unit)

    def outgoing(self, reply: Reply, trainer: SiteTrainer) -> Reply:
        """Called with each answer.

        Raises:
            MedFedAugError: when nothing of it is sent.
        """
        return reply

    def ended(self) -> None:
        """Called when the job has ended for this site."""

    def explained(self, site: str, task: str, error: Exception, trainer: SiteTrainer) -> str:
        """Describe an error to the server in place of an answer, in one line."""
        if isinstance(error, MedFedAugError):
            return str(error)
        return f"site {site}: {_reason(error)!r}"[:500]


class GuardedDoor(Door):
    """The door of a site in a real federation.

    Args:
        site: the site's name.
        rules: which jobs the site takes part in.
        pseudonyms: what stands for the names of its cases and files in all that leaves it.
        book: the jobs that the site has seen.
        job: the job's identifier.
        approve: the command with which the site's administrator approves a job, without its hash.
        identity: opens what the site signs its keys with under secure aggregation.
        origin: where the job comes from, for the record.
        history: the sums under secure aggregation that the site has helped to open.
    """

    def __init__(
        self,
        site: str,
        rules: JobRules,
        pseudonyms: Pseudonyms,
        book: JobBook,
        job: str,
        approve: str,
        identity: Callable[[], Identity],
        origin: Origin | None = None,
        history: SumHistory | None = None,
    ) -> None:
        self.site, self.rules, self.pseudonyms = site, rules, pseudonyms
        self.book, self.job, self.approve = book, job, approve
        self.identity, self.origin, self.history = identity, origin, history
        self._admitted: list[RunConfig] = []
        self._accounts: dict[SiteTrainer, Account] = {}  # an evaluation has one for each run

    def masks(self, site: str) -> SiteMasks:
        """Keys are signed and checked, and sums are of as many sites as the rules ask for."""
        rules = SumRules(
            least=self.rules.min_summed,
            known=self.rules.known_sites,
            share=self.rules.min_known_share,
            most_sets=self.rules.max_sum_sets,
        )
        return SiteMasks(site, self.identity, rules, self.history, self.job)

    def admit(self, config: RunConfig, should_stop: Callable[[], bool]) -> None:
        """Check Bundle, rules and verdict, count the job, and wait for its approval if that is a rule."""
        if config in self._admitted:
            return
        self._check_bundle(config)
        self.rules.check(self.site, config)
        # Before the configuration is noted: those of jobs beyond the limit would fill the book.
        self.book.check(self.site, config, self.job, self.rules.max_jobs_per_day)
        entry = self._check_verdict(config)
        if self.rules.approve and entry.verdict != APPROVED:
            self._wait(entry, should_stop)
        self.book.begin(self.site, config, self.job, self.rules.max_jobs_per_day)
        self._admitted.append(config)

    def _account_of(self, config: RunConfig) -> str:
        """The job whose budget of scores a run uses: each training of a pilot is one, as in the book."""
        of_pilot = bool(self._admitted and self._admitted[0].pilot and config != self._admitted[0])
        return f"{self.job}.{job_hash(config.to_dict())[:8]}" if of_pilot else self.job

    def ended(self) -> None:
        """Enter in the book that the job has ended, and beside the images what the ledger holds now."""
        if self._admitted:
            self.book.end(self.job)
        for account in self._accounts.values():
            account.bind()

    def _check_bundle(self, config: RunConfig) -> None:
        if config.bundle:
            try:
                find(config.bundle)
            except ConfigError as error:
                raise JobRefused(self.site, error.marked) from error

    def _wait(self, entry: JobEntry, should_stop: Callable[[], bool]) -> None:
        short, most = entry.hash[:12], self.rules.max_waiting
        for forgotten in self.book.limit_waiting(most):
            _log.warning(
                "site %s: %s configurations wait for approval, and one more came: %s, the oldest, is refused",
                *(self.site, most, forgotten.hash[:12]),
            )
        _log.warning(
            "site %s: job %s waits until it is approved here: %s %s",
            *(self.site, self.job, self.approve, short),
        )
        while (now := self.book.known(entry.hash)) is not None and now.verdict != APPROVED:
            self._check_refused(now)
            if should_stop():
                raise MedFedAugError(
                    f"site {self.site}: the job ended before its configuration {short} was approved"
                )
            time.sleep(_PERIOD)
        if now is None:
            reason = (
                f"{most} later configurations wait for approval, and the site's rule max_waiting is {most}"
            )
            raise JobRefused(self.site, reason)

    def _check_verdict(self, config: RunConfig) -> JobEntry:
        """Apply the administrator's verdict even without approval."""
        entry = self.book.note(config, self.job, self.origin)
        self._check_refused(entry)
        return entry

    def _check_refused(self, entry: JobEntry) -> None:
        if entry.verdict == REFUSED:
            raise JobRefused(
                self.site, f"the site's administrator has refused the configuration {entry.hash[:12]}"
            )

    def opened(self, trainer: SiteTrainer) -> None:
        """Check the size of the model, and the training cases: their number, and against earlier releases."""
        self.rules.check_model(self.site, num_bytes(trainer.network.state_dict()) / 1e6)
        if trainer.trains:
            self.rules.check_cases(self.site, trainer.folder.cases_of_patients("training"))
        job = self._account_of(trainer.config)
        account = Account(
            self.site, job, trainer.ledger, trainer.policy, trainer.folder, trainer.config.rounds
        )
        account.bind()
        self._accounts[trainer] = account
        trainer.release_loss = account.release_loss
        if trainer.trains:
            account.check_cases("training")

    def incoming(self, request: Request) -> None:
        """Check the sizes of a request, and that the job has not been refused since it was admitted."""
        for config in self._admitted:
            self._check_verdict(config)
        frozen, exchanged = split_frozen(request.once)
        self.rules.check_model(self.site, num_bytes({**frozen, **request.weights}) / 1e6)
        self.rules.check_model(self.site, num_bytes(request.method_states) / 1e6)
        self.rules.check_payload(self.site, num_bytes({**exchanged, **request.payload}) / 1e6)

    def met(self, request: Request, trainer: SiteTrainer) -> None:
        """Enter the model in the ledger, so that an evaluation may have it scored."""
        if request.task == TRAIN:
            self._accounts[trainer].check_updates()
        trained = request.round - 1 if request.task == TRAIN else request.round
        if trained > 0:  # before the first round it may be whatever somebody chose
            trainer.ledger.meet(_identities(request, trainer), self._account_of(trainer.config))

    def asked(self, request: Request, trainer: SiteTrainer, place: str) -> ScoreRequest:
        """Name the model by a hash of all that decides over its scores."""
        if request.task == VALIDATE and not trainer.config.validates(request.round):
            raise PrivacyRefused(self.site, f"the model of round {request.round} is not to be scored")
        payload = {**split_frozen(trainer.memory.once)[1], **request.payload}
        told = [
            *(job_hash(trainer.config.to_dict()), digest_of(request.weights), digest_of(payload)),
            *(digest_of(request.method_states), request.scoring.get("own")),
            # Under other rules the answer is another one.
            *(trainer.policy.scores, trainer.policy.min_images, trainer.policy.score_noise_multiplier),
        ]
        asked = super().asked(request, trainer, place)
        return replace(asked, model=_sha256(told), identity="" if place else _brought(request, trainer))

    def check_scores(self, asked: ScoreRequest, trainer: SiteTrainer) -> None:
        """Keep to the budget of scores, and to the number of answers that may fail."""
        self._accounts[trainer].check_scores(asked)

    def release(self, asked: ScoreRequest, found: Mapping[str, Any], trainer: SiteTrainer) -> dict[str, Any]:
        """Keep to the budget of scores, round them, and enter them in the ledger."""
        return self._accounts[trainer].release(asked, found)

    def compare(
        self, asked: ScoreRequest, other: str, test: PatientTest, unit: str, trainer: SiteTrainer
    ) -> dict[str, Any]:
        """Keep to the budget of scores, round the difference, and enter it in the ledger."""
        return self._accounts[trainer].compare(asked, other, test, unit)

    def outgoing(self, reply: Reply, trainer: SiteTrainer) -> Reply:
        """Check what is sent, put pseudonyms in the place of names, and enter it in the ledger."""
        self.rules.check_payload(self.site, num_bytes(reply.payload) / 1e6)
        reply.metrics = sent_numbers(reply.task, reply.metrics)
        if reply.task not in (FINGERPRINT, PROSPECT, PREPARE):  # whose cases are numbers of cases
            reply.metrics = self.pseudonyms.scores(reply.metrics)
        self._accounts[trainer].enter(reply, trainer.guard.samples)
        return reply

    def explained(self, site: str, task: str, error: Exception, trainer: SiteTrainer) -> str:
        """An error of ours without names and without text of the job, and of any other its kind alone."""
        if isinstance(error, MedFedAugError):
            told = self.pseudonyms.text(error, site, _data(site, trainer))
            told = without_job_text(told, trainer.config.to_dict(), self._own_text(site, trainer))
            if told != str(error):
                _log.error("%s [the server is told: %s]", error, told)
        else:
            told = f"site {site}: {type(_reason(error)).__name__} in {task}; the site's own log says more"
        try:
            failed = task in (TRAIN, VALIDATE, TEST) and not isinstance(error, (JobRefused, PrivacyRefused))
            enter_message(trainer.ledger, self.site, self.job, told, failed=failed)
        except MedFedAugError as problem:  # which may be what the message is about
            _log.error("site %s: not in the ledger: %s (%s)", site, told, problem)
        return told

    def _own_text(self, site: str, trainer: SiteTrainer) -> Iterator[str]:
        """Return the text that a message may hold although the job has it too."""
        yield from (site, self.site, *(bundle.name for bundle in known()))
        for names in (self.rules.methods, self.rules.networks, self.rules.tasks, self.rules.loops):
            yield from names or ()
        found = getattr(trainer, "folder", None)
        if isinstance(found, SiteFolder):
            yield from (*found.classes, *found.channel_names)


def _identities(request: Request, trainer: SiteTrainer) -> list[str]:
    """The hashes by which an evaluation may bring the model that a request of a training job has.

    A finished run keeps with its model the exchange of each round, and that from before training of the
    methods that need it at inference, which only the server knows.
    """
    once, payload = by_method(trainer.memory.once), by_method(request.payload)
    once.pop(INITIAL, None)
    once.pop(FROZEN, None)
    own = {name: digest_of(values) for name, values in payload.items()}
    both = {name: digest_of({**values, **payload.get(name, {})}) for name, values in once.items()}
    chosen = chain.from_iterable(combinations(both, count) for count in range(len(both) + 1))
    return [_identity(request, trainer, {**own, **{name: both[name] for name in names}}) for names in chosen]


def _brought(request: Request, trainer: SiteTrainer) -> str:
    """The hash by which the ledger may know a model that an evaluation brings; empty for the site's own."""
    if request.method_states:  # by another site, with what a method keeps there
        return "lent"
    payload = {**request.once, **request.payload}
    if not request.weights and not payload:
        return ""
    return _identity(request, trainer, {k: digest_of(v) for k, v in by_method(payload).items()})


def _identity(request: Request, trainer: SiteTrainer, exchanged: Mapping[str, str]) -> str:
    config = job_hash(trainer.config.to_dict())
    return _sha256([config, request.run, digest_of(request.weights), sorted(exchanged.items())])


def _sha256(told: list[Any]) -> str:
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _data(site: str, trainer: SiteTrainer) -> SiteFolder | Path | None:
    """The site's data, or where they are as long as they could not be opened."""
    found = getattr(trainer, "folder", trainer.data)
    if isinstance(found, SiteFolder):
        return found
    try:
        return resolve_data_folder(site, found)
    except DataError:
        return None


def _reason(error: BaseException) -> BaseException:
    """The error inside a transform: MONAI's own error names the transform, but not the reason."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error
