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
    """Context of a method at its site."""

    name: str  #: in the federation
    network: nn.Module  #: the site's network, with every method's layers
    #: The site's channel statistics, over "image" (the default) or "foreground"
    #: (`medfedaug.data.preparation.preparation.Preparation.moments`).
    statistics: Callable[..., ChannelStatistics] = _nothing
    num_samples: Callable[[], int] = _nothing  #: the number of training samples
    #: The number of training samples of each training case, in their order.
    samples_by_case: Callable[[], Sequence[int]] = tuple
    #: Makes what the method sends, and knows the patients behind it.
    census: Census = field(default_factory=lambda: Census(()))
    #: The training cases, by index, that have annotated a class; `None` for all.
    cases_with: Callable[[str], Sequence[int] | None] = lambda name: None
    #: Batches of all training images as the network's input in evaluation: normalised, not augmented, on the
    #: network's device. Volumes that are cut give the same patches each time.
    training_images: Callable[[], Iterable[Tensor]] = _nothing
    #: `mean` and `std`, (C,) each, of every training image, prepared, whole and not normalised; over the same
    #: voxels as `statistics`.
    case_moments: Callable[..., Iterable[dict[str, Tensor]]] = _nothing
    #: For each training case its batches of `training_images`; none for a case without training samples.
    case_batches: Callable[[], Iterable[Iterable[Tensor]]] = _nothing
    #: Batches of `training_images` with the targets.
    training_batches: Callable[[], Iterable[tuple[Tensor, Tensor]]] = _nothing
    #: The mean of the task's loss over the training images, in evaluation mode, in the form that a method may
    #: send: `medfedaug.federation.site.model.SiteModel.training_loss`.
    training_loss: Callable[[], float] = _nothing
    local_entries: frozenset[str] = frozenset()  #: the state-dict entries that stay at the site
    #: The state-dict entries that are not trained (`medfedaug.models.entries`).
    frozen: frozenset[str] = frozenset()
    #: The channels that the site lacks by its own list, 0 in all of its images.
    missing_channels: tuple[int, ...] = ()
    #: The classes, without the background, that some training case of the site has annotated.
    annotated: Callable[[], Sequence[str]] = _nothing
    task: Task | None = None  #: loss and form of the targets
    momentum: float = 0.0  #: of the main optimiser; 0 if it has none
    #: Makes another optimiser like the main one, with the learning rate of the round, for the parameters of a
    #: method.
    optimiser: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = _nothing
    #: Notes parameters that a method trains with an optimiser of its own, in each step alike: without a pull,
    #: and not by class. Others leave in simulations only.
    trained: Callable[[Iterable[Tensor]], Sequence[Tensor]] = list
    #: The number of the current or next round of training, from 1. A site may have missed earlier rounds.
    #: Fine-tuning before the test counts as the round after the model's.
    round: Callable[[], int] = lambda: 1
    rounds: int = 1  #: the number of rounds in the run's configuration

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.network.parameters()).device


@dataclass(frozen=True)
class ServerContext:
    """Context of a method at the server."""

    network: nn.Module  #: the global network with every method's layers, only for names and shapes
    in_channels: int  #: channels of an image
    local_entries: frozenset[str] = frozenset()  #: the state-dict entries that stay at the sites
    #: The weight in the mean of each training site, also of absent ones.
    weights: Callable[[], Mapping[str, float]] = _nothing
    task: Task | None = None  #: form of the targets
    rounds: int = 1  #: the number of rounds in the run's configuration


@dataclass
class Step:
    """Context of a method in one local training step."""

    network: nn.Module  #: the network in training mode
    inputs: Tensor  #: the batch of images, (B, C, *spatial), after `SitePart.mix`
    targets: Tensor  #: the task's targets, before any mixing
    outputs: Tensor  #: the network's output for `inputs`
    criterion: Callable[[Tensor, Tensor], Tensor] = _nothing  #: the task's loss, of outputs and targets
    mixed: Targets = field(default_factory=list)  #: the targets of `inputs`, each with its weight
    #: The patient of each image, (B,), for `medfedaug.methods.census.Census.by_class`; `None` where the site
    #: does not know.
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
    """

    # For each key one of `intensity_mean`, `intensity_std`, `feature_mean`, `feature_std` (numbers between
    # the site's bounds for that kind) and `histogram` (rows of the last axis that are not negative and add up
    # to 1).
    kinds: Mapping[str, str]
    # One payload for each training case, made on demand. NaN marks a case without a contribution, which
    # counts as the middle of the bounds.
    values: Iterable[Payload]
    through_network: bool = False  # flag for features of the site's network


@dataclass(frozen=True)
class SiteUpdate:
    """Checked update of one site in a round, at the server."""

    site: str  # the sender
    round: int  # the number of the round, from 1
    weights: Mapping[str, Tensor]  # the shared entries of the site's model
    payload: Payload  # the site's payload for this method, under the method's keys
    # The site's weight in the mean: its number of training samples, or 1 if sites weigh the same.
    weight: float


@dataclass(frozen=True)
class RoundMean:
    """The result of a round, from which an `Aggregator` computes the new global model."""

    round: int  # the number of the round, from 1
    previous: Mapping[str, Tensor]  # the shared entries of the global model at the beginning of the round
    mean: Mapping[str, Tensor]  # the mean of the sites' models, with the weights of `Aggregator.weigh`
    weights: Mapping[str, float]  # these weights, for each site with an accepted update


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return the shapes of tensors by name."""
    return {key: tuple(value.shape) for key, value in tensors.items()}


def zeros(shapes: Shapes) -> Payload:
    """Return float64 accumulators of known shapes."""
    return {k: torch.zeros(cast(tuple[int, ...], shape), dtype=torch.float64) for k, shape in shapes.items()}
