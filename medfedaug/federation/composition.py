"""Several methods and one network, put together the same way at the server and at every site."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from medfedaug.config.run import MAX_SHARE, RunConfig, derive_seed
from medfedaug.errors import ConfigError, warn
from medfedaug.federation.messages import shared_keys
from medfedaug.federation.run_definition import define, scaling
from medfedaug.federation.secure.layout import SumLayout
from medfedaug.methods import Method, build_methods
from medfedaug.methods.base import ServerContext
from medfedaug.metrics.registry import LOCAL, UNSEEN, whose_model
from medfedaug.models.freezing import freeze
from medfedaug.models.sizes import check_size, size_multiple
from medfedaug.models.substitution import first_names
from medfedaug.tasks import Task

__all__ = ["Composition"]


class Composition:
    """The network with the layers of all methods, and the names of its shared entries.

    Args:
        config: the run. The initial weights of the network depend only on ``config.seed``.
        given: a network that stands in the place of the run's, with the same entries. It is changed: it
            gets the initial weights, and the methods' layers.

    Raises:
        ConfigError: when methods and network cannot be combined, or the given network is another.
    """

    def __init__(self, config: RunConfig, given: nn.Module | None = None) -> None:
        self.methods: list[Method] = build_methods(config.methods)
        self.pools_data = any(method.pools_data for method in self.methods)
        for method in self.methods:
            if config.task not in method.tasks:
                raise ConfigError(f"{method.name} is defined for {' and '.join(method.tasks)} alone")
            if config.plan.spatial_dims not in method.dimensions:
                raise ConfigError(
                    f"{method.name} is not defined for volumes: use a plan with two spatial dimensions"
                )
        idle = [method.name for method in self.methods if method.needs_batch]
        if idle and config.batch_size == 1:
            warn(f"{', '.join(idle)}: nothing happens with a batch of one image; choose a larger batch size")
        self.definition = define(config)
        # Forked, so that building a network does not change the random numbers of the caller.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(config.seed, "network"))
            network = self.definition.network()
            if given is not None:
                network = _in_place(given, network, config.network)
            _check_patches(network, config)
            plain = set(network.state_dict())
            try:
                for method in self.methods:
                    network = method.prepare_network(network)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"network {config.network}: {error}") from error
        self.frozen = _frozen(network, config)
        """Entries that are not trained."""
        changed = plain ^ set(network.state_dict())
        if changed:
            raise ConfigError(f"a method changed the network's entries: {', '.join(sorted(changed)[:3])}")
        self.network = network
        self.channels = self.definition.channels(network)
        normalising = [method for method in self.methods if method.normalises_input]
        self.normalises_input = bool(normalising)
        over = [method.statistics_over for method in normalising if method.statistics_over is not None]
        self.needs_statistics = bool(over)
        """Whether a method normalises with statistics of the site's images."""
        self.statistics_over = over[0] if over else "image"
        self.intensity = config.input_intensity(normalised=self.normalises_input)
        self.input = {
            "scaling": scaling(config, self.intensity),
            "normalised_by": normalising[0].name if normalising else None,
        }
        """The network's input: how images are scaled, and the method that normalises them."""
        names = first_names(network)
        kept = frozenset[str]().union(*(method.kept_at_site(network) for method in self.methods))
        self.kept_keys = frozenset(names[key] for key in kept)
        self.personalising = [method.name for method in self.methods if method.personalises]
        self.personal = bool(self.kept_keys or self.personalising)
        self.unsent_weights = bool(self.kept_keys) or any(m.starts_elsewhere for m in self.methods)
        """Whether a site's network may have weights that the site made and never sent."""
        self.epochs_before_test = max(method.epochs_before_test for method in self.methods)
        state = network.state_dict()
        self.shared = shared_keys({key: state[key] for key in names.values()}, self.kept_keys)
        self.sent = [key for key in self.shared if key not in self.frozen]
        """The shared entries that a site sends: all except the frozen ones, which no site changes."""
        self._config = config
        self._check_covered()
        self._check_shares()
        criterion = self.task().criterion
        soft = [method.name for method in self.methods if method.softens_labels]
        if soft and not criterion.takes_probabilities:
            raise ConfigError(f"{soft[0]} mixes labels, and the loss {criterion.name} takes whole ones alone")
        self.sums: SumLayout | None = None
        """What the sites add up, if the server is to learn sums alone."""
        if config.secure_aggregation:
            self.sums = SumLayout(self.methods, self.server_context(), self.sent, config.max_share)

    def _check_shares(self) -> None:
        """Check that a site's share of the mean is that of its weight, where it is limited.

        Raises:
            ConfigError: naming the method that finds the sites' weights itself.
        """
        for method in self.methods if self._config.max_share not in (MAX_SHARE, 1) else ():
            if method.own_weights:
                raise ConfigError(
                    f"max_share limits a site's share of the mean, and {method.name} finds the sites' "
                    "weights itself: leave one of the two out"
                )

    def _check_covered(self) -> None:
        """Check that a method whose noise is to cover a round does so.

        Raises:
            ConfigError: naming the entry, or the other method, that it would not cover.
        """
        parameters = {name for name, _ in self.network.named_parameters()}
        others = [key for key in self.sent if key not in parameters]
        context = self.server_context()
        for method in (one for one in self.methods if one.covers_round):
            if others:
                raise ConfigError(
                    f"{method.name}: its noise does not cover running statistics, which are averaged too "
                    f"({others[0]}): take instance or group norm, for instance --network-args "
                    '\'{"norm": "instance"}\', or keep them at their sites (fedbn, silobn)'
                )
            for other in self.methods:
                if other.before_training(context) is not None or other.every_round(context) is not None:
                    raise ConfigError(
                        f"{method.name}: its noise does not cover what {other.name} exchanges beside the "
                        "model: leave one of the two out"
                    )

    def server_context(self, weights: Callable[[], Mapping[str, float]] = dict) -> ServerContext:
        """What the methods' server halves are given.

        Args:
            weights: see `ServerContext`.
        """
        return ServerContext(
            self.network,
            self.channels,
            kept=self.kept_keys,
            weights=weights,
            task=self.task(),
            rounds=self._config.rounds,
        )

    @property
    def scored(self) -> dict[str, str]:
        """Name the model that the scores belong to, by what is scored: ``scored`` in ``results.json``.

        ``global``: the same model at all sites. ``personal``, and in brackets what of it is the site's own.
        ``local``: sites share no entry of the network, and each has trained its own. ``unseen``: the site did
        not train, and has nothing of its own but statistics of its images.
        """
        if not self.shared:
            return {"validation": LOCAL, "test": LOCAL, "unseen": UNSEEN}
        own = ["own layers"] if self.kept_keys else []
        own += ["own weights"] if self.personalising else []
        tested = [*own, "fine-tuned"] if self.epochs_before_test else own
        return {"validation": whose_model(own), "test": whose_model(tested), "unseen": UNSEEN}

    def task(self) -> Task:
        """The task of the run. It pads images to sizes that the network takes."""
        task = self.definition.task(self._config, normalised=self.normalises_input)
        task.divisor = math.lcm(task.divisor, *size_multiple(self.network, self._config.plan.spatial_dims))
        task.preparation.landmarks = any(method.needs_landmarks for method in self.methods)
        return task

    def check_apart(self, who: str) -> None:
        """Check that each site keeps its own images.

        Args:
            who: what needs that, for the message.

        Raises:
            ConfigError: naming the method that has all images in one place.
        """
        for method in self.methods:
            if method.pools_data:
                raise ConfigError(
                    f"{method.name} has all images in one place; {who} needs sites that are apart"
                )


