"""Local training: optimiser steps with the methods' hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any, ClassVar

import torch
from torch import Tensor

from medfedaug.config.run import RunConfig, learning_rate
from medfedaug.errors import MedFedAugError, first_line, warn
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.samples import SiteSamples, TrainingSamples
from medfedaug.methods.base import Step, Targets, overridden
from medfedaug.models.entries import hold_norms
from medfedaug.models.execution import call_plainly
from medfedaug.models.supervision import DeepSupervision
from medfedaug.sampling import TrainingDataset, on_device, prefetch


@dataclass(frozen=True)
class LocalRound:
    """Settings of one round of a site's training."""

    number: int  #: the number of the round, from 1
    epochs: int  #: passes over the site's batches; without effect if `steps` is given
    steps: int
    seed: int
    learning_rate: float  #: the learning rate of the run's optimiser in this round

    @classmethod
    def of(cls, config: RunConfig, number: int, seed: int, epochs: int | None = None) -> LocalRound:
        """Build a round of a run, by default with the run's number of epochs or steps."""
        steps = config.local_steps if epochs is None else 0
        epochs = config.local_epochs if epochs is None else epochs
        return cls(number, epochs, steps, seed, learning_rate(config, number))


class LocalTraining:
    """The training of one site.

    Attributes:
        private: whether only the weights of the training may leave: no loss, duration or metric.
    """

    private: ClassVar[bool] = False

    def __init__(self, model: SiteModel) -> None:
        self.folder, self.network, self.task = model.folder, model.network, model.task
        self.config, self.device, self.parts = model.config, model.device, model.parts
        self.census = model.census
        self._patients: Tensor | None = None  # of the batch's images
        self.frozen, self.definition = model.composition.frozen, model.composition.definition
        self.criterion = DeepSupervision(self.network).criterion(self.task.loss)

    def try_out(self, samples: SiteSamples) -> None:
        """Check that the network can be trained, before any budget is spent."""

    def count(self, samples: SiteSamples) -> int:
        """Return the number of samples that determines the site's weight."""
        if not self.folder.partial:  # also for a script, whose samples may belong to no single case
            return max(1, len(samples.training()))
        return max(1, round(sum(self.weights_of_cases(samples))))

    def weights_of_cases(self, samples: SiteSamples) -> list[float]:
        """Return the part of each training case in `count`; 0 for a case without samples."""
        share = self.config.unlabelled_weight
        pairs = zip(self.folder.cases["training"], samples.by_case(), strict=True)
        return [len(of_case) * (share if case.annotated == () else 1.0) for case, of_case in pairs]

    def batches(self, samples: SiteSamples, dataset: Any, seed: int) -> Iterable[Any]:
        """Return the batches of an epoch."""
        return samples.loader(dataset, seed)

    def run(
        self, loader: Iterable[Any], round_: LocalRound, should_stop: Callable[[], bool] = lambda: False
    ) -> list[float]:
        """Train for a number of epochs, or for a number of steps over as many epochs as needed."""
        trained = [p for p in self.network.parameters() if p.requires_grad]
        optimiser, losses = self.optimiser(trained, round_.number), list[Tensor]()
        self.network.train()
        hold_norms(self.network, self.frozen)
        epochs: Iterable[int] = count() if round_.steps else range(round_.epochs)
        batches = islice((batch for _ in epochs for batch in loader), round_.steps or None)
        dataset = getattr(loader, "dataset", None)
        if isinstance(dataset, TrainingDataset):
            dataset.drawn.clear()
        for batch in prefetch(batches, self.device):
            self.check_stop(should_stop)
            self._patients = self.census.step(_cases(dataset))
            losses.append(self._take_step(optimiser, *on_device(batch, self.device)))
        return self.values(losses)

    def _take_step(self, optimiser: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = list(self.parts.values())
        # Copying the random state at every step would make a GPU wait.
        goes_back = any(overridden(part, ["gradients"]) for part in parts)
        mixed: Targets = [(1.0, targets)]
        for part in parts:
            inputs, mixed = part.mix(inputs, mixed)
        random = _random_state(self.device) if goes_back else ()
        step, loss = self._backward(inputs, targets, mixed)
        if goes_back:
            again = partial(self._backward_again, inputs, targets, mixed, random)
            for part in parts:
                part.gradients(step, again)
        for part in parts:
            part.before_step(step)
        optimiser.step()
        for part in parts:
            part.after_step(step)
        return loss

    def check_stop(self, should_stop: Callable[[], bool]) -> None:
        """Raise if the training has to end early: part of a round is not an update."""
        if should_stop():
            raise MedFedAugError(f"site {self.folder.name}: the training was stopped")

    def values(self, losses: list[Tensor]) -> list[float]:
        """Return the losses of a round as finite numbers; read only here, since reading waits for the GPU."""
        values: list[float] = torch.stack(losses).tolist() if losses else []
        bad = next((value for value in values if not math.isfinite(value)), None)
        if bad is not None:
            raise MedFedAugError(
                f"site {self.folder.name}: the training loss is {bad}; lower the learning rate or "
                "look for odd intensities"
            )
        return values

    @contextmanager
    def own_random_numbers(self, seed: int | None = None) -> Iterator[None]:
        """Restore torch's random state on exit; seed it on entry if a seed is given."""
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            if seed is not None:
                # `torch.manual_seed` also records it for unused devices, with a stack trace each.
                torch.default_generator.manual_seed(seed)
            if seed is not None and cuda:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(seed)
            yield

    def _backward(self, inputs: Tensor, targets: Tensor, mixed: Targets) -> tuple[Step, Tensor]:
        """Compute the gradients of the whole loss, instead of earlier ones."""
        outputs: Tensor = self.network(inputs)
        if self.census.strict and self._patients is not None and outputs.requires_grad:
            outputs.register_hook(self.census.gradients)
        step = Step(
            self.network, inputs, targets, outputs, self.criterion, mixed=mixed, patients=self._patients
        )
        loss = step.task_loss
        for term in self.terms(step):
            loss = loss + term
        self.network.zero_grad(set_to_none=True)
        try:
            loss.backward()
        except Exception as error:  # PyTorch 2.13 cannot run the compiled backward pass of a padding on a CPU
            if not call_plainly(self.network):
                raise
            warn(f"the network is not compiled: {first_line(error)}", site=self.folder.name)
            return self._backward(inputs, targets, mixed)
        return step, loss.detach()

    def terms(self, step: Step) -> Iterator[Tensor]:
        """Yield the methods' terms of the loss for a batch after its pass."""
        for part in self.parts.values():
            part.after_pass(step)
        for part in self.parts.values():
            term = part.loss(step)
            if term is not None:
                yield term

    def _backward_again(
        self, inputs: Tensor, targets: Tensor, mixed: Targets, random: tuple[Tensor, ...]
    ) -> None:
        """Compute the gradients again at other weights, with the same random numbers; restore the buffers."""
        buffers = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
        with self.own_random_numbers():
            torch.set_rng_state(random[0])
            if len(random) > 1:
                torch.cuda.set_rng_state(random[1], self.device)
            self._backward(inputs, targets, mixed)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def optimiser(self, parameters: Iterable[Tensor], round_: int) -> torch.optim.Optimizer:
        """Return the run's optimiser for some parameters at the beginning of a round."""
        return self.definition.optimiser(parameters, learning_rate(self.config, round_))


def _cases(dataset: Any) -> list[int] | None:
    """Return the case of each sample in the next batch; ``None`` where the site does not know."""
    if not isinstance(dataset, TrainingDataset) or not isinstance(dataset.samples, TrainingSamples):
        return None
    return [dataset.samples.case_of(index) for index in dataset.drawn.popleft()]


def _random_state(device: torch.device) -> tuple[Tensor, ...]:
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return (torch.get_rng_state(), *on_gpu)
