"""Contexts of a method: a site, the federation, a step and an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from medfedaug.methods.census import Census
from medfedaug.statistics import ChannelStatistics

if TYPE_CHECKING:
    from medfedaug.tasks import Task

Payload = dict[str, Tensor]
Shapes = Mapping[str, tuple[int | None, ...]]  # None: any length, which `ServerExchange.check` may limit

# The loss of a batch is the sum of weight times the task's loss over these pairs; a mixed batch has several.
Targets = list[tuple[float, Tensor]]

Bounds = Callable[[str], tuple[float, float]]


def _nothing(*_args: Any) -> Any:
    raise RuntimeError("this context has no data")


@dataclass(frozen=True)
class SiteContext:
    """Context of a method at its site.

    Args:
        name: the site's name in the federation.
        network: the site's network, with every method's layers.
        statistics: the site's channel statistics, over ``"image"`` (the default) or ``"foreground"``
            (`medfedaug.data.preparation.preparation.Preparation.moments`).
        num_samples: the number of training samples.
        samples_by_case: the number of training samples of each training case, in their order.
        census: makes what the method sends, and knows the patients behind it.
        cases_with: the training cases, by index, that have annotated a class; ``None`` for all.
        training_images: batches of all training images as the network's input in evaluation: normalised, not
            augmented, on the network's device. Volumes that are cut give the same patches each time.
        case_moments: ``mean`` and ``std``, (C,) each, of every training image, prepared, whole and not
            normalised; over the same voxels as ``statistics``.
        case_batches: for each training case its batches of `training_images`; none for a case without
            training samples.
        training_batches: batches of `training_images` with the targets.
        training_loss: the mean of the task's loss over the training images, in evaluation mode, in the form
            that a method may send: `medfedaug.federation.site.model.SiteModel.training_loss`.
        local_entries: the state-dict entries that stay at the site.
        frozen: the state-dict entries that are not trained (`medfedaug.models.entries`).
        missing_channels: the channels that the site lacks by its own list, 0 in all of its images.
        annotated: the classes, without the background, that some training case of the site has annotated.
        task: loss and form of the targets.
        momentum: of the main optimiser; 0 if it has none.
        optimiser: makes another optimiser like the main one, with the learning rate of the round, for the
            parameters of a method.
        trained: notes parameters that a method trains with an optimiser of its own, in each step alike:
            without a pull, and not by class. Others leave in simulations only.
        round: the number of the current or next round of training, from 1. A site may have missed earlier
            rounds. Fine-tuning before the test counts as the round after the model's.
        rounds: the number of rounds in the run's configuration.
    """

    name: str
    network: nn.Module
    statistics: Callable[..., ChannelStatistics] = _nothing
    num_samples: Callable[[], int] = _nothing
    samples_by_case: Callable[[], Sequence[int]] = tuple
    census: Census = field(default_factory=lambda: Census(()))
    cases_with: Callable[[str], Sequence[int] | None] = lambda name: None
    training_images: Callable[[], Iterable[Tensor]] = _nothing
    case_moments: Callable[..., Iterable[dict[str, Tensor]]] = _nothing
    case_batches: Callable[[], Iterable[Iterable[Tensor]]] = _nothing
    training_batches: Callable[[], Iterable[tuple[Tensor, Tensor]]] = _nothing
    training_loss: Callable[..., float] = _nothing
    local_entries: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()
    missing_channels: tuple[int, ...] = ()
    annotated: Callable[[], Sequence[str]] = _nothing
    task: Task | None = None
    momentum: float = 0.0
    optimiser: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = _nothing
    trained: Callable[[Iterable[Tensor]], Sequence[Tensor]] = list
    round: Callable[[], int] = lambda: 1
    rounds: int = 1

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device


@dataclass(frozen=True)
class ServerContext:
    """Context of a method at the server.

    Args:
        network: the global network with every method's layers, only for names and shapes.
        in_channels: channels of an image.
        local_entries: the state-dict entries that stay at the sites.
        task: form of the targets.
        weights: the weight in the mean of each training site, also of absent ones.
        rounds: the number of rounds in the run's configuration.
    """

    network: nn.Module
    in_channels: int
    local_entries: frozenset[str] = frozenset()
    weights: Callable[[], Mapping[str, float]] = _nothing
    task: Task | None = None
    rounds: int = 1


@dataclass
class Step:
    """Context of a method in one local training step.

    Args:
        network: the network in training mode.
        inputs: the batch of images, (B, C, *spatial), after `SitePart.mix`.
        targets: the task's targets, before any mixing.
        outputs: the network's output for ``inputs``.
        criterion: the task's loss, of outputs and targets.
        mixed: the targets of ``inputs``, each with its weight.
        patients: the patient of each image, (B,), for `medfedaug.methods.census.Census.by_class`; ``None``
            where the site does not know.
    """

    network: nn.Module
    inputs: Tensor
    targets: Tensor
    outputs: Tensor
    criterion: Callable[[Tensor, Tensor], Tensor] = _nothing
    mixed: Targets = field(default_factory=list)
    patients: Tensor | None = None

    @cached_property
    def task_loss(self) -> Tensor:
        """The loss of ``outputs`` over the targets, with its autograd graph."""
        return self.batch_loss(self.outputs)

    def batch_loss(self, outputs: Tensor) -> Tensor:
        """Return the task's loss of outputs for this batch, over all targets of a mixed batch."""
        pairs = self.mixed or [(1.0, self.targets)]
        return torch.stack([weight * self.criterion(outputs, labels) for weight, labels in pairs]).sum()


@dataclass(frozen=True)
class Contributions:
    """An exchange as a mean over a site's training cases, for a site that sends it with noise.

    The site's guard must know the largest effect of one case. So each element of ``values`` must depend only
    on its own case and on the server's messages. With a network in training mode, normalisation by
    statistics that are never sent, or a range over all cases, one case would change the contributions of
    others.

    Args:
        kinds: for each key one of ``intensity_mean``, ``intensity_std``, ``feature_mean``, ``feature_std``
            (numbers between the site's bounds for that kind) and ``histogram`` (rows of the last axis that
            are not negative and add up to 1).
        values: one payload for each training case, made on demand. NaN marks a case without a contribution,
            which counts as the middle of the bounds.
        through_network: flag for features of the site's network.
    """

    kinds: Mapping[str, str]
    values: Iterable[Payload]
    through_network: bool = False


@dataclass(frozen=True)
class SiteUpdate:
    """Checked update of one site in a round, at the server.

    Args:
        site: the sender.
        round: the number of the round, from 1.
        weights: the shared entries of the site's model.
        payload: the site's payload for this method, under the method's keys.
        weight: the site's weight in the mean: its number of training samples, or 1 if sites weigh the same.
    """

    site: str
    round: int
    weights: Mapping[str, Tensor]
    payload: Payload
    weight: float


@dataclass(frozen=True)
class RoundMean:
    """The result of a round, from which an `Aggregator` computes the new global model.

    Args:
        round: the number of the round, from 1.
        previous: the shared entries of the global model at the beginning of the round.
        mean: the mean of the sites' models, with the weights of `Aggregator.weigh`.
        weights: these weights, for each site with an accepted update.
    """

    round: int
    previous: Mapping[str, Tensor]
    mean: Mapping[str, Tensor]
    weights: Mapping[str, float]


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return the shapes of tensors by name."""
    return {key: tuple(value.shape) for key, value in tensors.items()}


def zeros(shapes: Shapes) -> Payload:
    """Return float64 accumulators of known shapes."""
    return {k: torch.zeros(cast(tuple[int, ...], shape), dtype=torch.float64) for k, shape in shapes.items()}
