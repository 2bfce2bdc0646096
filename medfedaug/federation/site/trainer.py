"""`SiteTrainer`: training of a site's model, with the state that the site keeps between rounds."""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from medfedaug.config.machine import Machine
from medfedaug.config.plan import PLANNED
from medfedaug.config.run import RunConfig, derive_seed, job_hash, learning_rate
from medfedaug.data.base import SiteFolder
from medfedaug.errors import MedFedAugError, PrivacyRefused, warn
from medfedaug.federation.job_folder import COUNTS, SPACING
from medfedaug.federation.messages.initial_weights import INITIAL
from medfedaug.federation.messages.messages import (
    FROZEN,
    NUMBER_OF_SAMPLES,
    PREPARE,
    SCORE,
    TEST,
    TRAIN,
    VALIDATE,
    Reply,
    Request,
    entries_hash,
    namespaced,
    own_entries,
    packed,
    portable,
)
from medfedaug.federation.planning.fingerprint import PLAN, FingerprintExchange, site_spacing
from medfedaug.federation.site.entry_patients import check_contributors, step_weights
from medfedaug.federation.site.guard import Guard, Privacy
from medfedaug.federation.site.local_training import LocalRound, LocalTraining
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.script_components import ScriptComponents
from medfedaug.federation.site.script_training import CustomLoop, LoopTraining, ScriptSession
from medfedaug.federation.site.state import LocalState, RoundMemory
from medfedaug.methods.base import Payload
from medfedaug.methods.census import Contributors
from medfedaug.models.execution import bfloat16_speedup, call_plainly, lay_out, run_in_bfloat16
from medfedaug.models.supervision import DeepSupervision
from medfedaug.sampling import on_device
from medfedaug.statistics import ChannelStatistics
from medfedaug.utils.validation import check_keys

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_LEAST_GAIN = 1.1  # a smaller gain does not justify the loss of precision


