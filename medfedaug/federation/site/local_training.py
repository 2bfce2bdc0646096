"""Local training: optimiser steps with the methods' hooks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from medfedaug.config.run import RunConfig
from medfedaug.errors import DataError, MedFedAugError
from medfedaug.federation.site.interrupted_round import HalfRound, keeps_order, remaining_batches
from medfedaug.federation.site.samples import SiteSamples
from medfedaug.federation.site.step_graph import Capturing, of_device, why_plain
from medfedaug.methods.base import Step, Targets, overridden
from medfedaug.models.freezing import hold_norms
from medfedaug.models.supervision import DeepSupervision
from medfedaug.sampling.prefetch import on_device, prefetch

if TYPE_CHECKING:
    from medfedaug.federation.site.model import SiteModel


def learning_rate(config: RunConfig, round_: int) -> float:
    """The learning rate of a round (`medfedaug.config.run.RunConfig.schedule`).

    It follows from the round alone, the same at every site whatever its number of steps, so that a run that
    was interrupted goes on as if it had not been. A round after the last one has the rate of the last.

    Example:
        >>> [learning_rate(RunConfig(schedule="poly", rounds=2, learning_rate=1.0), r) for r in (1, 2)]
        [1.0, 0.5358867312681466]
    """
    done = (min(round_, config.rounds) - 1) / config.rounds
    if config.schedule == "poly":
        found: float = config.learning_rate * (1 - done) ** 0.9
        return found
    if config.schedule == "cosine":
        return config.learning_rate * (1 + math.cos(math.pi * done)) / 2
    return config.learning_rate


@dataclass(frozen=True)
class LocalRound:
    """Settings of one round of a site's training.

    Args:
        number: the number of the round, from 1.
        epochs: passes over the site's batches; without effect if ``steps`` is given.
        steps: see `medfedaug.config.run.RunConfig.local_steps`.
        seed: of all that is random in the round at this site: the order of the samples, for one.
        learning_rate: of the run's optimiser in this round.
    """

    number: int
    epochs: int
    steps: int
    seed: int
    learning_rate: float

    @classmethod
    def of(cls, config: RunConfig, number: int, seed: int, epochs: int | None = None) -> LocalRound:
        """A round of a run; of another number of whole epochs where one is given."""
        steps = config.local_steps if epochs is None else 0
        epochs = config.local_epochs if epochs is None else epochs
        return cls(number, epochs, steps, seed, learning_rate(config, number))


class LocalTraining:
    """The training of one site.

    Args:
        model: the site's model: network, task, settings and the methods' site halves.

    Attributes:
        private: whether nothing of the training may leave but the weights: no loss, no time, no metric.
    """

    private: ClassVar[bool] = False
    uncaptured: ClassVar[str] = ""
    """The reason why no step of such a training is captured; empty where some are."""

    def __init__(self, model: SiteModel) -> None:
        self.folder, self.network, self.task, self.config = (
            model.folder,
            model.network,
            model.task,
            model.config,
        )
        self.device, self.parts = model.device, model.parts
        self.ahead = model.machine.ahead
        self.frozen, self.definition = model.composition.frozen, model.composition.definition
        self.criterion = DeepSupervision(self.network).criterion(self.task.loss)
        reason = self.uncaptured or why_plain(self.device, model.composition.methods, self.parts)
        if self.folder.partial:
            reason = reason or "some classes or voxels of its cases are not annotated"
        self.capturing = Capturing("steps", self.folder.name, self.device, model.machine.graphs, reason)

    def try_out(self, samples: SiteSamples) -> None:
        """Check that the network can be trained at all, before any budget is spent for it."""

    def count(self, samples: SiteSamples) -> int:
        """The number that the server weighs the site by."""
        share = self.config.unlabelled_weight
        if share == 1 or not self.folder.partial:
            return len(samples.training())
        counted = zip(self.folder.cases["training"], samples.by_case(), strict=True)
        total = sum(len(own) * (share if case.annotated == () else 1) for case, own in counted)
        return max(1, round(total))

    def batches(self, samples: SiteSamples, dataset: Any, seed: int) -> Iterable[Any]:
        """The batches of an epoch."""
        return samples.loader(dataset, seed)

    def run(
        self,
        loader: Iterable[Any],
        round_: LocalRound,
        should_stop: Callable[[], bool] = lambda: False,
        half: HalfRound | None = None,
    ) -> list[float]:
        """Train for a number of epochs, or for a number of steps over as many epochs as needed."""
        trained = [p for p in self.network.parameters() if p.requires_grad]
        optimiser, parts = self.optimiser(trained, round_.number), list(self.parts.values())
        step = self.capturing.repeated(partial(self._take_step, optimiser), self.parts)
        self.network.train()
        hold_norms(self.network, self.frozen)
        half = half if half is not None and keeps_order(loader) else HalfRound.none()
        roots = {"network": self.network, "parts": dict(self.parts), "optimiser": optimiser}
        if half.found:
            for part in parts:
                part.continue_round()
        losses = half.resume(roots, getattr(loader, "dataset", None), self.device)
        batches = half.numbered(_batches(loader, round_, len(losses)))
        for batch, data in prefetch(batches, self.ahead, self.device):
            self.check_stop(should_stop)
            losses.append(step(*on_device(batch, self.device)))
            half.step(roots, losses, data, self.device)
        return self.values(losses)

    def _take_step(self, optimiser: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = list(self.parts.values())
        # Copying the state of the random numbers at every step would make a GPU wait.
        goes_back = any(overridden(part, ["gradients"]) for part in parts)
        mixed: Targets = [(1.0, targets)]
        for part in parts:
            inputs, mixed = part.mix(inputs, mixed)
        drawn = self._random_state() if goes_back else ()
        step, loss = self._backward(inputs, targets, mixed)
        if goes_back:
            again = partial(self._backward_again, inputs, targets, mixed, drawn)
            for part in parts:
                part.gradients(step, again)
        for part in parts:
            part.before_step(step)
        optimiser.step()
        for part in parts:
            part.after_step(step)
        return loss

    def check_stop(self, should_stop: Callable[[], bool]) -> None:
        """Raise if the training is to end early: half a round is not an update, neither sent nor kept."""
        if should_stop():
            raise MedFedAugError(f"site {self.folder.name}: the training was stopped")

    def values(self, losses: list[Tensor]) -> list[float]:
        """The losses of a round as numbers, before anything of it has been sent or kept.

        They are read only here, since reading a number waits for the GPU.
        """
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
        """A context in which random draws do not change the random numbers outside."""
        cuda = self.device.type == "cuda"
        with torch.random.fork_rng(devices=[self.device] if cuda else []):
            if seed is not None:
                # `torch.manual_seed` also notes it for devices that nobody uses, with a stack trace each.
                torch.default_generator.manual_seed(seed)
            if seed is not None and cuda:
                with torch.cuda.device(self.device):
                    torch.cuda.manual_seed(seed)
            yield

    def _forward(self, inputs: Tensor) -> Tensor:
        try:
            found: Tensor = self.network(inputs)
            return found
        except ValueError as error:
            if len(inputs) > 1:
                raise
            raise DataError(
                f"{self.config.network} cannot be trained with a batch of a single image ({error})",
                site=self.folder.name,
                path=self.folder.path,
                hint="Batch norm needs two values a channel: add training images, or take another norm, "
                'for instance --network-args \'{"norm": "layer"}\'.',
            ) from error

    def _backward(self, inputs: Tensor, targets: Tensor, mixed: Targets) -> tuple[Step, Tensor]:
        """Compute the gradients of the whole loss, in place of earlier ones."""
        outputs = self._forward(inputs)
        step = Step(self.network, inputs, targets, outputs, self.criterion, mixed=mixed)
        loss = step.task_loss
        for term in self.terms(step):
            loss = loss + term
        self.network.zero_grad(set_to_none=True)
        loss.backward()
        return step, loss.detach()

    def terms(self, step: Step) -> Iterator[Tensor]:
        """Yield the methods' terms of the loss, for a batch that has passed through the network."""
        for part in self.parts.values():
            part.after_pass(step)
        for part in self.parts.values():
            term = part.loss(step)
            if term is not None:
                yield term

    def _backward_again(
        self, inputs: Tensor, targets: Tensor, mixed: Targets, drawn: tuple[Tensor, ...]
    ) -> None:
        """Compute the gradients again at other weights, with the same random numbers and the same buffers."""
        buffers = [(buffer, buffer.clone()) for buffer in self.network.buffers()]
        with self.own_random_numbers():
            torch.set_rng_state(drawn[0])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(drawn[1], self.device)
            self._backward(inputs, targets, mixed)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def _random_state(self) -> tuple[Tensor, ...]:
        on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return (torch.get_rng_state(), *on_device)

    def optimiser(self, parameters: Iterable[Tensor], round_: int) -> torch.optim.Optimizer:
        """The run's optimiser for some parameters, as a round begins."""
        made = self.definition.optimiser(parameters, learning_rate(self.config, round_))
        return of_device(made, self.device)


def _batches(loader: Any, round_: LocalRound, done: int) -> Iterator[Any]:
    """The batches of a round, without the first ones that are done."""
    epochs: Iterable[int] = count() if round_.steps else range(round_.epochs)
    batches = remaining_batches(loader, epochs, done) if done else (b for _ in epochs for b in loader)
    return islice(batches, round_.steps - done if round_.steps else None)
