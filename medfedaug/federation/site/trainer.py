"""`SiteTrainer`: a site's model that is also trained, with what the site keeps from round to round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medfedaug.config.machine import Machine
from medfedaug.config.plan import PLANNED
from medfedaug.config.run import RunConfig, derive_seed
from medfedaug.config.site_description import DESCRIPTION
from medfedaug.data.base import SiteFolder
from medfedaug.data.quality.content_hash import case_identities
from medfedaug.errors import MedFedAugError, PrivacyRefused, warn
from medfedaug.federation.job_folder import SPACING
from medfedaug.federation.messages.initial_weights import INITIAL
from medfedaug.federation.messages.messages import (
    FROZEN,
    PREPARE,
    TEST,
    TRAIN,
    VALIDATE,
    Reply,
    Request,
    entries_hash,
    namespaced,
    own_entries,
    portable,
)
from medfedaug.federation.messages.privacy_guard import PrivacyGuard
from medfedaug.federation.planning.fingerprint import PLAN, FingerprintExchange, site_spacing
from medfedaug.federation.planning.pilot import pilot_training
from medfedaug.federation.site.interrupted_round import HalfRound, digest
from medfedaug.federation.site.local_training import LocalRound, LocalTraining
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.script_components import Brought
from medfedaug.federation.site.script_training import Desk, ForeignLoop, LoopTraining
from medfedaug.federation.site.state import LocalState, RoundMemory
from medfedaug.federation.site.training_mode import local_training
from medfedaug.methods.base import Payload
from medfedaug.models.memory_format import channels_last
from medfedaug.models.precision import bfloat16_speedup, run_in_bfloat16
from medfedaug.models.supervision import DeepSupervision
from medfedaug.privacy import PrivacyLedger, PrivacyPolicy
from medfedaug.sampling.prefetch import on_device
from medfedaug.statistics import ChannelStatistics
from medfedaug.utils.validation import check_choice, check_keys

_log = logging.getLogger(__name__)

ReleaseLoss = Callable[[str, int, Mapping[str, Tensor], Mapping[str, float | None]], float | None]
"""See `medfedaug.federation.site.release_log.Account.release_loss`."""

_SPLITS = ("validation", "test")
_CPU = torch.device("cpu")
_LEAST_GAIN = 1.1  # less is not worth the digits


class SiteTrainer(SiteModel):
    """A site of the federation: its model, its training, and what it keeps.

    The order of calls is `open` and `prepare` once, then `start_round`, `train` and `evaluate` in every
    round. A request brings one model, which is first scored and then trained.

    All random numbers follow from the run's seed, the site's name and the round, so a round gives the same
    weights in any process and after a restart.

    What the site keeps for itself (local norm layers, a method's own state) is stored by round
    (`medfedaug.federation.site.state.RoundMemory`), so that it survives a restart and a repeated round.

    Args:
        config: see `SiteModel`.
        data: see there.
        device: see there.
        state_dir: a folder for what the site keeps; ``None`` keeps it only in memory.
        policy: what the site lets its methods send; never part of a job. ``None`` lets everything pass, for
            simulations, in which nothing leaves the machine.
        ledger: the file of the site's account of what it has released and spent, over all jobs.
        threads: see `SiteModel`.
        machine: see there.
        statistics: see there.
        save_every: minutes of a round's training after which its state is written, so that a restart goes on
            from there; 0 for never.

    Attributes:
        exchange_device: the device of an update's weights: the CPU, unless the server is in the same process.
        saves_each_round: whether the site's state is written after each round, or only when `save` is called.
        training_dataset: makes the training data of a round from its seed; by default `own_dataset`.
        loop: a script whose loop trains in the place of the federation's; ``None`` for the federation's.
        continued: the steps of the last round that an earlier process of the site took; 0 for none.
        last_metrics: numbers about the last round of training.
        last_loss: the mean loss of the steps of the last round, for the site itself; ``None`` before.
        release_loss: of a loss over training cases what may leave, of a site in a real federation, whose
            `medfedaug.federation.site.gate.GuardedDoor` sets it; ``None`` where everything may.
        memory: what the site keeps from round to round.
        guard: what the site's policy lets out; made by `open`, like ``training``.
        training: the local training.
    """

    guard: PrivacyGuard
    training: LocalTraining

    def __init__(
        self,
        config: RunConfig,
        data: str | Path | SiteFolder | None = None,
        device: str = "auto",
        state_dir: str | Path | None = None,
        policy: PrivacyPolicy | None = None,
        ledger: str | Path | None = None,
        threads: int = 0,
        machine: Machine | None = None,
        statistics: ChannelStatistics | None = None,
        save_every: float = 0.0,
    ) -> None:
        super().__init__(config, data, device, threads=threads, machine=machine, statistics=statistics)
        self.policy = policy or PrivacyPolicy.of_simulation()
        self.ledger = PrivacyLedger(ledger)
        self.memory = RoundMemory("", Path(state_dir) if state_dir is not None else None)
        self.save_every, self._request = save_every, ""
        self.exchange_device = _CPU
        self.saves_each_round = True
        self.training_dataset: Callable[[int], Dataset[Any]] = self.own_dataset
        self.loop: ForeignLoop | None = None
        self.continued = 0
        self.last_metrics: dict[str, Any] = {}
        self.last_loss: float | None = None
        self.release_loss: ReleaseLoss | None = None
        self._job, self._planned = config, dict[str, Any]()
        self._aborted = False
        self._precision_is_open = False

    def open(self, name: str) -> None:
        """Open the data folder and build network, methods, guard and training, anew if it was open.

        Raises:
            MedFedAugError: see `SiteModel.open`; also when a script's training loop cannot take part.
        """
        self.memory.site = name
        super().open(name)

    def _begin(self) -> None:
        if self.loop is not None and self.trains:
            self.loop.start(Desk(self))
        else:
            self._build(Brought())

    def build_around(self, script: Brought) -> None:
        """Build around what a script brings, in its thread."""
        self._build(script, self.loop)

    def _build(self, script: Brought, loop: ForeignLoop | None = None) -> None:
        super()._build(script)
        composition = self.composition
        self.guard = PrivacyGuard(
            self.name,
            self.policy,
            cases=len(self.folder.cases["training"]),
            ledger=self.ledger,
            unsent_state=composition.unsent_weights
            or any(part.uses_unsent_statistics for part in self.parts.values()),
            per_patient=self.folder.cases_of_patients("training"),
            identities=lambda: case_identities(self.folder, "training", self.ledger),
        )
        self.training = local_training(self, self.guard, loop, script.criterion)
        settled = self.training.private or isinstance(self.training, LoopTraining)
        self._precision_is_open = self.config.precision == "auto" and not settled
        # With noise, the guard would keep back that a deviation is 0.
        self.shows_statistics = composition.needs_statistics and not self.policy.adds_noise
        self.memory.network_is_new()
        self._apply_once(self.memory.once)

    def planned_run(self, planned: dict[str, Any]) -> RunConfig:
        """The run with what the server has planned, or the training of the job's pilot that it names.

        Raises:
            ConfigError: for settings that are none of a plan or a pilot, or impossible.
        """
        if not planned or planned == self._planned:
            return self.config
        if self._job.pilot:
            return pilot_training(self._job, planned)
        check_keys("planned:", planned, PLANNED)
        return RunConfig.from_dict({**self.config.to_dict(), **planned, "planning": {}})

    def take_plan(self, planned: dict[str, Any]) -> bool:
        """Take in what the server has planned; whether it is another run now, to be opened anew.

        Raises:
            ConfigError: see `planned_run`.
        """
        config = self.planned_run(planned)
        if config is self.config:
            return False
        self.config, self._planned = config, planned
        return True

    def prepare(self) -> Reply:
        """The number of samples, and what the methods exchange before training.

        An unseen site contributes nothing, since its images are only for testing.

        Returns:
            With the ``metrics`` ``cases`` (their number by split), ``input`` (see `SiteSamples.summary`),
            ``description`` (see `PrivacyGuard.description`) and, where it is known, ``spacing``.
        """
        reply = Reply(PREPARE)
        if self.trains and self.memory.sent is not None:
            # Asked again after a restart: the same answer, without reading the images again.
            reply.payload = self.memory.sent
        elif self.trains:
            for name, part in self.parts.items():
                for exchange in (part.before_training, part.every_round):
                    if exchange is not None:
                        self.guard.check(name, exchange)
            self.training.try_out(self._samples)
            for name, part in self.parts.items():
                if (exchange := part.before_training) is not None:
                    self.guard.observe(name, exchange)
                    reply.payload.update(namespaced(self.guard.collect(name, exchange), name))
            self.memory.sent = reply.payload
            if self.saves_each_round:
                self.save()
        reply.num_samples = self.training.count(self._samples) if self.trains else 0
        reply.metrics = {
            "cases": {split: len(cases) for split, cases in self.folder.cases.items()},
            "input": self._samples.summary(statistics=self.trains and self.shows_statistics),
        }
        if self.trains and (spacing := site_spacing(self.folder, self.guard)):
            reply.metrics[SPACING] = spacing
        shown = "training" if self.trains else "test"
        reply.metrics[DESCRIPTION] = self.guard.description(self.folder.cases_of_patients(shown))
        return reply

    def start_round(
        self,
        round_: int,
        weights: dict[str, Tensor],
        payload: Payload | None = None,
        once: Payload | None = None,
    ) -> None:
        """Restore what the site kept after its last round, and load what it received for this one.

        Args:
            round_: its number, from 1.
            weights: see `receive`.
            payload: see there.
            once: see there.
        """
        self.round = round_
        self._recall_latest(round_ - 1)
        self.receive(weights, payload, once)

    def with_frozen(self, request: Request) -> Request:
        """Return a request with the whole model: what no site trains came once, with an earlier one.

        Raises:
            MedFedAugError: where the site has lost these entries. The server sends them again to a site that
                did not answer.
        """
        if not request.frozen or request.task not in (TRAIN, VALIDATE, TEST):
            return request
        found = own_entries(request.once or self.memory.once, FROZEN)
        if not all(isinstance(value, Tensor) for value in found.values()):
            raise MedFedAugError(f"site {self.name}: refused what the server sent: an entry is no tensor")
        # What the site has was hashed when it came, and is kept once it is checked.
        known = entries_hash(namespaced(found, FROZEN)) if request.once else self.memory.frozen
        if known != request.frozen:
            raise MedFedAugError(
                f"site {self.name}: the entries that no site trains are not here (was the site started again "
                "without its state?); the server sends them again with the next round"
            )
        return replace(request, weights={**found, **request.weights})

    def receive(self, weights: Any, payload: Payload | None = None, once: Payload | None = None) -> None:
        """See `SiteModel.receive`; what was exchanged before training is kept."""
        super().receive(weights, payload, once)
        if self.save_every and (weights or payload):
            self._request = digest(weights or {}, payload or {})

    def _apply_once(self, once: Payload) -> None:
        self.memory.take_once(once)
        initial = own_entries(once, INITIAL)
        if initial and not self.memory.begun:  # later the site has weights of its own
            self.network.load_state_dict(initial, strict=False)
        super()._apply_once(once)

    def train(self, round_: int, should_stop: Callable[[], bool] | None = None) -> Reply:
        """Train for the local epochs of one round, from the weights that were received.

        Args:
            round_: its number, from 1.
            should_stop: called before every step; returns whether training is to end early.

        Returns:
            The update: the shared entries that are trained, as float32, and the methods' exchange.

        Raises:
            MedFedAugError: when the loss is no longer finite, or the training was stopped.
        """
        if self.config.loop and not isinstance(self.training, LoopTraining):
            raise MedFedAugError(f"site {self.name}: nothing here runs the loop {self.config.loop}")
        self.round = round_
        if self._precision_is_open:
            self._choose_precision()
        self._recall_latest(round_ - 1)
        half = self._half_round(round_)
        if half.found:  # what it releases was made, and entered in the ledger, when it began
            self.guard.take_pending(half.beside["pending"])
        else:
            for name, part in self.parts.items():
                if part.every_round is not None:
                    self.guard.observe(name, part.every_round)
            half.beside = {"pending": self.guard.pending()}
        self._personalise()
        before = self._loss_that_leaves()
        self.memory.present = -1
        seed = derive_seed(self.config.seed, self.name, round_)
        stop = should_stop or (lambda: False)
        collected: Payload = {}
        with self.training.own_random_numbers(seed):
            for part in self.parts.values():
                part.start_round()
            losses = self.training.run(
                self.training.batches(self._samples, self.training_dataset(seed), seed),
                LocalRound.of(self.config, round_, seed),
                lambda: self._aborted or stop(),
                half,
            )
            for part in self.parts.values():
                part.end_round()
            # Also with the round's random numbers, since a method may draw what it sends.
            for name, part in self.parts.items():
                if part.every_round is not None:
                    collected.update(namespaced(self.guard.collect(name, part.every_round), name))
        self.last_loss = sum(losses) / len(losses) if losses else None  # a script may keep its own to itself
        self.last_metrics = self._metrics(before)
        # Last, since a method's state may change when it summarises the round.
        self.memory.remember(round_, LocalState.of(self.network, self.kept_keys, self.parts))
        if self.saves_each_round:
            self.save()
        self.continued = half.steps_before
        half.discard()
        return self._update(round_, collected)

    def _choose_precision(self) -> None:
        """Compute in bfloat16 from here on where the run's network is faster so on this machine."""
        self._precision_is_open = False
        with self.training.own_random_numbers(derive_seed(self.config.seed, self.name, "precision")):
            batch = self._samples.noise_batch(self.config.batch_size, self.config.seed)
            inputs, targets = on_device(batch, self.device)
            network = channels_last(self.composition.definition.network().to(self.device)).train()
            criterion = DeepSupervision(network).criterion(self.task.loss)
            gain = bfloat16_speedup(network, inputs, targets, criterion)
        faster = gain >= _LEAST_GAIN
        if faster:
            run_in_bfloat16(self.network)
        chosen = "bfloat16" if faster else "float32"
        reason = f"a step in bfloat16 takes {1 / gain:.2f} of one in float32"
        warn(f"precision auto: {chosen}, since {reason}", site=self.name)

    def _metrics(self, before: float | None) -> dict[str, Any]:
        loss = self.last_loss if self.release_loss is None else before
        found: dict[str, Any] = {} if loss is None else {"train_loss": loss}
        for name, part in self.parts.items():
            if not self.training.private:
                found.update({f"{name}/{key}": value for key, value in part.metrics().items()})
        return {**found, **self.guard.metrics()}

    def _loss_that_leaves(self) -> float | None:
        """The loss of the model that is about to be trained, where a real site sends one.

        That of the steps would follow from the weights in between, and so in each case from all others.
        """
        hidden = self.training.private or self.composition.sums is not None
        if self.release_loss is None or not self.policy.losses or hidden or self.config.loop:
            return None
        try:
            return self._released_loss("train_loss")
        except PrivacyRefused as error:
            _log.warning("site %s: the update comes without a loss: %s", self.name, error)
            return None

    def training_loss(self, what: str, weights: Payload | None = None) -> float:
        """See `SiteModel.training_loss`; in a real federation what the site lets out of it.

        Raises:
            PrivacyRefused: when that is nothing.
        """
        if self.release_loss is None:
            return super().training_loss(what, weights)
        found = self._released_loss(what, weights)
        if found is None:
            raise PrivacyRefused(self.name, f"no loss leaves ({what}; losses of its privacy policy)")
        return found

    def _released_loss(self, what: str, weights: Payload | None = None) -> float | None:
        assert self.release_loss is not None
        cases, samples = self.folder.cases["training"], self._samples.by_case()
        by_case = {
            case.name: self._mean_loss(own, weights) if len(own) else None
            for case, own in zip(cases, samples, strict=True)
        }
        return self.release_loss(what, self.round, {**self.network.state_dict(), **(weights or {})}, by_case)

    def _update(self, round_: int, collected: Payload) -> Reply:
        state = self.network.state_dict()
        return Reply(
            TRAIN,
            round_,
            weights={key: portable(state[key], self.exchange_device) for key in self.composition.sent},
            payload={key: portable(value, _CPU) for key, value in collected.items()},
            num_samples=self.training.count(self._samples),
            metrics=dict(self.last_metrics),
        )

    def _half_round(self, round_: int) -> HalfRound:
        """The state of a round while it is under way."""
        if not self.save_every or isinstance(self.training, LoopTraining):
            return HalfRound.none()
        begun = (self.memory.run, round_, self.memory.latest(round_ - 1), self._request)
        key = digest(self.name, *begun, self.config.to_dict(), self.policy.to_dict())
        return HalfRound(self.memory.half_file(), self.save_every, key)

    def own_dataset(self, seed: int) -> Dataset[Any]:
        """The site's training samples, transformed and augmented with random draws from ``seed``."""
        return self._samples.dataset(seed)

    def evaluate_round(self, split: str, round_: int, *, full: bool | None = None) -> dict[str, Any]:
        """Score the received model as that of a round, with what the site kept in that round.

        Before a test the model is trained further where a method asks for it.

        Args:
            split: ``"validation"`` or ``"test"``.
            round_: the round that the model is the result of; 0 for the initial model.
            full: whether all metrics are computed; by default for the test only.
        """
        check_choice("split", split, _SPLITS)
        if not self.recall_round(round_):
            # With norm layers that never saw this site's images, a score has no meaning.
            note = "the model needs layers that each site keeps, and this site has none"
            return {self.task.metric: None, "cases": {}, "note": note}
        if split == "test":
            self.fine_tune(round_ + 1)
        return self.evaluate(split, full=split == "test" if full is None else full)

    def fine_tune(self, round_: int) -> None:
        """Train the model further before its test, if a method asks for it, as in one more round."""
        if not (epochs := self.composition.epochs_before_test) or not self.trains:
            return
        self.round, self.memory.present = round_, -1
        seed = derive_seed(self.config.seed, self.name, "fine-tuning")
        with self.training.own_random_numbers(seed):
            for part in self.parts.values():
                part.start_round()
            loader = self.training.batches(self._samples, self.own_dataset(seed), seed)
            once_more = LocalRound.of(self.config, round_, seed, epochs)
            self.training.run(loader, once_more, lambda: self._aborted)

    def abort(self) -> None:
        """Stop training after the current step; nothing of the round is kept."""
        self._aborted = True

    def enter_run(self, run: str) -> None:
        """Load what this site kept in the run, if it took part in it before a restart.

        Raises:
            MedFedAugError: when the name is not valid, or the file is damaged.
        """
        if self.memory.enter(run):
            self._apply_once(self.memory.once)

    def save(self) -> None:
        """Write what this site keeps to ``state_dir``, if there is one."""
        self.memory.save()

    def recall_round(self, round_: int) -> bool:
        """Restore what this site kept with the global model of a round.

        Returns:
            Whether the network is complete; see `SiteModel.recall`.
        """
        latest = self._recall_latest(round_)
        return self._complete(has_own=bool(latest))

    def _recall_latest(self, round_: int) -> int:
        latest = self.memory.latest(round_)
        self._restore(self.memory.recall(latest))
        return latest


def site_fingerprint(trainer: SiteTrainer) -> Payload:
    """Return a site's payload for the plan, through its guard; nothing from one that does not train."""
    if not trainer.trains:
        return {}
    exchange = FingerprintExchange(trainer.folder, trainer.config.classes, trainer.policy.min_images)
    trainer.guard.observe(PLAN, exchange)
    return namespaced(trainer.guard.collect(PLAN, exchange), PLAN)
