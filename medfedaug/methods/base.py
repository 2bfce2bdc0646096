"""The four extension points through which a method joins a federation.

A method is a small object that describes itself (`Method`). It makes the part that runs at a site
(`SitePart`) and, if something is exchanged, the parts that run at the server (`ServerExchange`).
``methods=[FedRDN(), FedFA(), FedBN()]`` combines the methods:

1. augmentation: `SitePart.transforms`, `SitePart.mix` and `Method.prepare_network`;
2. exchange, once before training or in every round: `SiteExchange` and `ServerExchange`;
3. sharing policy: `Method.local_entries`, `SitePart.scoring`, and `Aggregator`, which computes the global
   model from the sites' updates;
4. the local step: `SitePart.loss`, `SitePart.gradients`, `SitePart.before_step` and `SitePart.after_step`.

`Method.requires`, `Method.provides` and `Method.excludes` declare, in the words of `WORDS`, which methods go
together; `medfedaug.methods.compatibility` checks them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from monai.transforms import Transform
from torch import Tensor, nn

from medfedaug.errors import WITH_BATCH_NORM, ConfigError
from medfedaug.methods.arguments import checked
from medfedaug.methods.contexts import Bounds as Bounds
from medfedaug.methods.contexts import Contributions as Contributions
from medfedaug.methods.contexts import Payload as Payload
from medfedaug.methods.contexts import RoundMean as RoundMean
from medfedaug.methods.contexts import ServerContext as ServerContext
from medfedaug.methods.contexts import Shapes as Shapes
from medfedaug.methods.contexts import SiteContext as SiteContext
from medfedaug.methods.contexts import SiteUpdate as SiteUpdate
from medfedaug.methods.contexts import Step as Step
from medfedaug.methods.contexts import Targets as Targets
from medfedaug.methods.contexts import zeros as zeros
from medfedaug.models.entries import trained_entries
from medfedaug.statistics import ChannelStatistics

WORDS: dict[str, str] = {
    "normalised_input": "its transforms normalise the intensities, instead of plain scaling to [0, 1]",
    "global_model": "its `Aggregator` computes the global model, instead of the mean",
    "labels": "each image of a batch has only its own labels",
    "norm_layers": "the normalisation layers are the network's",
    "complete_state_dict": "the network's state dict has everything that is trained, averaged or scored",
    "same_start": "all updates of a round start from the same global model",
    "separate_sites": "each site holds only its own images",
    "counted_patients": "a site knows the patients behind every number that it sends",
    "averaged_parameters": "some trained parameters are averaged, and do not stay at the sites",
    "given_shares": "the run, and no method, decides a site's share of the mean",
    "soft_labels": "the loss gets targets as probabilities",
    "complete_labels": "every voxel of a training image has a known class",
    "unlabelled_images": "a site learns from images without label maps, too",
    "several_images": "a batch has several images; with one, the method does nothing, and a warning says so",
    "second_derivatives": "its steps differentiate gradients, which a compiled network does not allow",
    "extra_passes": "its loss runs the network again, after the losses of the other methods",
    "personal_model": "a site is scored with other weights than it sends, or with more than the network has",
    "fixed_rounds": "the number of rounds does not change: a resumed run has as many as it began with",
}
"""The words that methods declare, with their meaning. Two methods cannot be combined if one excludes a word
that the other requires or provides. A method that both excludes and requires or provides a word must be the
only one with it. ``method:NAME`` is a word too: the method of that name provides and excludes it, and a
method that contains this one provides it."""


class SiteExchange(ABC):
    """The site's half of an exchange. A method names its own keys; the federation adds the method's name.

    `collect` returns the payload of the paper. Only a tensor whose patients the site knows leaves a site of a
    real federation: a trained parameter, a running statistic of a batch norm, or a tensor that
    `SiteContext.census` made. Any other tensor leaves in a simulation only.

    At a site that adds noise (`medfedaug.hospital.privacy`), the guard uses `contributions` instead, before
    the training of the round and with the network as received, and `privatised` makes the payload from their
    noisy mean.
    """

    @abstractmethod
    def collect(self) -> Payload:
        """Return the payload for the server, before training or after the local training of a round."""

    def check(self, payload: Payload) -> None:
        """Raise a ValueError with a short reason for a payload that no honest server would send.

        The values are finite; nothing of the message has been used yet.
        """

    @abstractmethod
    def apply(self, payload: Payload) -> None:
        """Use the server's result from the payloads of all sites."""

    def contributions(self, bounds: Bounds) -> Contributions:
        """Return the contribution of each training case to the payload.

        ``bounds`` returns the site's public bounds of a kind, for a method that needs them in advance. By
        default noise cannot be added to this exchange.
        """
        raise ConfigError("noise cannot be added to this exchange")

    def privatised(self, means: Payload, cases: int) -> Payload:
        """Return the payload, made of the noisy means and of no other number from the site's images.

        The means have the keys of `Contributions.kinds`, and are within the bounds; ``cases`` is the number
        of training cases.
        """
        return means


