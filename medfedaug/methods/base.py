"""The four extension points through which a method joins a federation.

A method is a small object that describes itself (`Method`). It makes the part that runs at a site
(`SitePart`) and, if something is exchanged, the parts that run at the server (`ServerExchange`).
``methods=[FedRDN(), FedFA(), FedBN()]`` combines what each method contributes:

1. augmentation: `SitePart.transforms`, `SitePart.mix` and `Method.prepare_network`;
2. exchange, once before training or in every round: `SiteExchange` and `ServerExchange`;
3. sharing policy: `Method.local_entries`, `SitePart.personalise` and `SitePart.scoring`, and `Aggregator`,
   which computes the global model from the sites' updates;
4. the local step: `SitePart.loss`, `SitePart.gradients`, `SitePart.before_step` and `SitePart.after_step`.

`Method.requires`, `Method.provides` and `Method.excludes` declare, in the words of `WORDS`, which methods go
together; `medfedaug.methods.compatibility` checks it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from monai.transforms import Transform
from torch import Tensor, nn

from medfedaug.errors import ConfigError
from medfedaug.methods.arguments import checked
from medfedaug.methods.contexts import (
    Bounds,
    Contributions,
    Payload,
    RoundMean,
    ServerContext,
    Shapes,
    SiteContext,
    SiteUpdate,
    Step,
    Targets,
    zeros,
)
from medfedaug.methods.old_names import RefusesOldNames
from medfedaug.models.substitution import trained_entries
from medfedaug.privacy.kinds import (
    FEATURE_MEAN,
    FEATURE_STD,
    HISTOGRAM,
    INTENSITY_MEAN,
    INTENSITY_STD,
    STEPS,
    VARIANCE,
    WEIGHTS,
)
from medfedaug.statistics import ChannelStatistics

if TYPE_CHECKING:
    from medfedaug.data.base import Case

__all__ = [
    "FEATURE_MEAN",
    "FEATURE_STD",
    "HISTOGRAM",
    "INTENSITY_MEAN",
    "INTENSITY_STD",
    "STEPS",
    "STEP_HOOKS",
    "VARIANCE",
    "WEIGHTS",
    "WORDS",
    "Aggregator",
    "Bounds",
    "Contributions",
    "Method",
    "Payload",
    "RoundMean",
    "ServerContext",
    "ServerExchange",
    "Shapes",
    "SiteContext",
    "SiteExchange",
    "SitePart",
    "SiteUpdate",
    "Step",
    "Targets",
    "overridden",
    "shared_parameters",
    "zeros",
]


WORDS: dict[str, str] = {
    "normalised_input": "its transforms normalise the intensities, in place of plain scaling to [0, 1]",
    "global_model": "its `Aggregator` computes the global model, in place of the mean",
    "labels": "each image of a batch has its own labels alone",
    "norm_layers": "the normalisation layers are those of the network",
    "complete_state_dict": "all that is trained, averaged or scored is in the network's state dict",
    "global_start": "the weights from which a site starts are the global model",
    "same_start": "all updates of a round start from the same global model",
    "separate_sites": "the images of each site are at that site alone",
    "averaged_parameters": "of what is trained some is averaged, and does not stay at the sites",
    "averaged_buffers": "running statistics are averaged with the model",
    "exchange": "something is exchanged beside the model",
    "given_shares": "a site's share of the mean is given by the run, not found by a method",
    "compared_steps": "how much of a site's update is used may depend on the other sites' updates",
    "soft_labels": "the loss gets targets as probabilities",
    "complete_labels": "every voxel of a training image has its class annotated",
    "unlabelled_images": "a site learns from images without label maps, too",
    "landmarks": "each sample has the landmarks of its whole image, see `SiteContext.case_landmarks`",
    "several_images": "a batch has several images; with one, the method does nothing, and a warning says so",
    "extra_passes": "its loss runs the network again, after the losses of the other methods",
    "personal_model": "a site is scored with other weights than it sends, or with more than the network has",
    "fixed_rounds": "the number of rounds does not change: a resumed run has as many as it began with",
}
"""The words that methods declare, with their meaning. Two methods cannot be combined where one excludes what
the other requires or provides. A method that excludes a word and requires or provides it too wants to be
the only one. ``method:NAME`` is a word as well: the method of that name provides and excludes it, and a
method that contains that one provides it."""


class SiteExchange(RefusesOldNames, ABC):
    """The site's half of an exchange. A method names its own keys; the federation adds the method's name.

    `collect` returns the payload of the paper. At a site that adds noise (`medfedaug.privacy`), the guard
    uses `contributions` instead, before the training of the round and with the network as received, and
    `privatised` makes the payload from their noisy mean.

    Attributes:
        cases_per_value: the smallest number of images that a sent value summarises; ``None`` for all training
            cases of the site.
        of_losses: whether its values are losses over the training images, which follow from
            `SiteContext.training_loss` alone. A site that lets no loss out refuses it.
    """

    _old = frozenset({"summarises", "summarised"})

    cases_per_value: int | None = None
    of_losses: bool = False

    def fewest_cases(self) -> int | None:
        """Return the number of cases in the value about fewest cases; ``None`` for all training cases."""
        return self.cases_per_value

    def sample(self) -> Sequence[Case] | None:
        """Return the training cases that the payload is about; ``None`` for all."""
        return None

    @abstractmethod
    def collect(self) -> Payload:
        """The payload that the site sends, before training or after the local training of a round."""

    def check(self, payload: Payload) -> None:
        """Check what the server sent, before anything of its message is used; values are finite already.

        Raises:
            ValueError: in a few words, when it cannot come from an honest server.
        """

    @abstractmethod
    def apply(self, payload: Payload) -> None:
        """Use what the server computed from the payloads of all sites."""

    def contributions(self, bounds: Bounds) -> Contributions:
        """Return the contribution of each training case to the payload.

        Args:
            bounds: returns the site's public bounds of a kind, for a method that needs them in advance.

        Raises:
            ConfigError: when noise cannot be added to this exchange.
        """
        raise ConfigError("there is no form of this exchange to which noise could be added")

    def privatised(self, means: Payload, cases: int) -> Payload:
        """Make the payload from the noisy means, and from nothing else of the site's images.

        Args:
            means: the means by the keys of `Contributions.kinds`, within the bounds.
            cases: the number of training cases.
        """
        return means


class ServerExchange(ABC):
    """The server's half of an exchange, which takes one site's payload after the other.

    Nothing of a payload is kept here. The server itself holds the updates of a round until its end, where
    entries have `kinds` and are compared between the sites; with ``compare_sites="statistics"`` it holds the
    payloads alone.

    `accept` is called once per site, with a payload that has the keys and shapes of `shapes`, is finite and
    has passed `check`. Then `result` returns what is sent to every site, and the next `accept` starts again.
    """

    shapes: Shapes
    kinds: Mapping[str, str] = {}
    """The kinds of the values by key: those of `Contributions.kinds`, ``variance``, ``weights`` (anything
    that is trained) or ``steps``. Entries with a kind are compared between the sites before they are used,
    and a site far outside is refused (`medfedaug.federation.server.outlier_checks`)."""
    needed_at_inference: bool = False
    """For an exchange before training: whether the finished model needs its result, which is then kept beside
    the model. The result of an exchange in every round is always kept."""

    weighted: bool = False
    """Flag: the mean that `accept_mean` takes is weighted as that of the models is. Otherwise all sites
    count alike in it."""

    def terms(self, payload: Payload) -> Payload:
        """Return the terms of a payload that sites add up under secure aggregation.

        It is called at the site, and follows from the payload alone.

        Raises:
            ConfigError: when `result` does not follow from sums over the sites; the two are then refused
                together.
        """
        raise ConfigError("what it makes of the sites' values does not follow from their sum")

    def accept_mean(self, means: Payload, sites: int) -> None:
        """Take the means of `terms` over the sites of a round, in the place of `accept` for each of them.

        Args:
            means: float64.
            sites: their number.
        """
        raise NotImplementedError

    def check(self, payload: Payload) -> None:
        """Check values in ways that go beyond their shapes.

        Raises:
            ValueError: when the method cannot use them; the site's update is then refused.
        """

    @abstractmethod
    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Add one site's payload.

        Args:
            site: who sent it.
            payload: the payload, which has passed `check`.
            weight: the site's weight in the average of the models. The method decides whether to use it.
        """

    @abstractmethod
    def result(self) -> Payload:
        """Return the payload for all sites."""

    def summary(self) -> dict[str, Any]:
        """Some numbers about the last result, for ``results.json``."""
        return {}

    def channel_statistics(self) -> dict[str, ChannelStatistics]:
        """The sites' channel statistics, if this exchange is about them."""
        return {}

    def state(self) -> Payload:
        """State that must survive a restart of the server between two rounds, as tensors.

        The federation keeps the last result. Only what later results depend on belongs here.
        """
        return {}

    def restore(self, state: Payload) -> None:
        """Restore what `state` returned."""


