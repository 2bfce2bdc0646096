"""The site's trainer, as MONAI's engine-neutral `ClientAlgo`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from monai.fl.client import ClientAlgo
from monai.fl.utils.constants import ExtraItems, WeightType
from monai.fl.utils.exchange_object import ExchangeObject
from monai.transforms import Compose
from torch.utils.data import Dataset

from medfedaug.config.plan import PLANNED
from medfedaug.config.run import RunConfig, derive_seed
from medfedaug.config.storage import Storage
from medfedaug.data.base import SiteFolder
from medfedaug.data.quality.content_hash import case_identities
from medfedaug.errors import MedFedAugError
from medfedaug.federation.composition import Composition
from medfedaug.federation.initial_weights import INITIAL
from medfedaug.federation.messages import namespaced, own_entries, portable
from medfedaug.federation.planning.fingerprint import PLAN, SPACING, FingerprintExchange, site_spacing
from medfedaug.federation.site.data_folder import open_own_data
from medfedaug.federation.site.interrupted_round import HalfRound, digest
from medfedaug.federation.site.local_training import LocalRound, LocalTraining
from medfedaug.federation.site.privacy_guard import PrivacyGuard
from medfedaug.federation.site.request_checks import check_received
from medfedaug.federation.site.samples import SiteSamples
from medfedaug.federation.site.script_components import Brought, own_or_prepared, own_scores
from medfedaug.federation.site.script_training import Desk, ForeignLoop, LoopTraining
from medfedaug.federation.site.state import RoundMemory
from medfedaug.federation.site.training_mode import local_training
from medfedaug.methods.base import Payload, SiteContext, SitePart
from medfedaug.models.memory_format import channels_last
from medfedaug.models.precision import run_in_bfloat16
from medfedaug.privacy import PrivacyLedger, PrivacyPolicy
from medfedaug.statistics import ChannelStatistics
from medfedaug.tasks import EvaluationCase
from medfedaug.utils.validation import check_choice, check_keys

if TYPE_CHECKING:
    from medfedaug.federation.site.samples import SiteSamples


__all__ = ["SiteTrainer", "site_context", "site_fingerprint"]

_SPLITS = ("validation", "test")
_CPU = torch.device("cpu")


class SiteTrainer(ClientAlgo):
    """A site of the federation, as MONAI's engine-neutral `ClientAlgo`.

    The order of calls is ``initialize`` and ``get_data_stats`` once, then ``train``, ``get_weights`` and
    ``evaluate`` in every round. `ExchangeObject.weights` holds the shared entries of the state dict, and
    `ExchangeObject.statistics` the methods' exchange: under ``"once"`` what was exchanged before training,
    under ``"payload"`` what travels in every round. An object without weights stands for the model that the
    site already has: a request brings one model, which is first scored and then trained.

    All random numbers follow from the run's seed, the site's name and the round, so a round gives the same
    weights in any process and after a restart.

    What the site keeps for itself (local norm layers, a method's own state) is stored by round
    (`medfedaug.federation.site.state.RoundMemory`), so that it survives a restart and a repeated round.

    Args:
        config: the run.
        data: see `medfedaug.federation.resolve_data_folder`, or the site's data if they are already open.
        device: ``"cpu"``, ``"cuda"``, ... or ``"auto"``: CUDA if available.
        state_dir: a folder for what the site keeps; ``None`` keeps it only in memory.
        policy: what the site lets its methods send; never part of a job. ``None`` lets everything pass, for
            simulations, in which nothing leaves the machine.
        ledger: the file of the site's account of what it has released and spent, over all jobs.
        threads: CPU threads; 0 leaves PyTorch's choice.
        storage: where the site keeps its prepared images.
        statistics: of the site, in place of those of its images.
        save_every: minutes of a round's training after which its state is written, so that a restart goes on
            from there; 0 for never.

    Attributes:
        exchange_device: the device of an update's weights: the CPU, unless the server is in the same process.
        saves_each_round: whether the site's state is written after each round, or only when `save` is called.
        training_dataset: makes the training data of a round from its seed; by default `own_dataset`.
        loop: a script whose loop trains in the place of the federation's; ``None`` for the federation's.
        round: the number of the current or next round of training.
        continued: the steps of the last round that an earlier process of the site took; 0 for none.
        samples: the site's samples, made by `initialize`; ``None`` before.
    """

    def __init__(
        self,
        config: RunConfig,
        data: str | Path | SiteFolder | None = None,
        device: str = "auto",
        state_dir: str | Path | None = None,
        policy: PrivacyPolicy | None = None,
        ledger: str | Path | None = None,
        threads: int = 0,
        storage: Storage | None = None,
        statistics: ChannelStatistics | None = None,
        save_every: float = 0.0,
    ) -> None:
        self.save_every, self._request = save_every, ""
        self.config, self.data, self.threads = config, data, threads
        self._given_statistics = statistics
        self.storage = storage or Storage()
        self.policy = policy or PrivacyPolicy.of_simulation()
        self.ledger = PrivacyLedger(ledger)
        self.device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        )
        self.name = ""
        self.last_metrics: dict[str, Any] = {}
        self.exchange_device = _CPU
        self.saves_each_round = True
        self.training_dataset: Callable[[int], Dataset] = self.own_dataset
        self.memory = RoundMemory("", Path(state_dir) if state_dir is not None else None)
        self.loop: ForeignLoop | None = None
        self.training: LocalTraining
        self.round = self.continued = 0
        self._brought = Brought()
        self._planned: dict[str, Any] = {}
        self._aborted = False
        self._personal = False  # whether the network was personalised after the model was received
        self._collected: Payload = {}
        self.samples: SiteSamples | None = None

    def initialize(self, extra: dict[str, Any] | None = None) -> None:
        """Open the data folder and build the network with the methods' layers.

        Args:
            extra: ``{ExtraItems.CLIENT_NAME: the site's name}``.

        Raises:
            DataError: when the data cannot be used.
            ConfigError: when methods, network and data cannot be combined.
        """
        self.name = self.memory.site = str((extra or {}).get(ExtraItems.CLIENT_NAME, self.name))
        data = self.data  # given open data have been checked
        self.folder = data if isinstance(data, SiteFolder) else open_own_data(self.name, self.config, data)
        self.trains = self.folder.trains and self.name not in self.config.holdout
        if self.loop is not None and self.trains:
            self.loop.start(Desk(self.folder, self.config.classes, lambda own: self._build(own, self.loop)))
        else:
            self._build(Brought(), None)

    def _build(self, brought: Brought, loop: ForeignLoop | None) -> LocalTraining:
        """Put together network, methods, samples and training; with a script's loop, in its thread."""
        if self.threads:
            torch.set_num_threads(min(self.threads, os.cpu_count() or 1))
        self._brought = brought
        brought.check(self.name, (method["name"] for method in self.config.methods))
        composition = self.composition = Composition(self.config, brought.network)
        self.network = channels_last(composition.network.to(self.device))
        self.task = composition.task()
        self.task.check_site(self.folder)
        self.parts: dict[str, SitePart] = {}
        # After an error everything starts again, except for prepared images, which are still valid.
        samples = own_or_prepared(
            brought.samples,
            *(self.folder, self.task, self.config, self.device, self.parts),
            self.storage,
        )
        if self.samples is not None:
            samples.take_prepared(self.samples)
        self.samples = samples
        context = site_context(self, samples)
        self.parts.update({method.name: method.at_site(context) for method in composition.methods})
        if self.config.precision == "bfloat16":
            run_in_bfloat16(self.network)  # after the methods, whose own hooks on the network see float32
        self.guard = PrivacyGuard(
            self.name,
            self.policy,
            cases=len(self.folder.cases["training"]),
            ledger=self.ledger,
            unsent_state=composition.unsent_weights
            or any(part.uses_unsent_statistics for part in self.parts.values()),
            per_patient=self.folder.cases_of_patients("training"),
            identities=lambda: case_identities(self.folder, "training"),
        )
        place = (self.folder, self.network, self.task, self.config, self.device, self.parts)
        more = (composition.frozen, composition.definition)
        self.training = local_training(
            *(self.guard, composition.methods, place, self.storage.ahead, more),
            *(loop, brought.criterion),
        )
        # With noise, the guard would keep back that a deviation is 0.
        self.shows_statistics = composition.needs_statistics and not self.policy.adds_noise
        self.kept_keys, self.shared = composition.kept_keys, composition.shared
        self.memory.network_is_new()
        self._apply_once(self.memory.once)
        return self.training

    def statistics(self, over: str = "image") -> ChannelStatistics:
        """The site's channel statistics; see `SiteSamples.statistics`."""
        given = self._given_statistics or self._brought.statistics
        return given or self._samples.statistics(over)

    @property
    def _samples(self) -> SiteSamples:
        assert self.samples is not None, "initialize comes first"
        return self.samples

    def take_plan(self, planned: dict[str, Any]) -> bool:
        """Take in what the server has planned; whether it is another run now, to be initialised anew.

        Raises:
            ConfigError: for settings that are none of a plan, or impossible.
        """
        if not planned or planned == self._planned:
            return False
        check_keys("planned:", planned, PLANNED)
        self.config = RunConfig.from_dict({**self.config.to_dict(), **planned, "planning": {}})
        self._planned = planned
        return True

    def get_data_stats(self, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """The number of samples, and what the methods exchange before training.

        An unseen site contributes nothing, since its images are only for testing.
        """
        payload: Payload = {}
        if self.trains and self.memory.sent is not None:
            # Asked again after a restart: the same answer, without reading the images again.
            payload = self.memory.sent
        elif self.trains:
            for name, part in self.parts.items():
                for exchange in (part.before_training, part.every_round):
                    if exchange is not None:
                        self.guard.check(name, exchange)
            self.training.try_out(self._samples)
            for name, part in self.parts.items():
                if (exchange := part.before_training) is not None:
                    self.guard.observe(name, exchange)
                    payload.update(namespaced(self.guard.collect(name, exchange), name))
            self.memory.sent = payload
            if self.saves_each_round:
                self.save()
        return ExchangeObject(
            statistics={
                "payload": payload,
                "num_samples": self.training.count(self._samples) if self.trains else 0,
                "cases": {split: len(cases) for split, cases in self.folder.cases.items()},
                "input": self._samples.told(statistics=self.trains and self.shows_statistics),
                SPACING: site_spacing(self.folder, self.guard) if self.trains else {},
            }
        )

    def train(self, data: ExchangeObject, extra: dict[str, Any] | None = None) -> None:
        """Train for the local epochs of one round, from the weights in ``data``.

        Args:
            data: the global model's shared entries and the methods' exchange; empty for the model that was
                received before.
            extra: ``{"round": r, "should_stop": callable}``.

        Raises:
            MedFedAugError: when the loss is no longer finite, or the training was stopped.
        """
        if self.config.loop and not isinstance(self.training, LoopTraining):
            raise MedFedAugError(f"site {self.name}: nothing here runs the loop {self.config.loop}")
        extra = extra or {}
        round_ = int(extra.get("round", 1))
        self.start_round(round_, data)
        half = self._half_round(round_)
        if half.found:  # what it releases was made, and entered in the ledger, when it began
            self.guard.take_pending(half.beside["pending"])
        else:
            for name, part in self.parts.items():
                if part.every_round is not None:
                    self.guard.observe(name, part.every_round)
            half.beside = {"pending": self.guard.pending()}
        self._personalise()
        self.memory.present = -1
        seed = derive_seed(self.config.seed, self.name, round_)
        stop = extra.get("should_stop") or (lambda: False)
        with self.training.own_random_numbers():
            torch.manual_seed(seed)
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
            self._collected = {}
            for name, part in self.parts.items():
                if part.every_round is not None:
                    self._collected.update(namespaced(self.guard.collect(name, part.every_round), name))
        self.last_metrics = {"samples": self.training.count(self._samples)}
        if losses:  # a script may keep its own to itself
            self.last_metrics["train_loss"] = sum(losses) / len(losses)
        for name, part in self.parts.items():
            if not self.training.private:
                self.last_metrics.update({f"{name}/{key}": value for key, value in part.metrics().items()})
        self.last_metrics.update(self.guard.metrics())
        # Last, since a method's state may change when it summarises the round.
        self.memory.remember(round_, self.network, self.kept_keys, self.parts)
        if self.saves_each_round:
            self.save()
        self.continued = half.steps_before
        half.discard()

    def _half_round(self, round_: int) -> HalfRound:
        """What is kept of a round while it is under way."""
        if not self.save_every or isinstance(self.training, LoopTraining):
            return HalfRound.none()
        begun = (self.memory.run, round_, self.memory.latest(round_ - 1), self._request)
        key = digest(self.name, *begun, self.config.to_dict(), self.policy.to_dict())
        return HalfRound(self.memory.half_file(), self.save_every, key)

    def start_round(self, round_: int, data: ExchangeObject) -> None:
        """Restore what the site kept after its last round, and load what it received for this one."""
        self.round = round_
        self._recall(self.memory.latest(round_ - 1))
        self.receive(data)

    def own_dataset(self, seed: int) -> Dataset:
        """The site's training samples, transformed and augmented with random draws from ``seed``."""
        return self._samples.dataset(seed)

    def get_weights(self, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """The local model's shared entries, but for frozen ones, and the methods' exchange, as float32."""
        state = self.network.state_dict()
        return ExchangeObject(
            weights={key: portable(state[key], self.exchange_device) for key in self.composition.sent},
            weight_type=WeightType.WEIGHTS,
            metrics=dict(self.last_metrics),
            statistics={"payload": {key: portable(value, _CPU) for key, value in self._collected.items()}},
        )

    def evaluate(self, data: ExchangeObject, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """Score the global model in ``data`` on ``extra["split"]``, ``"validation"`` or ``"test"``.

        Args:
            data: the global model; empty for the model that was received before.
            extra: the split; under ``"round"`` the round that the model is the result of, whose entries of
                the site are then restored; under ``"full"`` whether all metrics are computed, which is the
                default for the test only.
        """
        extra = extra or {}
        split = str(extra.get("split", "test"))
        check_choice("split", split, _SPLITS)
        self.receive(data)
        round_ = int(extra.get("round", 0))
        if not self.recall_round(round_):
            # With norm layers that never saw this site's images, a score has no meaning.
            note = "the model needs layers that each site keeps, and this site has none"
            return ExchangeObject(metrics={self.task.metric: None, "cases": {}, "note": note})
        if split == "test":
            self.fine_tune(round_ + 1)
        full = bool(extra.get("full", split == "test"))
        with self.scoring():
            if (own := self._brought.score) is None:
                return ExchangeObject(metrics=self.score(self._samples.evaluation(split), full))
            found = own_scores(own, self.network, self.folder, split, self.task.metric)
            return ExchangeObject(metrics=found)

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Within it the network is the one that the methods score and predict with at this site."""
        with ExitStack() as contexts:
            for part in self.parts.values():
                contexts.enter_context(part.scoring())
            yield

    def score(self, cases: Iterable[EvaluationCase], full: bool = False) -> dict[str, Any]:
        """Score the network as it is."""
        transform, size = self.evaluation_transform(), self.config.batch_size
        return self.task.evaluate(self.network, cases, transform, self.device, size, full)

    def pass_own_images(self) -> None:
        """Run the network over the images that the site has to go by: see `SiteContext`."""
        split = "training" if self.folder.cases["training"] else "test"
        cases = self.task.evaluation_cases(self.folder, split, labelled=False)
        transform, size = self.evaluation_transform(), self.config.batch_size
        self.network.eval()
        for _ in self.task.outputs(self.network, cases, transform, self.device, size):
            pass  # what the layers see on the way is all that is asked for

    def fine_tune(self, round_: int) -> None:
        """Train the model further before its test, if a method asks for it, as in one more round."""
        if not (epochs := self.composition.epochs_before_test) or not self.trains:
            return
        self.round, self.memory.present = round_, -1
        seed = derive_seed(self.config.seed, self.name, "fine-tuning")
        with self.training.own_random_numbers():
            torch.manual_seed(seed)
            for part in self.parts.values():
                part.start_round()
            loader = self.training.batches(self._samples, self.own_dataset(seed), seed)
            once_more = LocalRound.of(self.config, round_, seed, epochs)
            self.training.run(loader, once_more, lambda: self._aborted)

    def abort(self, extra: dict[str, Any] | None = None) -> None:
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
            Whether the network is complete. It is not if sites keep layers and this site has none.
        """
        latest = self.memory.latest(round_)
        self._recall(latest)
        if self.kept_keys and not latest and not self.complete_network():
            return False
        self._personalise()
        return True

    def _recall(self, round_: int) -> None:
        self._personal &= not self.memory.recall(round_, self.network, self.parts)

    def _personalise(self) -> None:
        if not self._personal:
            for part in self.parts.values():
                part.personalise()
            self._personal = True

    def complete_network(self) -> bool:
        """Load what methods know of kept entries, until a round is recalled. Returns whether that is all."""
        self.memory.set_aside(self.network, self.kept_keys)
        state, known = self.network.state_dict(), {}
        for part in self.parts.values():
            known.update({key: value for key, value in part.stand_ins().items() if key in self.kept_keys})
        self.network.load_state_dict(known, strict=False)
        # Integer entries count batches and have no effect in evaluation.
        return all(key in known for key in self.kept_keys if state[key].is_floating_point())

    def receive(self, data: ExchangeObject) -> None:
        """Load the global model's shared entries, and give each method its payload.

        Raises:
            MedFedAugError: when something of it is not sound; nothing is then loaded.
        """
        check_received(self.name, self.network, self.shared, self.parts, data)
        if self.save_every and (data.weights or (data.statistics or {}).get("payload")):
            self._request = digest(data.weights or {}, (data.statistics or {}).get("payload") or {})
        if data.weights:
            self.network.load_state_dict({key: data.weights[key] for key in self.shared}, strict=False)
            self._personal = False
        received = data.statistics or {}
        if received.get("once"):
            self.memory.once = received["once"]
            self._apply_once(self.memory.once)
        for name, part in self.parts.items():
            payload = own_entries(received.get("payload", {}), name)
            if part.every_round is not None and payload:
                part.every_round.apply(payload)

    def _apply_once(self, once: Payload) -> None:
        initial = own_entries(once, INITIAL)
        if initial and not self.memory.begun:  # later the site has weights of its own
            self.network.load_state_dict(initial, strict=False)
        for name, part in self.parts.items():
            entries = own_entries(once, name)
            if part.before_training is not None and entries:
                part.before_training.apply(entries)

    def evaluation_transform(self) -> Compose:
        """The transforms of an image in evaluation, before the network."""
        return self._samples.transform(training=False)


def site_fingerprint(trainer: SiteTrainer) -> Payload:
    """What a site sends for the plan, through its guard; nothing from one that does not train.

    Raises:
        PrivacyRefused: when the site's policy does not allow it.
    """
    if not trainer.trains:
        return {}
    exchange = FingerprintExchange(trainer.folder, trainer.config.classes)
    trainer.guard.observe(PLAN, exchange)
    return trainer.guard.collect(PLAN, exchange)


def site_context(trainer: SiteTrainer, samples: SiteSamples) -> SiteContext:
    """The context of all methods at a site, which has its network and its samples.

    Args:
        trainer: the site's.
        samples: the site's.
    """
    config, task, composition = trainer.config, trainer.task, trainer.composition
    return SiteContext(
        trainer.name,
        trainer.network,
        statistics=trainer.statistics,
        num_samples=lambda: len(samples.training()),
        samples_by_case=lambda: [len(one) for one in samples.by_case()],
        training_images=lambda: samples.images(samples.training()),
        training_batches=lambda: samples.batches(samples.training()),
        case_moments=samples.case_moments,
        case_landmarks=samples.case_landmarks,
        case_batches=lambda: map(samples.images, samples.by_case()),
        pass_own_images=trainer.pass_own_images,
        kept=composition.kept_keys,
        frozen=composition.frozen,
        missing=trainer.folder.missing_channels,
        task=task,
        momentum=composition.definition.momentum,
        optimiser=lambda parameters: trainer.training.optimiser(parameters, trainer.round),
        round=lambda: trainer.round,
        rounds=config.rounds,
    )
