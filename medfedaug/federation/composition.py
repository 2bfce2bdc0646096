"""Composition of methods and network, the same at the server and at every site.

Settings or a Bundle define the network, the task and the optimiser of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medfedaug.config.run import BY_PLAN, MAX_SHARE, SCALING, RunConfig, derive_seed
from medfedaug.data.base import SiteFolder
from medfedaug.errors import ConfigError, DataError, config_errors, warn, withheld
from medfedaug.federation.messages.messages import shared_keys
from medfedaug.methods import Method, build_methods
from medfedaug.methods.base import ServerContext
from medfedaug.methods.compatibility import Constraints, check_compatible, constraints, methods_with
from medfedaug.metrics.registry import LOCAL, UNSEEN, whose_model
from medfedaug.models import build_network
from medfedaug.models.entries import first_names_of, freeze
from medfedaug.models.networks import check_size, size_multiple
from medfedaug.tasks import Task, make_task
from medfedaug.utils.plugins import added_module

if TYPE_CHECKING:
    from medfedaug.tasks.bundle.definition import BundleDefinition

BUNDLE_SCALING = "bundle"


class ConfiguredRun:
    """Definition of a run whose settings name network, loss and optimiser."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.momentum = config.momentum if config.optimizer == "sgd" else 0.0

    def network(self) -> nn.Module:
        """Build the network of the settings."""
        config, arguments = self.config, network_arguments(self.config)
        # Networks check their arguments in various ways, or not at all.
        with config_errors(f"network {config.network}"):
            return build_network(**arguments)

    def channels(self, network: nn.Module) -> int:
        """Return the number of the data's channels."""
        return self.config.in_channels

    def task(self, config: RunConfig, *, normalised: bool) -> Task:
        """See `medfedaug.tasks.make_task`."""
        return make_task(config, normalised=normalised)

    def optimiser(self, parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
        """Build Adam or stochastic gradient descent."""
        decay = self.config.weight_decay
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=rate, momentum=self.config.momentum, weight_decay=decay)
        return torch.optim.Adam(parameters, lr=rate, weight_decay=decay)


def define(config: RunConfig) -> ConfiguredRun | BundleDefinition:
    """Return the definition of a run."""
    if not config.bundle:
        return ConfiguredRun(config)
    definition: BundleDefinition = bundle_module().BundleDefinition.of(config)
    return definition


def bundle_module() -> Any:
    """Import `medfedaug.tasks.bundle.definition`, which needs pytorch-ignite of the extra "bundle"."""
    with config_errors("a Bundle needs pip install 'medfedaug[bundle]'", ImportError):
        from medfedaug.tasks.bundle import definition
    return definition


def scaling(config: RunConfig, intensity: str) -> str:
    """Return the scaling of a run's images before the methods: ``input.scaling`` in ``results.json``."""
    if config.bundle:
        return BUNDLE_SCALING
    return "none" if intensity == "raw" else SCALING[config.task]


def network_arguments(config: RunConfig) -> dict[str, Any]:
    """Return the arguments of `medfedaug.models.build_network` for a run."""
    for name in ("in_channels", "out_channels", "spatial_dims"):
        if name in config.network_args:
            raise ConfigError(f"network_args: {name} follows from data and plan; leave it out")
    return {
        "name": config.network,
        "in_channels": config.in_channels,
        "out_channels": config.num_classes,
        "image_size": config.plan.patch_size or config.image_size,
        "spatial_dims": config.plan.spatial_dims,
        "supervised": config.plan.deep_supervision,
        **config.network_args,
    }


FOR_OPEN_CLASSES = ("class_mean", "condist")
"""Methods that join a run whose sites have outlined different structures."""

_ON_ONE_MACHINE = "simulate it on one machine, or take another method"
_SITES_FOR_TRIMMING = 5
# Only the model's entries of a late update are carried over to the present model.
_OF_BUFFERED_ROUNDS = frozenset({"complete_state_dict", "separate_sites"})


def masking(config: RunConfig) -> Any:
    """Return `medfedaug.hospital.secure` for a run whose server learns only sums, else ``None``."""
    return added_module("secure", "secure_aggregation") if config.secure_aggregation else None


def with_trimmed_mean(config: RunConfig, sites: int) -> RunConfig:
    """Return a run that averages models by the trimmed mean, for enough sites and where methods allow it.

    Of five sites one with exchanged labels costs the mean 0.66 Dice and the trimmed mean nothing
    (``docs/results/robustness``). With fewer sites it would leave out the honest site that differs most.
    """
    if sites < _SITES_FOR_TRIMMING or config.secure_aggregation:
        return config
    return _joined(config, "trimmed_mean")