class Aggregator(RefusesOldNames, ABC):
    """Computes the new global model, for a method in which it is not the mean of the sites' models.

    It is given everything that is averaged, including running statistics. A method that is defined on
    parameters changes those of `shared_parameters` and takes the rest from the mean.

    In every round `weigh` and `accept` are called once for each update that is used, in the order of arrival,
    and then `result` is called once.
    """

    _old = frozenset({"least_updates"})

    min_updates: int = 1
    """The number of updates that a round needs for the method to be defined."""

    def weigh(self, update: SiteUpdate) -> float:
        """The site's weight in the mean, above 0; by default its usual weight."""
        return update.weight

    def accept(self, update: SiteUpdate) -> None:
        """Called with each site's update when it arrives.

        What a method keeps of it stays in memory until `result`. By default nothing is kept.
        """

    @abstractmethod
    def result(self, round_: RoundMean) -> dict[str, Tensor]:
        """The shared entries of the new global model, float32."""

    def message(self) -> Payload:
        """Return the payload for all sites with the new model, under the method's own keys."""
        return {}

    def summary(self) -> dict[str, Any]:
        """Some numbers about the last round, for ``results.json``."""
        return {}

    def state(self) -> Payload:
        """State that must survive a restart of the server between two rounds, as tensors."""
        return {}

    def restore(self, state: Payload) -> None:
        """Restore what `state` returned."""