class SiteTrainer(SiteModel):
    """A site of the federation: its model, its training, and its kept state.

    The order of calls is `open` and `prepare` once, then `start_round`, `train` and `evaluate` in every
    round. A request brings one model, which is first scored and then trained.

    All random numbers follow from the run's seed, the site's name and the round, so a round gives the same
    weights in any process and after a restart.

    The site's state (local norm layers, state of a method) is stored by round
    (`medfedaug.federation.site.state.RoundMemory`), so that it survives a restart and a repeated round.

    Args:
        state_dir: a folder for the site's state; ``None`` keeps it only in memory.
        privacy: the site's limits of what leaves it, never part of a job; by default none, for simulations,
            in which nothing leaves the machine.

    Attributes:
        exchange_device: the device of an update's weights: the CPU, unless the server is in the same process.
        saves_each_round: whether the site's state is written after each round, or only by the runner.
        training_dataset: makes the training data of a round from its seed; by default `own_dataset`.
        last_loss: the mean loss of the steps of the last round, for the site itself; ``None`` before.
    """

    guard: Guard
    training: LocalTraining

    def __init__(
        self,
        config: RunConfig,
        data: str | Path | SiteFolder | None = None,
        device: str = "auto",
        state_dir: str | Path | None = None,
        privacy: Privacy | None = None,
        threads: int = 0,
        machine: Machine | None = None,
    ) -> None:
        super().__init__(config, data, device, threads=threads, machine=machine)
        self.privacy = privacy or Privacy()
        self.min_patients = self.privacy.min_patients
        self.memory = RoundMemory("", Path(state_dir) if state_dir is not None else None)
        self.exchange_device = _CPU
        self.saves_each_round = True
        self.training_dataset: Callable[[int], Dataset[Any]] = self.own_dataset
        self.loop: CustomLoop | None = None
        self.last_loss: float | None = None
        self._planned: dict[str, Any] = {}
        self._precision_is_open = False

    def open(self, name: str) -> None:
        """Open the data folder and build network, methods, guard and training."""
        self.memory.site = name
        super().open(name)

    def _begin(self) -> None:
        if self.loop is not None and self.trains:
            self.loop.start(ScriptSession(self, self.memory, self._build_around))
        else:
            self._build(ScriptComponents())

    def _build_around(self, script: ScriptComponents) -> LoopTraining:
        """Build network, methods and training with a script's components, in its thread."""
        self._build(script, self.loop)
        assert isinstance(self.training, LoopTraining)
        return self.training

    def _build(self, script: ScriptComponents, loop: CustomLoop | None = None) -> None:
        super()._build(script)
        self.guard = self.privacy.guard(self)
        self.training = self.guard.training(self, script, loop)
        settled = self.training.private or isinstance(self.training, LoopTraining)
        self._precision_is_open = self.config.precision == "auto" and not settled
        if settled:  # Opacus adds hooks for each image's gradient, and a script may compile by itself
            call_plainly(self.network)
        # With noise, constant channels must not be reported.
        self.shows_statistics = self.composition.needs_statistics and not self.guard.adds_noise
        self.memory.present = 0
        self._apply_once(self.memory.once)

    def statistics(self, over: str = "image") -> ChannelStatistics:
        """Return the channel statistics of the site's images, which noise never covers.

        Raises:
            PrivacyRefused: at a site with noise: one patient would move all other images, and every score.
        """
        if self.guard.adds_noise:
            reason = "a method needs the statistics of its images, which leave with noise before training"
            raise PrivacyRefused(self.name, reason)
        return super().statistics(over)

    def take_plan(self, planned: dict[str, Any]) -> bool:
        """Adopt the server's plan; return whether the run has changed and must be opened again."""
        if not planned or planned == self._planned:
            return False
        check_keys("planned:", planned, PLANNED)
        self.config = RunConfig.from_dict({**self.config.to_dict(), **planned, "planning": None})
        self._planned = planned
        return True

    def prepare(self) -> Reply:
        """Return the number of samples and the methods' payload before training; none of an unseen site.

        Returns:
            A reply with the ``metrics`` ``cases`` (number by split), ``input`` (`SiteSamples.summary`),
            ``counts`` (`Guard.counts`) and, if known, ``spacing``.
        """
        reply = Reply(PREPARE)
        if self.trains and self.memory.sent is not None:
            # Repeated after a restart, without reading the images again; it was counted before it was kept.
            reply.payload = self.memory.sent
            reply.contributors = dict.fromkeys(reply.payload, self.census.everyone)
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
            self.entry_patients.note(reply)
            if self.census.strict:  # before it is kept, and sent again after a restart
                check_contributors(self.name, reply.contributors, self.min_patients)
            self.memory.sent = reply.payload
            if self.saves_each_round:
                self.memory.save()
        if self.trains:
            reply.num_samples = self.training.count(self._samples)
            reply.contributors[NUMBER_OF_SAMPLES] = self._of_samples()
        reply.metrics = {
            "cases": {split: len(cases) for split, cases in self.folder.cases.items()},
            "input": self._samples.summary(
                statistics=self.trains and self.shows_statistics, annotated=self._annotated()
            ),
        }
        if self.trains and (spacing := site_spacing(self.folder, self.min_patients, self.guard.collect)):
            reply.metrics[SPACING] = spacing
        split = "training" if self.trains else "test"
        reply.metrics[COUNTS] = self.guard.counts(self.folder.cases_of_patients(split))
        return reply

    def _annotated(self) -> list[str] | None:
        """Return the classes that enough patients have annotated for training; ``None`` for no such list."""
        if not self.folder.partial or self.guard.adds_noise:  # one patient may change the list
            return None
        names = self.folder.annotated("training")
        enough = self.census.flags([self._cases_with(name) for name in names]) if names else ()
        return list(compress(names, enough))

    def start_round(
        self,
        round_: int,
        weights: dict[str, Tensor],
        payload: Payload | None = None,
        once: Payload | None = None,
    ) -> None:
        """Restore the state after the site's last round, and load the received model; see `receive`."""
        self.round = round_
        self._recall_latest(round_ - 1)
        self.receive(weights, payload, once)

    def with_frozen(self, request: Request) -> Request:
        """Return a request with the entries that no site trains, which an earlier request brought."""
        if not request.frozen or request.task not in (TRAIN, VALIDATE, TEST, SCORE):
            return request
        frozen = own_entries(request.once or self.memory.once, FROZEN)
        if not all(isinstance(value, Tensor) for value in frozen.values()):
            raise MedFedAugError(f"site {self.name}: refused what the server sent: an entry is not a tensor")
        # Hashed on arrival.
        known = entries_hash(namespaced(frozen, FROZEN)) if request.once else self.memory.frozen
        if known != request.frozen:
            raise MedFedAugError(
                f"site {self.name}: the entries that no site trains are missing (was the site started again "
                "without its state?); the server sends them again with the next round"
            )
        return replace(request, weights={**frozen, **request.weights})

    def _apply_once(self, once: Payload) -> None:
        self.memory.take_once(once)
        initial = own_entries(once, INITIAL)
        if initial and not self.memory.begun:  # later the site has weights of its own
            self.network.load_state_dict(initial, strict=False)
        super()._apply_once(once)

    def train(self, round_: int, should_stop: Callable[[], bool] | None = None) -> Reply:
        """Train for the local epochs of one round, from the received weights."""
        if self.config.loop and not isinstance(self.training, LoopTraining):
            raise MedFedAugError(f"site {self.name}: this engine does not run the loop {self.config.loop}")
        self.round = round_
        if self._precision_is_open:
            self._choose_precision()
        self._recall_latest(round_ - 1)
        for name, part in self.parts.items():
            if part.every_round is not None:
                self.guard.observe(name, part.every_round)
        self.memory.present = -1
        self.entry_patients.begin()
        self.entry_patients.by_age = self._step_weights
        seed = derive_seed(self.config.seed, self.name, round_)
        collected: Payload = {}
        with self.training.own_random_numbers(seed):
            for part in self.parts.values():
                part.start_round()
            losses = self.training.run(
                self.training.batches(self._samples, self.training_dataset(seed), seed),
                LocalRound.of(self.config, round_, seed),
                should_stop or (lambda: False),
            )
            for part in self.parts.values():
                part.end_round()
            # With the round's random numbers, since a method may draw its payload.
            for name, part in self.parts.items():
                if part.every_round is not None:
                    collected.update(namespaced(self.guard.collect(name, part.every_round), name))
        self.last_loss = sum(losses) / len(losses) if losses else None  # a script may report none
        metrics = self._metrics()
        # Last, since summarising the round may change a method's state.
        self.memory.remember(round_, LocalState.of(self.network, self.kept_keys, self.parts))
        if self.saves_each_round:
            self.memory.save()
        return self._update(round_, collected, metrics)

    def _choose_precision(self) -> None:
        """Switch to bfloat16 if the run's network is faster in it on this machine."""
        self._precision_is_open = False
        with self.training.own_random_numbers(derive_seed(self.config.seed, self.name, "precision")):
            batch = self._samples.noise_batch(self.config.batch_size, self.config.seed)
            inputs, targets = on_device(batch, self.device)
            network = lay_out(self.composition.definition.network().to(self.device)).train()
            criterion = DeepSupervision(network).criterion(self.task.loss)
            gain = bfloat16_speedup(network, inputs, targets, criterion)
        faster = gain >= _LEAST_GAIN
        if faster:
            run_in_bfloat16(self.network)
        precision = "bfloat16" if faster else "float32"
        reason = f"a step in bfloat16 takes {1 / gain:.2f} of one in float32"
        warn(f"precision auto: {precision}, since {reason}", site=self.name)

    def _metrics(self) -> dict[str, Any]:
        loss = self.last_loss
        metrics: dict[str, Any] = {} if loss is None else {"train_loss": loss}
        for name, part in self.parts.items():
            if not self.training.private:
                metrics.update({f"{name}/{key}": value for key, value in part.metrics().items()})
        return {**metrics, **self.guard.metrics()}

    def _update(self, round_: int, collected: Payload, metrics: dict[str, Any]) -> Reply:
        state = self.network.state_dict()
        sent = {key: state[key] for key in self.composition.sent}
        return Reply(
            TRAIN,
            round_,
            weights=packed(sent, self.config.wire, self.exchange_device),
            payload={key: portable(value, _CPU) for key, value in collected.items()},
            num_samples=self.training.count(self._samples),
            metrics=metrics,
            contributors={
                **self.entry_patients.of({**sent, **collected}),
                NUMBER_OF_SAMPLES: self._of_samples(),
            },
        )

    def _of_samples(self) -> Contributors:
        if self.training.private or isinstance(self.training, LoopTraining):
            return self.census.everyone
        return self.census.of_cases(self.training.weights_of_cases(self._samples))

    def own_dataset(self, seed: int) -> Dataset[Any]:
        """Return the site's training samples, transformed and augmented with random draws from ``seed``."""
        return self._samples.dataset(seed)

    def evaluate_round(self, split: str, round_: int, *, full: bool | None = None) -> dict[str, Any]:
        """Score the received model of a round, with the site's state of that round.

        Before a test the model is fine-tuned if a method asks for it.

        Args:
            full: whether all metrics are computed; by default only for the test.
        """
        if not self.recall_round(round_):
            return self.no_scores()
        if split == "test":
            self.fine_tune(round_ + 1)
        return self.evaluate(split, full=split == "test" if full is None else full)

    def no_scores(self) -> dict[str, Any]:
        """Return empty scores with the reason: without the site's own layers, a score has no meaning."""
        note = "the model needs layers that each site keeps, and this site has none"
        return {self.task.metric: None, "cases": {}, "note": note}

    def fine_tune(self, round_: int) -> None:
        """Train the model for one more round before its test, if a method asks for it."""
        if not (epochs := self.composition.epochs_before_test) or not self.trains:
            return
        self.round, self.memory.present = round_, -1
        seed = derive_seed(self.config.seed, self.name, "fine-tuning")
        with self.training.own_random_numbers(seed):
            for part in self.parts.values():
                part.start_round()
            loader = self.training.batches(self._samples, self.own_dataset(seed), seed)
            once_more = LocalRound.of(self.config, round_, seed, epochs)
            self.training.run(loader, once_more)

    def enter_run(self, run: str) -> None:
        """Load the site's state of a run, if it took part before a restart."""
        # A resumed run has more rounds, an evaluation other cases and sites.
        free = ("holdout", "limit", "rounds")
        settings = {k: v for k, v in self.config.to_dict().items() if k not in free}
        if self.memory.enter(run, job_hash(settings)):
            self._apply_once(self.memory.once)

    def _step_weights(self, steps: int) -> list[float] | None:
        """Return the weights of a round's steps in the parameters, by age; ``None`` for equal ones."""
        config, pull = self.config, sum(part.pull for part in self.parts.values())
        if config.optimizer == "bundle":  # its arguments are the site's own choice
            return None
        # Adam scales each gradient to about one, and forgets its direction within a few steps.
        momentum = config.momentum if config.optimizer == "sgd" else 0.0
        rate = learning_rate(config, self.round)
        return step_weights(steps, rate, momentum, config.weight_decay + pull)

    def recall_round(self, round_: int) -> bool:
        """Restore the site's state of a round; return whether the network is complete."""
        latest = self._recall_latest(round_)
        return self._complete(has_own=bool(latest))

    def _recall_latest(self, round_: int) -> int:
        latest = self.memory.latest(round_)
        self._restore(self.memory.recall(latest))
        return latest


def site_fingerprint(trainer: SiteTrainer) -> Payload:
    """Return a site's payload for the plan, through its guard; empty from a site that does not train."""
    if not trainer.trains:
        return {}
    exchange = FingerprintExchange(trainer.folder, trainer.config.classes, trainer.census)
    trainer.guard.observe(PLAN, exchange)
    return namespaced(trainer.guard.collect(PLAN, exchange), PLAN)