class ServerExchange(ABC):
    """The server's half of an exchange, which takes the sites' payloads one by one.

    It need not keep payloads. The server holds the updates of a round until its end if entries have `kinds`,
    to compare them between the sites.

    The server calls `accept` once per site, with a payload that has the keys and shapes of `shapes`, is
    finite and has passed `check`. Then `result` returns the payload for every site, and the next `accept`
    starts anew.
    """

    shapes: Shapes
    kinds: Mapping[str, str] = {}
    """The kinds of the values by key: a kind of `Contributions.kinds`, ``variance``, ``weights`` (anything
    that is trained) or ``steps``. The server compares entries with a kind between the sites before use, and
    refuses outlying sites (`medfedaug.federation.server.outlier_checks`)."""
    needed_at_inference: bool = False
    """Flag of an exchange before training: the finished model needs the result, and a run keeps it with the
    model. A run always keeps the result of an exchange in every round."""

    weighted: bool = False
    """Flag: the mean for `accept_mean` has the weights of the mean of models; otherwise equal weights."""

    def terms(self, payload: Payload) -> Payload:
        """Return the terms of a payload that sites add up where the server learns only sums.

        The site calls it; the terms follow only from the payload. By default `result` does not follow from
        sums over the sites, and such a run refuses the method.
        """
        raise ConfigError("its result does not follow from the sum of the sites' values")

    def accept_mean(self, means: Payload, sites: int) -> None:
        """Take the float64 means of `terms` over the sites of a round, instead of `accept` for each site."""
        raise NotImplementedError

    def check(self, payload: Payload) -> None:
        """Raise a ValueError with a short reason for values that the method cannot use."""

    @abstractmethod
    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Add one site's payload; ``weight`` is the site's weight in the mean of the models."""

    @abstractmethod
    def result(self) -> Payload:
        """Return the payload for all sites."""

    def summary(self) -> dict[str, Any]:
        """Some numbers about the last result, for ``results.json``."""
        return {}

    def channel_statistics(self) -> dict[str, ChannelStatistics]:
        """The sites' channel statistics, if this exchange sends them."""
        return {}

    def state(self) -> Payload:
        """State that must survive a restart of the server between two rounds, as tensors.

        Later results must depend on it. The federation itself keeps the last result.
        """
        return {}

    def restore(self, state: Payload) -> None:
        """Restore the result of `state`."""


class Aggregator(ABC):
    """Computes the new global model, for a method in which it is not the mean of the sites' models.

    It receives everything that is averaged, including running statistics. A method on parameters changes
    `shared_parameters` and takes the rest from the mean.

    In every round the server calls `weigh` and `accept` once for each accepted update, in the order of
    arrival, and then `result` once.
    """

    min_updates: int = 1
    """The number of updates that a round needs for the method to be defined."""

    def weigh(self, update: SiteUpdate) -> float:
        """The site's weight in the mean, above 0; by default its usual weight."""
        return update.weight

    def accept(self, update: SiteUpdate) -> None:
        """Take each site's update when it arrives; by default keep nothing."""

    @abstractmethod
    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """The shared entries of the new global model, float32."""

    def summary(self) -> dict[str, Any]:
        """Some numbers about the last round, for ``results.json``."""
        return {}

    def state(self) -> Payload:
        """State that must survive a restart of the server between two rounds, as tensors."""
        return {}

    def restore(self, state: Payload) -> None:
        """Restore the result of `state`."""


STEP_HOOKS = ("mix", "after_pass", "loss", "gradients", "before_step", "after_step")
"""The hooks of `SitePart` in a step of the local training."""