def with_open_classes(config: RunConfig, sites: Iterable[SiteFolder]) -> RunConfig:
    """Return a run with the methods for sites that have outlined different structures, where there are some.

    With four structures, of which each of four sites has outlined two, the marginal loss loses a fifth of the
    Dice that a site has by itself, and with both methods nothing (``docs/results/partial_labels``). A run
    that names one of the two or ``teacher``, or whose methods do not go with them, stays as it is.
    """
    named = {method["name"] for method in config.methods}
    training = [site for site in sites if site.trains and site.name not in config.holdout]
    apart = any(site.partial and site.annotated("training") for site in training)
    if not apart or named & {*FOR_OPEN_CLASSES, "teacher"}:
        return config
    return _joined(config, *FOR_OPEN_CLASSES)  # not by single, for instance, which averages nothing


def _joined(config: RunConfig, *names: str) -> RunConfig:
    """Return a run with further methods, or as it is where they do not go with its own."""
    more = [{"name": name, "args": {}} for name in names]
    joined = replace(config, methods=(*config.methods, *more))
    try:
        Composition(joined)
    except ConfigError:
        return config
    return joined


def check_counted(config: RunConfig) -> None:
    """Check that hospitals can run a job: each method knows the patients behind what it sends."""
    uncounted = methods_with(build_methods(config.methods), "counted_patients", "excludes")
    if uncounted:
        names = ", ".join(method.name for method in uncounted)
        raise ConfigError(
            f"{names}: hospitals cannot say whose images are in what it sends; {_ON_ONE_MACHINE}"
        )