STEP_HOOKS = ("mix", "after_pass", "loss", "gradients", "before_step", "after_step")
"""The hooks of `SitePart` that are called in a step of the local training."""


class SitePart(RefusesOldNames):
    """The half of a method that runs at one site. By default no hook does anything."""

    _old = frozenset({"stand_ins"})

    before_training: SiteExchange | None = None
    every_round: SiteExchange | None = None
    uses_unsent_statistics: bool = False
    """Flag: `transforms` uses values that were computed from this site's images and never sent."""

    def transforms(self, *, training: bool) -> Sequence[Transform]:
        """Dictionary transforms for the key ``"image"``, after loading and before batching."""
        return ()

    def personalise(self) -> None:
        """Called when the network has the global weights and those that the site kept, before it is used.

        In a method that provides ``personal_model``, this replaces global weights by the site's own. A second
        call without a new model in between must not change anything.
        """

    def scoring(self) -> AbstractContextManager[None]:
        """A context in which the network is scored on validation or test cases.

        In it a method may give the network weights, or an output, of the site's own. Afterwards the network
        must be as it was: unlike `personalise`, this changes nothing that is trained or sent.
        """
        return nullcontext()

    def start_round(self) -> None:
        """Called before local training starts, with the random numbers of the round."""

    def continue_round(self) -> None:
        """Called after `start_round` where a round goes on from its middle, in a new process.

        Here a method makes the objects that its first step makes. What they hold, and all other tensors,
        numbers and random states in the attributes of this part, is then put back.
        """

    def end_round(self) -> None:
        """Called after local training, when the network has the trained weights."""

    def mix(self, inputs: Tensor, targets: Targets) -> tuple[Tensor, Targets]:
        """Change a batch before it passes through the network.

        Args:
            inputs: (B, C, *spatial).
            targets: pairs of a weight and targets; ``[(1.0, targets)]`` until a method mixes.

        Returns:
            The new inputs and targets; the arguments are not changed.
        """
        return inputs, targets

    def after_pass(self, step: Step) -> None:
        """Called when the network has passed the batch, before any method's `loss`.

        Here a method takes what its hooks on the network saw: later passes are those of other methods. It is
        called again before `loss` is.
        """

    def loss(self, step: Step) -> Tensor | None:
        """A scalar to add to the task's loss; called again if a method takes gradients at other weights."""
        return None

    def gradients(self, step: Step, again: Callable[[], None]) -> None:
        """Replace the gradients of the loss at the network's weights.

        Args:
            step: the step.
            again: computes the gradients again, at the weights that the network has at that moment and with
                the same random numbers. The network's buffers do not change.
        """

    def before_step(self, step: Step) -> None:
        """Called with the final gradients, before the main optimiser steps."""

    def after_step(self, step: Step) -> None:
        """Called after the main optimiser has stepped. A method's own optimisers step here."""

    def metrics(self) -> dict[str, float]:
        """Numbers about the last round of training, for ``results.json``."""
        return {}

    def default_local_entries(self) -> Payload:
        """Return `Method.local_entries` for a site that has none of its own, such as an unseen site.

        A method returns those that it knows from its own exchange, or can compute from the images of the
        site. The network holds the shared entries of the global model. If all missing entries are found, the
        model is complete, and the site is scored.
        """
        return {}

    def state(self) -> Payload:
        """State of the site that must survive from round to round and after a restart, as tensors.

        The trainer keeps the entries of `Method.local_entries`, and the server sends the payload of every
        round again. Neither belongs here.
        """
        return {}

    def restore(self, state: Payload) -> None:
        """Restore what `state` returned, in a site process that has not trained yet."""


