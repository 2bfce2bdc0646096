"""Definition of a run by a Bundle: network, task and optimiser."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from medfedaug.config.bundle_reference import AllowedBundle, find
from medfedaug.config.plan import Plan
from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError
from medfedaug.tasks.bundle.parser import BundleConfiguration
from medfedaug.tasks.bundle.task import BundleTask

# All parameters of the network, for any name of it.
_ALL_PARAMETERS = re.compile(
    r"\$\s*(?:filter\(\s*lambda p:\s*p\.requires_grad\s*,\s*)?@[\w#:]+\.parameters\(\)\s*\)?"
)
_STEPS = {"repeats": 1, "sampler": None, "batch_sampler": None}


class BundleDefinition:
    """The parts of a Bundle that a run uses, as `composition.ConfiguredRun` those of its settings."""

    def __init__(self, bundle: AllowedBundle) -> None:
        self.bundle = bundle
        self.configuration = configuration = BundleConfiguration(bundle)
        self.loader = configuration.find(configuration.trainer, "train_data_loader")
        for name, usual in _STEPS.items():
            key = f"{self.loader}#{name}"
            if configuration.raw(key) is not None and configuration.make(key) != usual:
                raise configuration.problem(key, "is not supported: every sample is used once an epoch")
        self._optimiser = configuration.find(configuration.trainer, "optimizer")
        params = configuration.raw(f"{self._optimiser}#params")
        if not isinstance(params, str) or not _ALL_PARAMETERS.fullmatch(params):
            raise configuration.problem(
                f"{self._optimiser}#params", f"must be the network's parameters, got {params!r}"
            )
        defaults = self.optimiser([nn.Parameter(torch.zeros(1))], None).defaults
        self.learning_rate = float(defaults["lr"])
        self.momentum = float(defaults.get("momentum", 0.0))

    @classmethod
    def of(cls, config: RunConfig) -> BundleDefinition:
        """Build the definition from a run's configuration."""
        return cls(find(config.bundle))

    @property
    def batch_size(self) -> int:
        """Cases of a step, each of which may give several samples."""
        key = f"{self.loader}#batch_size"
        size: int = 1 if self.configuration.raw(key) is None else self.configuration.make(key)
        return size

    def network(self) -> nn.Module:
        """Make the network, on the CPU."""
        identifier = self.configuration.find(self.configuration.trainer, "network")
        # Anew each time: a configuration keeps its parts, and a run must not train another run's network.
        network: nn.Module = BundleConfiguration(self.bundle).make(identifier)
        return network.cpu()

    @staticmethod
    def channels(network: nn.Module) -> int:
        """Return the channels of a network's images, from its first convolution."""
        for module in network.modules():
            if isinstance(module, _ConvNd):
                return int(module.in_channels)
        raise ConfigError("the Bundle's network has no convolution with the number of image channels")

    @staticmethod
    def spatial_dims(network: nn.Module) -> int:
        """Return the dimensions of a network's images, 2 or 3."""
        return 3 if any(isinstance(module, nn.Conv3d) for module in network.modules()) else 2

    def task(self, config: RunConfig, *, normalised: bool) -> BundleTask:
        """Make the task of a run.

        Raises:
            ConfigError: when the Bundle's transforms would undo the normalisation.
        """
        task = BundleTask(self.configuration, config)
        scaling = task.parts.rescaling
        if normalised and scaling:
            data = self.configuration.find(self.configuration.trainer, "train_data_loader", "dataset")
            raise self.configuration.problem(
                f"{data}#transform",
                f"{scaling} scales images after its random transforms, and would undo a method that "
                "normalises them: put it before them",
            )
        return task

    def optimiser(self, parameters: Iterable[Tensor], rate: float | None) -> torch.optim.Optimizer:
        """Make the Bundle's optimiser."""
        component = self.configuration.component(self._optimiser, "params")
        more: dict[str, Any] = {} if rate is None else {"lr": rate}
        with self.configuration.problems(self._optimiser):
            optimiser: Any = component.instantiate(params=list(parameters), **more)
        return optimiser


def bundle_settings(bundle: AllowedBundle) -> dict[str, Any]:
    """Return settings of a run from its Bundle, instead of a task's defaults."""
    definition = BundleDefinition(bundle)
    with torch.random.fork_rng(devices=[]):
        dims = definition.spatial_dims(definition.network())
    return {
        "bundle": bundle.reference,
        "network": bundle.name,
        "optimizer": "bundle",
        "learning_rate": definition.learning_rate,
        "batch_size": definition.batch_size,
        "plan": Plan(spatial_dims=dims),
    }
