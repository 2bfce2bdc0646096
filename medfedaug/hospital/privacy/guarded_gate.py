"""`GuardedGate`: admission of jobs, limits, pseudonyms and ledger of a site in a real federation."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from medfedaug.config.bundle_reference import find, known
from medfedaug.config.comparison import ComparisonConfig
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.errors import ConfigError, DataError, JobRefused, MedFedAugError, PrivacyRefused, translated
from medfedaug.federation.messages.messages import (
    NUMBER_OF_SAMPLES,
    TRAIN,
    Reply,
    Request,
    num_bytes,
    split_frozen,
)
from medfedaug.federation.site.data_folder import resolve_data_folder
from medfedaug.federation.site.entry_patients import check_contributors
from medfedaug.federation.site.site import Delivery, Gate, cause
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.hospital.privacy import JobBook, JobEntry, JobRules, Origin, PrivacyPolicy, Pseudonyms
from medfedaug.hospital.privacy.guard import own_privacy
from medfedaug.hospital.privacy.job_log import APPROVED, REFUSED
from medfedaug.hospital.privacy.pseudonyms import without_job_text
from medfedaug.hospital.privacy.release_log import Account, enter_message
from medfedaug.hospital.privacy.score_release import sent_numbers
from medfedaug.hospital.secure import MaskedDelivery
from medfedaug.hospital.secure.history import SumHistory, SumRules
from medfedaug.hospital.secure.identity import Identity
from medfedaug.hospital.secure.masks import SiteMasks
from medfedaug.methods.compatibility import methods_with

_log = logging.getLogger(__name__)

_PERIOD = 1.0  # seconds between two checks of a job's approval


class GuardedGate(Gate):
    """The gate of a site in a real federation.

    ``approve`` is the administrator's command for the approval of a job, without its hash.
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
        self.min_patients = PrivacyPolicy().min_images
        self._admitted: list[RunConfig] = []
        self._approved: list[RunConfig | ComparisonConfig] = []
        self._trainings = 0
        self._account: Account | None = None

    def delivery(self, site: str, trainer: SiteTrainer) -> Delivery:
        """Sign and check keys, and apply the site's rules for sums."""
        if not trainer.config.secure_aggregation:
            return Delivery()
        rules = SumRules(
            least=self.rules.min_summed,
            known=self.rules.known_sites,
            share=self.rules.min_known_share,
            most_sets=self.rules.max_sum_sets,
        )
        masks = SiteMasks(site, self.identity, rules, self.history, self.job)
        return MaskedDelivery(site, trainer, masks, self.count)

    def admit(self, config: RunConfig, should_stop: Callable[[], bool]) -> None:
        """Check Bundle, rules and verdict, and wait for the approval of the job if required.

        The trainings of a comparison have one approval.
        """
        if config in self._admitted:
            return
        if config.bundle:
            with translated(ConfigError, to=lambda error: JobRefused(self.site, error.marked)):
                find(config.bundle)
        self.rules.check(self.site, config)
        comparison = self.comparison
        one_of_it = comparison is not None and config in comparison.configs().values()
        approved = comparison if comparison is not None and one_of_it else config
        entry = self._check_verdict(approved)
        if self.rules.approve and entry.verdict != APPROVED:
            self._wait(entry, should_stop)
        self.book.begin(approved, self.job)
        self._admitted.append(config)
        if approved not in self._approved:
            self._approved.append(approved)

    def ended(self) -> None:
        """Record the end of the job, and the ledger's state next to the images."""
        if self._admitted:
            self.book.end(self.job)
        if self._account is not None:
            self._account.bind()

    def _wait(self, entry: JobEntry, should_stop: Callable[[], bool]) -> None:
        short = entry.hash[:12]
        _log.warning(
            "site %s: job %s waits until it is approved here: %s %s", self.site, self.job, self.approve, short
        )
        while (now := self.book.find(entry.hash)).verdict != APPROVED:
            self._check_refused(now)
            if should_stop():
                raise MedFedAugError(
                    f"site {self.site}: the job ended before its configuration {short} was approved"
                )
            time.sleep(_PERIOD)

    def _check_verdict(self, config: RunConfig | ComparisonConfig) -> JobEntry:
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
        """Check the size of the model, the methods, and the number of training cases."""
        self.rules.check_model(self.site, num_bytes(trainer.network.state_dict()) / 1e6)
        trainer.census.strict = True
        if uncounted := methods_with(trainer.composition.methods, "counted_patients", "excludes"):
            names = ", ".join(method.name for method in uncounted)
            reason = "sends what a site cannot say the patients of, and runs in simulations only"
            raise PrivacyRefused(self.site, f"{names} {reason}")
        privacy = own_privacy(trainer)
        self.min_patients = privacy.min_patients
        if trainer.trains:
            privacy.policy.check_patients(self.site, trainer.folder.cases_of_patients("training"))
        if self._account is not None:  # an earlier training's, in a comparison
            self._account.bind()
        self._account = Account(self.site, self.job, privacy.ledger, privacy.policy, trainer.folder)
        self._account.bind()

    def incoming(self, request: Request) -> None:
        """Check a request's size, the job's number of trainings, and that nobody has refused it meanwhile."""
        for config in self._approved:
            self._check_verdict(config)
        if request.task == TRAIN:
            self._trainings += 1
            self.rules.check_trainings(self.site, self._trainings)
        frozen, exchanged = split_frozen(request.once)
        self.rules.check_model(self.site, num_bytes({**frozen, **request.weights}) / 1e6)
        self.rules.check_payload(self.site, num_bytes({**exchanged, **request.payload}) / 1e6)

    def release(self, split: str, scores: Mapping[str, Any], trainer: SiteTrainer) -> dict[str, Any]:
        """Enter the means that may leave in the ledger."""
        assert self._account is not None
        return self._account.release(split, scores)

    def compare(
        self, split: str, differences: Sequence[float], unit: str, trainer: SiteTrainer
    ) -> dict[str, Any]:
        """Enter a comparison that may leave in the ledger."""
        assert self._account is not None
        return self._account.compare(split, differences, unit)

    def count(self, reply: Reply) -> None:
        """Refuse an entry with too few patients behind it, or with patients whom nobody can name."""
        keys = [*reply.weights, *reply.payload, *([NUMBER_OF_SAMPLES] if reply.num_samples else [])]
        entries = {key: reply.contributors.get(key) for key in keys}
        check_contributors(self.site, entries, self.min_patients)

    def outgoing(self, reply: Reply, trainer: SiteTrainer) -> Reply:
        """Check a reply, replace names by pseudonyms, and enter it in the ledger."""
        self.count(reply)
        self.rules.check_payload(self.site, num_bytes(reply.payload) / 1e6)
        reply.metrics = sent_numbers(reply.task, reply.metrics)
        if own_privacy(trainer).policy.epsilon is not None:  # durations depend on the images
            reply.metrics.pop("seconds", None)
        assert self._account is not None
        self._account.enter(reply)
        return reply

    def error_text(self, site: str, task: str, error: Exception, trainer: SiteTrainer) -> str:
        """Return our errors without names and text of the job, and only the type of any other error.

        At a site with an account of ε, what is wrong with images stays there too.
        """
        about_images = own_privacy(trainer).policy.epsilon is not None and isinstance(error, DataError)
        if isinstance(error, MedFedAugError) and not about_images:
            text = self.pseudonyms.text(error, site, _data(site, trainer))
            text = without_job_text(text, trainer.config.to_dict(), self._own_text(site, trainer))
            if text != str(error):
                _log.error("%s [sent to the server: %s]", error, text)
        else:
            text = f"site {site}: {type(cause(error)).__name__} in {task}; the site's own log says more"
        try:
            enter_message(own_privacy(trainer).ledger, self.site, self.job, text)
        except MedFedAugError as problem:  # possibly the same error
            _log.error("site %s: not in the ledger: %s (%s)", site, text, problem)
        return text

    def _own_text(self, site: str, trainer: SiteTrainer) -> Iterator[str]:
        """Yield the site's own text, which messages may hold even if the job has it too."""
        yield from (site, self.site, *(bundle.name for bundle in known()), *self.rules.loops)
        folder = getattr(trainer, "folder", None)
        if isinstance(folder, SiteFolder):
            yield from (*folder.classes, *folder.channel_names)


def _data(site: str, trainer: SiteTrainer) -> SiteFolder | Path | None:
    """Return the site's data, or their path before they are open."""
    data = getattr(trainer, "folder", trainer.data)
    if isinstance(data, SiteFolder):
        return data
    with suppress(DataError):
        return resolve_data_folder(site, data)
    return None
