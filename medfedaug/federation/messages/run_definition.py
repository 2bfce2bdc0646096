"""The origin of a run's network, task and optimiser: its settings, or a Bundle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from medfedaug.config.bundle_reference import AllowedBundle
from medfedaug.config.run import SCALING, RunConfig
from medfedaug.errors import ConfigError, first_line
from medfedaug.models import build_network
from medfedaug.tasks import Task, make_task

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
        try:
            return build_network(**arguments)
        except ConfigError:
            raise
        except Exception as error:  # networks check their arguments in various ways, or not at all
            text = error if isinstance(error, (TypeError, ValueError)) else first_line(error)
            raise ConfigError(f"network {config.network}: {text}") from error

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
    definition: BundleDefinition = _bundles().BundleDefinition.of(config)
    return definition


def bundle_run_settings(bundle: AllowedBundle) -> dict[str, Any]:
    """See `medfedaug.tasks.bundle.definition.bundle_settings`."""
    settings: dict[str, Any] = _bundles().bundle_settings(bundle)
    return settings


def _bundles() -> Any:
    # Imported here: it needs pytorch-ignite of the extra "bundle".
    try:
        from medfedaug.tasks.bundle import definition
    except ImportError as error:
        raise ConfigError(f"a Bundle needs {error.name}: pip install 'medfedaug[bundle]'") from error
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