def _in_place(given: nn.Module, network: nn.Module, name: str) -> nn.Module:
    """The given network, with the entries of the run's.

    Raises:
        ConfigError: naming the first entry in which they differ.
    """
    found, wanted = ({k: tuple(v.shape) for k, v in n.state_dict().items()} for n in (given, network))
    for key in [*wanted, *found]:
        if found.get(key) != wanted.get(key):
            texts = [
                f"of shape {shapes[key]}" if key in shapes else "not there" for shapes in (found, wanted)
            ]
            raise ConfigError(
                f"the given {type(given).__name__} is not the job's network {name}: entry {key} is "
                f"{texts[0]} in the one and {texts[1]} in the other; export the job with --network and "
                "--network-args of the given one"
            )
    given.load_state_dict(network.state_dict())
    return given


def _frozen(network: nn.Module, config: RunConfig) -> frozenset[str]:
    try:
        return freeze(network, config.freeze)
    except ValueError as error:
        raise ConfigError(f"network {config.network}: {error}") from error


def _check_patches(network: nn.Module, config: RunConfig) -> None:
    if config.plan.patch_size is not None:
        try:
            check_size(network, config.plan.patch_size)
        except ValueError as error:
            raise ConfigError(f"patch_size: with the network {config.network}, {error}") from error