class Method(RefusesOldNames):
    """Published method. Its constructor takes JSON-friendly arguments, the paper's hyper-parameters.

    A subclass that declares words of its own adds those of its base class where they hold for it too:
    ``requires = FedFD.requires | {"global_start"}``. A constructor may set them for one object.
    """

    _old = frozenset(
        {
            *("kept_at_site", "contains", "covers_round", "keeps_models", "mixes_labels", "needs_batch"),
            *("needs_global_start", "needs_labels", "needs_landmarks", "needs_norms", "normalises_input"),
            *("outside_entries", "own_weights", "personalises", "plans_rounds", "pools_data"),
            *("replaces_norms", "runs_network_again", "softens_labels", "starts_elsewhere"),
        }
    )

    name: ClassVar[str]
    requires: Set[str] = frozenset()
    """Words of `WORDS` that must hold for the method: no other method may exclude them."""
    provides: Set[str] = frozenset()
    """Words that hold with the method: no other method may exclude them."""
    excludes: Set[str] = frozenset()
    """Words that no other method may require or provide."""
    statistics_over: str | None = "image"
    """The images, ``"image"`` or ``"foreground"``, over which a method that normalises takes the statistics
    that it uses (`Preparation.moments`); ``None``: it uses none."""
    tasks: ClassVar[tuple[str, ...]] = ("segmentation", "classification")
    """The tasks that the method is defined for."""
    dimensions: ClassVar[tuple[int, ...]] = (2, 3)
    """The spatial dimensions of the images that it is defined for."""
    epochs_before_test: int = 0
    """The number of epochs that a site trains the selected model by itself before the test."""
    capturable: ClassVar[bool] = False
    """Flag for a method with `STEP_HOOKS` or layers: each step takes the same operations on the device, so
    that a CUDA graph can repeat them. What changes from step to step are tensors that stay where they are;
    nothing is counted in Python, drawn on the CPU, or chosen by a number of the device."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    def prepare_network(self, network: nn.Module) -> nn.Module:
        """Insert layers; the state-dict keys of the network must not change."""
        return network

    def local_entries(self, network: nn.Module) -> frozenset[str]:
        """Return the state-dict entries that are neither sent nor received, chosen by module type.

        Of an entry with several names, as those of MONAI's DynUNet, any.
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
    """Return those of some hooks in which a part does something."""
    return [hook for hook in hooks if getattr(type(part), hook) is not getattr(SitePart, hook)]


def shared_parameters(context: SiteContext | ServerContext, method: str) -> dict[str, nn.Parameter]:
    """The trainable parameters that are averaged with the model, by name.

    Parameters that are no entries of the state dict are not among them: a method exchanges them by itself.

    Raises:
        ConfigError: when all of them stay at their sites, so that the method has no effect.
    """
    shared = {
        name: parameter
        for name, parameter in trained_entries(context.network).items()
        if name not in context.local_entries
    }
    if not shared:
        raise ConfigError(f"{method} acts on the parameters that are averaged, and all stay at their sites")
    return shared