class Composition:
    """The network with the layers of all methods, and the names of its shared entries.

    Args:
        config: the run. The initial weights of the network depend only on ``config.seed``.
        given: a network with the same entries, used in place of the run's. It is modified: it gets the
            initial weights and the methods' layers.
    """

    def __init__(self, config: RunConfig, given: nn.Module | None = None) -> None:
        self.methods: list[Method] = build_methods(config.methods)
        self.pools_data = bool(methods_with(self.methods, "separate_sites", "excludes"))
        for method in self.methods:
            if config.task not in method.tasks or config.plan.spatial_dims not in method.dimensions:
                dims = " and ".join(f"{n}D" for n in method.dimensions)
                raise ConfigError(f"{method.name} is defined only for {' and '.join(method.tasks)} in {dims}")
        idle = [method.name for method in methods_with(self.methods, "several_images", "requires")]
        if idle and config.batch_size == 1:
            warn(f"{', '.join(idle)}: nothing happens with a batch of one image; choose a larger batch size")
        self.definition = define(config)
        # Networks are built on the CPU: the fork restores its generator alone.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(config.seed, "network"))
            network = self.definition.network()
            if given is not None:
                network = _in_place(given, network, config.network)
            plain = set(network.state_dict())
            with config_errors(f"network {config.network}", TypeError, ValueError):
                if config.plan.patch_size is not None:
                    check_size(network, config.plan.patch_size)
                for method in self.methods:
                    network = method.prepare_network(network)
                self.frozen = freeze(network, config.freeze)
                """Entries that are not trained."""
        state = network.state_dict(keep_vars=True)
        changed = plain ^ set(state)
        if changed:
            raise ConfigError(f"a method changed the network's entries: {', '.join(sorted(changed)[:3])}")
        self.network = network
        self.channels = self.definition.channels(network)
        normalising = methods_with(self.methods, "normalised_input")
        self.normalises_input = bool(normalising)
        over = [method.statistics_over for method in normalising if method.statistics_over is not None]
        self.needs_statistics = bool(over)
        """Whether a method normalises with statistics of the site's images."""
        self.statistics_over = over[0] if over else "image"
        self.intensity = config.input_intensity(normalised=self.normalises_input)
        by = [method.name for method in normalising]
        if config.plan.normalises:
            if by:
                warn(f"{by[0]} normalises the images; the plan's normalisation is not used")
            by.append(BY_PLAN)
        self.input = {"scaling": scaling(config, self.intensity), "normalised_by": by[0] if by else None}
        """The network's input: the scaling of images, and the method or plan that normalises them."""
        names = first_names_of(state)
        kept = frozenset[str]().union(*(method.local_entries(network) for method in self.methods))
        self.kept_keys = frozenset(names[key] for key in kept)
        self.personalising = [method.name for method in methods_with(self.methods, "personal_model")]
        self.personal = bool(self.kept_keys or self.personalising)
        self.epochs_before_test = max(method.epochs_before_test for method in self.methods)
        self.shared = shared_keys({key: state[key] for key in names.values()}, self.kept_keys)
        self.sent = [key for key in self.shared if key not in self.frozen]
        """The shared entries that a site sends: all except the frozen ones."""
        self._config = config
        task = self.task()
        check_compatible([*map(constraints, self.methods), *self._option_constraints(task)])
        self.sums: Any = None
        """The `medfedaug.hospital.secure.SumLayout`, if the server learns only sums."""
        if (masks := masking(config)) is not None:
            context = self.server_context(task=task)
            self.sums = masks.SumLayout(self.methods, context, self.sent, config.max_share)

    def _option_constraints(self, task: Task) -> Iterator[Constraints]:
        """Yield the requirements of the run's options, and the exclusions of its loss."""
        if self._config.max_share not in (MAX_SHARE, 1):
            yield Constraints("max_share", requires=frozenset({"given_shares"}))
        if self._config.buffer:
            yield Constraints("buffer", requires=_OF_BUFFERED_ROUNDS, excludes=frozenset({"same_start"}))
        criterion = task.criterion
        if not criterion.takes_probabilities:
            yield Constraints(f"the loss {criterion.name}", excludes=frozenset({"soft_labels"}))

    def server_context(
        self, weights: Callable[[], Mapping[str, float]] = dict, task: Task | None = None
    ) -> ServerContext:
        """Return the context of the methods' server halves."""
        return ServerContext(
            self.network,
            self.channels,
            local_entries=self.kept_keys,
            weights=weights,
            task=task or self.task(),
            rounds=self._config.rounds,
        )

    @property
    def scored(self) -> dict[str, str]:
        """The scored model of each split, ``scored`` in ``results.json``.

        ``global``: the same model at all sites. ``personal``, with the site's own parts in brackets.
        ``local``: sites share no entry, and each has trained its own network. ``unseen``: the site did not
        train, and adds only statistics of its images.
        """
        if not self.shared:
            return {"validation": LOCAL, "test": LOCAL, "unseen": UNSEEN}
        own = ["own layers"] if self.kept_keys else []
        own += ["own weights"] if self.personalising else []
        tested = [*own, "fine-tuned"] if self.epochs_before_test else own
        return {"validation": whose_model(own), "test": whose_model(tested), "unseen": UNSEEN}

    def task(self) -> Task:
        """Build the run's task, which pads images to sizes for the network."""
        task = self.definition.task(self._config, normalised=self.normalises_input)
        task.divisor = math.lcm(task.divisor, *size_multiple(self.network, self._config.plan.spatial_dims))
        return task

    def check_annotated(self, site: SiteFolder) -> None:
        """Check that a site's annotations suffice for the methods."""
        if not site.partial:
            return
        partial = Constraints(
            f"the labels of site {site.name}",
            excludes=frozenset({"complete_labels", "soft_labels"}),
            hint="annotate all classes, or take another method",
        )
        check_compatible([*map(constraints, self.methods), partial])
        learns = bool(methods_with(self.methods, "unlabelled_images"))
        if site.trains and not learns and not site.annotated("training"):
            raise DataError(
                "no training case has anything outlined, and the run's methods learn only from labels",
                site=site.name,
                path=site.path / site.listing,
                hint=f"Add condist or teacher to --methods, hold the site out: --holdout {site.name}, or "
                "leave out all such cases: --unlabelled-weight 0, the default.",
            )

    def check_apart(self, who: str) -> None:
        """Check that each site keeps its own images."""
        apart = Constraints(who, requires=frozenset({"separate_sites"}), hint=_ON_ONE_MACHINE)
        check_compatible([*map(constraints, self.methods), apart])


def _in_place(given: nn.Module, network: nn.Module, name: str) -> nn.Module:
    """Return the given network with the entries of the run's network."""
    try:
        given.load_state_dict(network.state_dict())
    except RuntimeError as error:
        kind, text = type(given), " ".join(str(error).split())
        public = kind.__module__.startswith("monai.networks.nets.")
        option = f"--network monai.networks.nets.{kind.__name__}" if public else "--network"
        raise ConfigError(
            f"the given {kind.__name__} is not the job's network {name}; name the given one with {option} "
            f"and --network-args ({withheld(text[:300])})"
        ) from error
    return given
