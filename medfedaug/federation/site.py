"""The site's trainer: local training, evaluation and the site's half of every exchange."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from monai.data import DataLoader, Dataset
from monai.fl.client import ClientAlgo
from monai.fl.utils.constants import ExtraItems, WeightType
from monai.fl.utils.exchange_object import ExchangeObject
from monai.transforms import Compose, Transform
from monai.utils import convert_to_tensor
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from medfedaug.config import RunConfig, derive_seed
from medfedaug.data.augmentation import TrainingDataset
from medfedaug.data.sites import is_federation, is_site, open_site, site_statistics
from medfedaug.errors import ConfigError, DataError, MedFedAugError
from medfedaug.federation.checkpoint import load_checkpoint, save_checkpoint
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages import PREPARE, TEST, TRAIN, Reply, Request, namespaced, own_entries
from medfedaug.methods.base import IMAGE, LABEL, Payload, SiteContext, SitePart, Step, Targets
from medfedaug.models.precision import run_in_bfloat16
from medfedaug.privacy import PrivacyGuard, PrivacyLedger, PrivacyPolicy
from medfedaug.settings import DATA_VARIABLE
from medfedaug.statistics import ChannelStatistics
from medfedaug.tasks import Sample, make_task

__all__ = ["Site", "SiteTrainer", "resolve_data_folder"]

_SPLITS = ("validation", "test")
_CPU = torch.device("cpu")
# Of what is free on a GPU, training and validation images may take so much: the rest is for the network.
_SHARE_FOR_IMAGES = 0.25

_log = logging.getLogger(__name__)


def resolve_data_folder(site: str, data_dir: str | Path | None = None) -> Path:
    """The folder of a site's data: never from the job, always from the site.

    Args:
        site: the site's name.
        data_dir: the site's folder, or one that holds a folder of the site's name, or that of a benchmark
            (`medfedaug.data.benchmarks`); by default the environment variable ``MEDFEDAUG_DATA``.

    Raises:
        DataError: when neither is there.
    """
    root = data_dir or os.environ.get(DATA_VARIABLE)
    if not root:
        raise DataError(
            "no data folder", site=site, hint=f"Set {DATA_VARIABLE} to the folder with dataset.json."
        )
    if is_federation(Path(root)):
        return Path(root)
    # The more specific first: a folder of sites of images looks like a site with the sites as its classes.
    for folder in (Path(root) / site, Path(root)):
        if folder.is_dir() and is_site(folder):
            return folder
    raise DataError(
        "no data of a site", site=site, path=root, hint=f"{DATA_VARIABLE} names the site's folder."
    )


class SiteTrainer(ClientAlgo):
    """A site of the federation, as MONAI's engine-neutral `ClientAlgo`.

    The order of calls is ``initialize``, ``get_data_stats`` once, then ``train``, ``get_weights`` and
    ``evaluate`` round by round. `ExchangeObject.weights` holds the shared entries of the state dict,
    `ExchangeObject.statistics` the methods' exchange: under ``"once"`` what was gathered before training,
    under ``"payload"`` what travels in every round.

    Everything random follows from the run's seed, the site's name and the round, so that a round gives the
    same weights in any process and after a restart.

    What the site keeps to itself (local norm layers, a method's own state) is remembered by round: of the
    selected one, for the test, of the last one, and of the one before, in case the server has to repeat a
    round. With ``state_dir`` it survives the process.

    Args:
        config: the run.
        data_dir: see `resolve_data_folder`.
        device: ``"cpu"``, ``"cuda"``, ... or ``"auto"``: CUDA where there is one.
        state_dir: a folder for what the site keeps; ``None`` keeps it in memory alone.
        policy: what the site lets its methods send; never part of a job. ``None`` lets everything pass: a
            simulation, in which nothing leaves the machine.
        ledger: the file in which the site keeps what of its privacy budget is spent, over all jobs.

    Attributes:
        exchange_device: where the weights of an update lie; not the CPU only where the server is in the same
            process.
        saves_each_round: whether what is kept is written after each round, or when somebody calls `save`.
        checkpointed: rounds that the server would continue from if it were started again now.
    """

    def __init__(
        self,
        config: RunConfig,
        data_dir: str | Path | None = None,
        device: str = "auto",
        state_dir: str | Path | None = None,
        policy: PrivacyPolicy | None = None,
        ledger: str | Path | None = None,
    ) -> None:
        self.config, self.data_dir = config, data_dir
        self.state_dir = Path(state_dir) if state_dir is not None else None
        self.policy = policy or PrivacyPolicy(min_images=1)
        self.ledger = PrivacyLedger(ledger)
        self.device = torch.device(
            ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        )
        self.name = ""
        self.last_metrics: dict[str, Any] = {}
        self.exchange_device = _CPU
        self.saves_each_round = True
        self.checkpointed: tuple[int, ...] = ()
        self._round = 0
        self._aborted = False
        self._cases: list[list[Sample]] | None = None
        self._validation: list[tuple[str, Tensor, Tensor]] | None = None
        self._statistics: ChannelStatistics | None = None
        self._run = ""
        self._sent: Payload | None = None
        self._once: Payload = {}
        self._collected: Payload = {}
        self._kept: dict[int, _Kept] = {}
        # Bytes of images that may lie on the GPU; on the CPU they are where they belong already.
        self._room = 0.0
        if self.device.type == "cuda":
            self._room = _SHARE_FOR_IMAGES * torch.cuda.mem_get_info(self.device)[0]
        self._present = 0  # the round whose kept state is in the network and in the methods right now

    def initialize(self, extra: dict[str, Any] | None = None) -> None:
        """Open the data folder and build the network with the methods' layers.

        Args:
            extra: ``{ExtraItems.CLIENT_NAME: the site's name}``.

        Raises:
            DataError: when the data cannot be used.
            ConfigError: when methods, network and data do not go together.
        """
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        self.name = str((extra or {}).get(ExtraItems.CLIENT_NAME, self.name))
        self.folder = open_site(
            resolve_data_folder(self.name, self.data_dir), name=self.name, limit=self.config.limit
        )
        channels = self.folder.check_files()
        if channels != self.config.in_channels:
            raise DataError(
                f"images have {channels} channels, the federation expects {self.config.in_channels}",
                site=self.name,
                path=self.folder.path,
            )
        self.trains = self.folder.trains and self.name not in self.config.holdout
        composition = Composition(self.config)
        # Convolutions of slices are a fifth faster this way on CPUs, and more on GPUs with tensor cores.
        network = composition.network.to(self.device)
        self.network = network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.intensity = composition.intensity
        self.task = make_task(self.config, normalised=composition.normalises_input)
        self.task.check_site(self.folder)
        context = SiteContext(
            self.name,
            self.network,
            statistics=self.statistics,
            num_samples=lambda: len(self._training_samples()),
            training_images=lambda: self._images(self._training_samples()),
            training_batches=lambda: self._batches(self._training_samples()),
            case_images=lambda: self.folder.images("training", self.intensity, self.config.image_size),
            case_batches=lambda: map(self._images, self._case_samples()),
            pass_own_images=self._pass_own_images,
            kept=composition.kept_keys,
            task=self.task,
            momentum=self.config.momentum if self.config.optimizer == "sgd" else 0.0,
            round=lambda: self._round,
        )
        self.parts = {method.name: method.at_site(context) for method in composition.methods}
        if self.config.precision == "bfloat16":
            run_in_bfloat16(self.network)  # after the methods, whose own hooks on the network see float32
        self.guard = PrivacyGuard(
            self.name,
            self.policy,
            cases=len(self.folder.cases["training"]),
            ledger=self.ledger,
            unsent_state=bool(composition.kept_keys)
            or any(part.uses_unsent_statistics for part in self.parts.values()),
        )
        self.kept_keys = composition.kept_keys
        self.shared = composition.shared
        self._present = 0
        self._apply_once(self._once)

    def statistics(self) -> ChannelStatistics:
        """The site's channel statistics, computed at the first call."""
        if self._statistics is None:
            self._statistics = site_statistics(self.folder, self.intensity, self.config.image_size)
        return self._statistics

    def get_data_stats(self, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """Before training: how many samples, and what the methods exchange once.

        An unseen site contributes nothing: what it has is for testing.
        """
        payload: Payload = {}
        if self.trains and self._sent is not None:
            payload = self._sent  # asked again after a restart: the same, and no second look at the images
        elif self.trains:
            exchanges = [(name, part.before_training, part.every_round) for name, part in self.parts.items()]
            for name, *both in exchanges:
                for exchange in both:
                    if exchange is not None:
                        self.guard.check(name, exchange)
            for name, exchange, _ in exchanges:
                if exchange is not None:
                    self.guard.observe(name, exchange)
                    payload.update(namespaced(self.guard.collect(name, exchange), name))
            self._sent = payload
            if self.saves_each_round:
                self.save()
        return ExchangeObject(
            statistics={
                "payload": payload,
                "num_samples": len(self._training_samples()) if self.trains else 0,
                "cases": {split: len(cases) for split, cases in self.folder.cases.items()},
            }
        )

    def train(self, data: ExchangeObject, extra: dict[str, Any] | None = None) -> None:
        """Train for the local epochs of one round, from the weights in ``data``.

        Args:
            data: the global model's shared entries and the methods' exchange.
            extra: ``{"round": r, "should_stop": callable}``.

        Raises:
            MedFedAugError: when the loss is not finite any more, or the training was stopped.
        """
        extra = extra or {}
        round_ = self._round = int(extra.get("round", 1))
        self._recall(self._latest(round_ - 1))
        self.receive(data)
        for name, part in self.parts.items():
            if part.every_round is not None:
                self.guard.observe(name, part.every_round)
        self._personalise()
        self._present = -1  # until this training is over, what is in the network belongs to no round
        seed = derive_seed(self.config.seed, self.name, round_)
        with self._own_random_numbers():
            torch.manual_seed(seed)
            for part in self.parts.values():
                part.start_round()
            stop, epochs, steps = extra.get("should_stop"), self.config.local_epochs, self.config.local_steps
            losses = self._train_epochs(seed, stop, epochs, steps)
            for part in self.parts.values():
                part.end_round()
            # Within the round's random numbers too: a method may draw what it sends.
            self._collected = {}
            for name, part in self.parts.items():
                if part.every_round is not None:
                    self._collected.update(namespaced(self.guard.collect(name, part.every_round), name))
        self.last_metrics = {
            "train_loss": sum(losses) / max(len(losses), 1),
            "samples": len(self._training_samples()),
        }
        for name, part in self.parts.items():
            self.last_metrics.update({f"{name}/{key}": value for key, value in part.metrics().items()})
        self.last_metrics.update(self.guard.metrics())
        # Last, since what a method keeps may change when it sums up the round.
        self._remember(round_)

    def _train_epochs(
        self, seed: int, should_stop: Callable[[], bool] | None, epochs: int, steps: int = 0
    ) -> list[float]:
        """So many epochs, or where ``steps`` are given, these, over as many epochs as it takes."""
        loader, optimiser, parts = self._loader(seed), self._optimiser(), list(self.parts.values())
        # Copying the random numbers' state at every step would make a GPU wait for it.
        goes_back = any(type(part).gradients is not SitePart.gradients for part in parts)
        losses: list[Tensor] = []
        self.network.train()
        numbers: Iterable[int] = count() if steps else range(epochs)
        batches = (batch for _ in numbers for batch in loader)
        for batch in islice(batches, steps or None):
            if self._aborted or (should_stop is not None and should_stop()):
                # Half a round is nobody's update: it is neither sent nor kept.
                raise MedFedAugError(f"site {self.name}: the training was stopped")
            inputs = batch[IMAGE].to(self.device, memory_format=torch.channels_last)
            targets = batch[LABEL].to(self.device)
            mixed: Targets = [(1.0, targets)]
            for part in parts:
                inputs, mixed = part.mix(inputs, mixed)
            drawn = self._random_state() if goes_back else ()
            step, loss = self._backward(inputs, targets, mixed)
            losses.append(loss)
            if goes_back:
                again = partial(self._backward_again, inputs, targets, mixed, drawn)
                for part in parts:
                    part.gradients(step, again)
            for part in parts:
                part.before_step(step)
            optimiser.step()
            for part in parts:
                part.after_step(step)
        # Once, since to look at a number is to wait for a GPU; nothing of the round is sent or kept yet.
        values = torch.stack(losses).tolist() if losses else []
        bad = next((value for value in values if not math.isfinite(value)), None)
        if bad is not None:
            raise MedFedAugError(
                f"site {self.name}: the training loss is {bad}; lower the learning rate or "
                "look for odd intensities"
            )
        return values

    def _forward(self, inputs: Tensor) -> Tensor:
        try:
            return self.network(inputs)
        except ValueError as error:
            if len(inputs) > 1:
                raise
            raise DataError(
                f"{self.config.network} cannot be trained with a batch of a single image ({error})",
                site=self.name,
                path=self.folder.path,
                hint="Batch norm needs two values a channel: add training images, or take another norm, "
                'for instance --network-args \'{"norm": "layer"}\'.',
            ) from error

    def _backward(self, inputs: Tensor, targets: Tensor, mixed: Targets) -> tuple[Step, Tensor]:
        """The gradients of the whole loss, in place of those of before."""
        outputs = self._forward(inputs)
        loss = torch.stack([weight * self.task.loss(outputs, labels) for weight, labels in mixed]).sum()
        step = Step(self.network, inputs, targets, outputs, self.task.loss, loss)
        for part in self.parts.values():
            term = part.loss(step)
            if term is not None:
                loss = loss + term
        self.network.zero_grad(set_to_none=True)
        loss.backward()
        return step, loss.detach()

    def _backward_again(
        self, inputs: Tensor, targets: Tensor, mixed: Targets, drawn: tuple[Tensor, ...]
    ) -> None:
        """The same at other weights: with the random numbers of the first pass, and without its traces."""
        buffers = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
        with self._own_random_numbers():
            torch.set_rng_state(drawn[0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(drawn[1], self.device)
            self._backward(inputs, targets, mixed)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def _own_random_numbers(self) -> AbstractContextManager[None]:
        """Within it, what is drawn leaves the random numbers outside alone."""
        return torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else [])

    def _random_state(self) -> tuple[Tensor, ...]:
        on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return (torch.get_rng_state(), *on_device)

    def get_weights(self, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """The local model's shared entries and the methods' exchange after `train`, as float32."""
        state = self.network.state_dict()
        return ExchangeObject(
            weights={key: _portable(state[key], self.exchange_device) for key in self.shared},
            weight_type=WeightType.WEIGHTS,
            metrics=dict(self.last_metrics),
            statistics={"payload": {key: _portable(value, _CPU) for key, value in self._collected.items()}},
        )

    def evaluate(self, data: ExchangeObject, extra: dict[str, Any] | None = None) -> ExchangeObject:
        """Score the global model in ``data`` on ``extra["split"]``, ``"validation"`` or ``"test"``.

        Args:
            data: the global model.
            extra: the split, and under ``"round"`` the round after which the model was made: a site's own
                entries are put in as they were then.
        """
        extra = extra or {}
        split = str(extra.get("split", "test"))
        if split not in _SPLITS:
            raise ConfigError(f"split {split!r} is not known; choose from {', '.join(_SPLITS)}")
        self.receive(data)
        round_ = int(extra.get("round", 0))
        if not self.recall_round(round_):
            # Norm layers that never saw this site's images would give a number without a meaning.
            note = "the model needs layers that each site keeps, and this site has none"
            return ExchangeObject(metrics={self.task.metric: None, "cases": {}, "note": note})
        if split == "test":
            self._fine_tune(round_ + 1)
        if split == "validation":
            if self._validation is None:
                self._validation = [
                    (name, self._placed(image), label)
                    for name, image, label in self.task.evaluation_cases(self.folder, split)
                ]
            cases: Any = self._validation
        else:
            cases = self.task.evaluation_cases(self.folder, split)
        return ExchangeObject(metrics=self._evaluate(cases))

    def _evaluate(self, cases: Iterable[tuple[str, Tensor, Tensor]]) -> dict[str, Any]:
        transform, size = self.evaluation_transform(), self.config.batch_size
        return self.task.evaluate(self.network, cases, transform, self.device, size)

    def _pass_own_images(self) -> None:
        split = "training" if self.folder.cases["training"] else "test"
        self._evaluate(self.task.evaluation_cases(self.folder, split))

    def _fine_tune(self, round_: int) -> None:
        """Train the model that is to be tested further, where a method asks for it, as if in a round more."""
        epochs = max((part.epochs_before_test for part in self.parts.values()), default=0)
        if not epochs or not self.trains:
            return
        self._round, self._present = round_, -1  # what is in the network from here on belongs to no round
        seed = derive_seed(self.config.seed, self.name, "fine-tuning")
        with self._own_random_numbers():
            torch.manual_seed(seed)
            for part in self.parts.values():
                part.start_round()
            self._train_epochs(seed, None, epochs)

    def abort(self, extra: dict[str, Any] | None = None) -> None:
        """Stop training after the current step; nothing of the round is kept."""
        self._aborted = True

    def enter_run(self, run: str) -> None:
        """Find what this site kept in the run, where it took part in it before a restart.

        Args:
            run: see `medfedaug.federation.Request`.

        Raises:
            MedFedAugError: when the name cannot be one, or the file is damaged.
        """
        if run == self._run:
            return
        if not re.fullmatch(r"[0-9a-f]{32}", run):  # it becomes the name of a file
            raise MedFedAugError(f"site {self.name}: {run[:40]!r} is not the identity of a run")
        self._run, self._sent, self._once, self._kept, self._present = run, None, {}, {}, 0
        path = self._state_file()
        if path is None or not path.exists():
            return
        saved = load_checkpoint(path)
        self._sent, self._once = saved["sent"], saved["once"]
        self._kept = {r: _Kept(**kept) for r, kept in saved["rounds"].items()}
        self._apply_once(self._once)

    def forget_rounds(self, selected: int, current: int) -> None:
        """Drop what was kept for rounds that can no longer be asked for."""
        needed = {self._latest(round_) for round_ in (selected, current - 1, *self.checkpointed)}
        self._kept = {r: state for r, state in self._kept.items() if r in needed}

    def _latest(self, round_: int) -> int:
        """The last round, up to the given one, in which this site trained: it may have missed some."""
        return max((r for r in self._kept if r <= round_), default=0)

    def _remember(self, round_: int) -> None:
        state = self.network.state_dict()
        kept = _Kept(
            network={key: _copy(state[key]) for key in self.kept_keys},
            methods={
                name: {key: _copy(value) for key, value in part.state().items()}
                for name, part in self.parts.items()
            },
        )
        self._kept[round_], self._present = kept, round_
        if self.saves_each_round:
            self.save()

    def save(self) -> None:
        """Write what this site keeps to ``state_dir``, where there is one."""
        path = self._state_file()
        if path is not None:
            rounds = {r: vars(kept) for r, kept in self._kept.items()}
            content = {"run": self._run, "sent": self._sent, "once": self._once, "rounds": rounds}
            save_checkpoint(path, content)

    def recall_round(self, round_: int) -> bool:
        """Put back what this site kept with the global model of a round.

        Returns:
            Whether the network is complete: not where sites keep layers, and this one has none.
        """
        latest = self._latest(round_)
        if self.kept_keys and not latest and not self._complete_network():
            return False
        self._recall(latest)
        self._personalise()
        return True

    def _personalise(self) -> None:
        for part in self.parts.values():
            part.personalise()

    def _recall(self, round_: int) -> None:
        """Put back what was kept after a round, where something else is in its place."""
        if not round_ or round_ == self._present:
            return
        kept = self._kept[round_]
        self.network.load_state_dict(kept.network, strict=False)
        for name, part in self.parts.items():
            if kept.methods[name]:
                part.restore(kept.methods[name])
        self._present = round_

    def _complete_network(self) -> bool:
        """Put in what the methods know of the entries that sites keep; whether that is all of them."""
        state, known = self.network.state_dict(), {}
        for part in self.parts.values():
            known.update({key: value for key, value in part.stand_ins().items() if key in self.kept_keys})
        self.network.load_state_dict(known, strict=False)
        # Integers count batches: no number in evaluation depends on them.
        return all(key in known for key in self.kept_keys if state[key].is_floating_point())

    def _state_file(self) -> Path | None:
        return self.state_dir / f"{self._run}.pt" if self.state_dir is not None and self._run else None

    def receive(self, data: ExchangeObject) -> None:
        """Load the global model's shared entries and hand the methods what is theirs."""
        if data.weights:
            missing = sorted(set(self.shared) - set(data.weights))
            if missing:
                raise MedFedAugError(f"site {self.name}: the global model lacks {missing[0]}")
            self.network.load_state_dict({key: data.weights[key] for key in self.shared}, strict=False)
        received = data.statistics or {}
        if received.get("once"):
            self._once = received["once"]
            self._apply_once(self._once)
        for name, part in self.parts.items():
            payload = own_entries(received.get("payload", {}), name)
            if part.every_round is not None and payload:
                part.every_round.apply(payload)

    def _apply_once(self, once: Payload) -> None:
        for name, part in self.parts.items():
            entries = own_entries(once, name)
            if part.before_training is not None and entries:
                part.before_training.apply(entries)

    def evaluation_transform(self) -> Compose:
        """What an image passes before the network sees it, in evaluation."""
        return self._transform(training=False)

    def _transform(self, *, training: bool) -> Compose:
        return Compose([*self.task.transforms(), *self._method_transforms(training)])

    def _method_transforms(self, training: bool) -> list[Transform]:
        return [t for part in self.parts.values() for t in part.transforms(training=training)]

    def _case_samples(self) -> list[list[Sample]]:
        if self._cases is None:
            cases = list(self.task.case_samples(self.folder))
            self._cases = [self._near(samples) for samples in cases]
        return self._cases

    def _near(self, samples: list[Sample]) -> list[Sample]:
        """The samples, on the GPU while there is room."""
        return [{key: self._placed(value) for key, value in sample.items()} for sample in samples]

    def _placed(self, value: Tensor) -> Tensor:
        if value.nbytes > self._room:
            return value
        self._room -= value.nbytes
        return value.to(self.device)

    def _training_samples(self) -> list[Sample]:
        return [sample for samples in self._case_samples() for sample in samples]

    def _images(self, samples: Sequence[Sample]) -> Iterator[Tensor]:
        return (inputs for inputs, _ in self._batches(samples))

    def _batches(self, samples: Sequence[Sample]) -> Iterator[tuple[Tensor, Tensor]]:
        dataset = Dataset(samples, self._transform(training=False))
        for batch in DataLoader(dataset, batch_size=self.config.batch_size, collate_fn=self.task.collate):
            inputs = batch[IMAGE].to(self.device, memory_format=torch.channels_last)
            yield inputs, batch[LABEL].to(self.device)

    def _training_dataset(self, seed: int) -> TorchDataset:
        return TrainingDataset(
            self._training_samples(),
            Compose(self.task.transforms()),
            self.task.augmentation(),
            Compose(self._method_transforms(training=True)),
            seed,
        )

    def _loader(self, seed: int) -> DataLoader:
        dataset: Any = self._training_dataset(seed)
        return DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            shuffle=True,
            # One image left over makes no batch: batch norm over feature vectors has no variance then.
            drop_last=len(dataset) > self.config.batch_size and len(dataset) % self.config.batch_size == 1,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=self.task.collate,
            num_workers=0,
        )

    def _optimiser(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.network.parameters() if p.requires_grad]
        rate, decay = self.config.learning_rate, self.config.weight_decay
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=rate, momentum=self.config.momentum, weight_decay=decay)
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay)


def _portable(value: Tensor, device: torch.device) -> Tensor:
    """A float32 copy, laid out as any engine expects it."""
    plain = convert_to_tensor(value.detach(), track_meta=False)
    return plain.to(device, torch.float32).clone(memory_format=torch.contiguous_format)


def _copy(value: Tensor) -> Tensor:
    return value.detach().cpu().clone()


@dataclass
class _Kept:
    """What a site keeps to itself after a round: entries of the network, and the methods' own state."""

    network: dict[str, Tensor]
    methods: dict[str, Payload]


def _reason(error: BaseException) -> BaseException:
    """What a transform raised: MONAI says which one failed, and not why."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


class Site:
    """A site as an engine sees it: a request in, a reply out, whatever happens in between.

    The one place where a request becomes calls of a `ClientAlgo`; every engine uses it, so that all do the
    same. A site's trouble becomes `Reply.error`, one line for the server's log, and never an exception that
    would end the whole federation. After one, the next request begins with a fresh network and what the site
    kept, since nothing can be said of a training that broke off.

    Args:
        name: the site's name in the federation.
        trainer: not yet initialised.
    """

    def __init__(self, name: str, trainer: SiteTrainer) -> None:
        self.name, self.trainer = name, trainer
        self._ready = False

    def answer(self, request: Request, should_stop: Callable[[], bool] | None = None) -> Reply:
        """Do what the server asks.

        Args:
            request: the server's.
            should_stop: asked before every step whether training is to end early.
        """
        try:
            if not self._ready:
                self.trainer.initialize({ExtraItems.CLIENT_NAME: self.name})
                self._ready = True
            self.trainer.enter_run(request.run)
            return self._do(request, should_stop)
        except Exception as error:
            self._ready = False
            if isinstance(error, MedFedAugError):
                return Reply(request.task, request.round, error=str(error))
            _log.exception("site %s: %s failed", self.name, request.task)
            return Reply(request.task, request.round, error=f"site {self.name}: {_reason(error)!r}"[:500])

    def _do(self, request: Request, should_stop: Callable[[], bool] | None) -> Reply:
        trainer, reply, started = self.trainer, Reply(request.task, request.round), time.perf_counter()
        data = ExchangeObject(
            weights=request.weights,
            weight_type=WeightType.WEIGHTS,
            statistics={"once": request.once, "payload": request.payload},
        )
        if request.task == PREPARE:
            statistics = trainer.get_data_stats().statistics or {}
            reply.payload = statistics["payload"]
            reply.num_samples = statistics["num_samples"]
            reply.metrics = {"cases": statistics["cases"]}
        elif request.task == TRAIN:
            trainer.forget_rounds(request.selected_round, request.round)
            # What arrives is the model of the round before; the initial one is untrained.
            if request.round > 1:
                scored = trainer.evaluate(data, {"split": "validation", "round": request.round - 1})
                metric = trainer.task.metric
                reply.metrics[f"val_{metric}"] = (scored.metrics or {})[metric]
            trainer.train(data, {"round": request.round, "should_stop": should_stop})
            update = trainer.get_weights()
            reply.weights = update.weights or {}
            reply.payload = (update.statistics or {})["payload"]
            reply.metrics.update(update.metrics or {})
            reply.num_samples = int(reply.metrics.pop("samples"))
            reply.metrics["seconds"] = time.perf_counter() - started
        else:
            split = "test" if request.task == TEST else "validation"
            reply.metrics = dict(
                trainer.evaluate(data, {"split": split, "round": request.round}).metrics or {}
            )
        return reply