class SitePart:
    """The half of a method that runs at one site. By default no hook does anything."""

    before_training: SiteExchange | None = None
    every_round: SiteExchange | None = None
    pull: float = 0.0
    """Strength of a quadratic pull of the parameters to the received model, with which earlier steps fade."""
    uses_unsent_statistics: bool = False
    """Flag: `transforms` uses statistics of this site's images that are never sent."""

    def transforms(self, *, training: bool) -> Sequence[Transform]:
        """Dictionary transforms for the key ``"image"``, after loading and before batching."""
        return ()

    def scoring(self) -> AbstractContextManager[None]:
        """A context for scoring the network on validation or test cases.

        A method may give the network personal weights, or a personal output, in it. On exit it restores the
        network: nothing changes that is trained or sent.
        """
        return nullcontext()

    def start_round(self) -> None:
        """Called before local training, with the random state of the round."""

    def end_round(self) -> None:
        """Called after local training, when the network has the trained weights."""

    def mix(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        """Return a changed batch, (B, C, *spatial), before it passes through the network.

        Targets are pairs of a weight and targets, ``[(1.0, targets)]`` until a method mixes. The arguments
        stay unchanged.
        """
        return inputs, targets

    def after_pass(self, step: Step) -> None:
        """Called after the network's pass over the batch, before any method's `loss`.

        A method takes the features from its hooks on the network here, since other methods may make passes
        later. If `loss` is called again, so is this hook before it.
        """

    def loss(self, step: Step) -> Tensor | None:
        """Return a scalar to add to the task's loss; called again for gradients at other weights."""
        return None

    def gradients(self, step: Step, again: Callable[[], None]) -> None:
        """Replace the gradients of the loss at the network's weights.

        ``again`` computes the gradients at the network's weights at that moment, with the same random numbers
        and without changing the network's buffers.
        """

    def before_step(self, step: Step) -> None:
        """Called with the final gradients, before the main optimiser steps."""

    def after_step(self, step: Step) -> None:
        """Called after the main optimiser's step; a method's optimisers step here."""

    def metrics(self) -> dict[str, float]:
        """Numbers about the last round of training, for ``results.json``."""
        return {}

    def default_local_entries(self) -> Payload:
        """Return `Method.local_entries` for a site without such entries, as an unseen site.

        A method returns the entries that its exchange sent, or that follow from the site's images. The
        network has the shared entries of the global model. If no entry is missing, the site is scored.
        """
        return {}

    def state(self) -> Payload:
        """State of the site that must survive from round to round and after a restart, as tensors.

        It excludes the entries of `Method.local_entries`, which the trainer keeps, and the payload of every
        round, which the server sends again.
        """
        return {}

    def restore(self, state: Payload) -> None:
        """Restore the result of `state`, in a site process that has not trained yet."""


class Method:
    """Published method. Its constructor takes JSON-friendly arguments, the paper's hyper-parameters.

    A method raises `ConfigError` for an argument outside of the range of its annotation, and for a network or
    task that it cannot be used with. Combinations are checked by `medfedaug.methods.registry.build_methods`.

    A subclass that declares words adds the words of its base class that hold for it too:
    ``requires = FedFD.requires | {"labels"}``. A constructor may set them for one object.
    """

    name: ClassVar[str]
    requires: Set[str] = frozenset()
    """Words of `WORDS` that must hold for the method; no other method may exclude them."""
    provides: Set[str] = frozenset()
    """Words that hold with the method; no other method may exclude them."""
    excludes: Set[str] = frozenset()
    """Words that no other method may require or provide."""
    statistics_over: str | None = "image"
    """The voxels, ``"image"`` or ``"foreground"``, for the statistics of a method that normalises
    (`Preparation.moments`); ``None`` for a method without statistics."""
    tasks: ClassVar[tuple[str, ...]] = ("segmentation", "classification")
    """The tasks of the method."""
    dimensions: ClassVar[tuple[int, ...]] = (2, 3)
    """The spatial dimensions of the images that the method can use."""
    epochs_before_test: int = 0
    """The number of epochs for which a site trains the selected model before the test."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Insert layers; the state-dict keys of the network must not change."""
        return network

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return the state-dict entries that are neither sent nor received, chosen by module type.

        An entry with several names, as in MONAI's DynUNet, may have any of them.
        """
        return frozenset()

    def at_site(self, context: SiteContext) -> SitePart:
        """The part of the method that runs at a site."""
        return SitePart()

    def before_training(self, context: ServerContext) -> ServerExchange | None:
        """The server's half of an exchange before training."""
        return None

    def every_round(self, context: ServerContext) -> ServerExchange | None:
        """The server's half of an exchange in every round."""
        return None

    def aggregator(self, context: ServerContext) -> Aggregator | None:
        """The aggregator that computes the global model, if it is not the mean of the sites' models."""
        return None

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def overridden(part: SitePart, hooks: Sequence[str]) -> list[str]:
    """Return the hooks among `hooks` that a part overrides."""
    return [hook for hook in hooks if getattr(type(part), hook) is not getattr(SitePart, hook)]


def shared_parameters(context: SiteContext | ServerContext, method: str) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that are averaged with the model, by name.

    They exclude parameters that are not entries of the state dict, which a method exchanges by itself. With
    none of them the method would have no effect, and is refused.
    """
    trained = trained_entries(context.network)
    shared = {name: p for name, p in trained.items() if name not in context.local_entries}
    if not shared:
        raise ConfigError(f"{method} acts on the parameters that are averaged, and all stay at their sites")
    return shared


def check_norms(method: str, network: nn.Module, found: Collection[Any], of: str) -> None:
    """Refuse a network without the norm layers that a method needs."""
    if not found:
        raise ConfigError(f"{method}: {type(network).__name__} has no {of}; {WITH_BATCH_NORM}")
