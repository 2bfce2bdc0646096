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
from medfedaug.errors import ConfigError, first_line, withheld
from medfedaug.tasks.bundle.parser import BundleConfiguration
from medfedaug.tasks.bundle.task import BundleTask

# The parameters of the network, all of them, whatever it is called.
_ALL_PARAMETERS = re.compile(
    r"\$\s*(?:filter\(\s*lambda p:\s*p\.requires_grad\s*,\s*)?@[\w#:]+\.parameters\(\)\s*\)?"
)
_STEPS = {"repeats": 1, "sampler": None, "batch_sampler": None}


class BundleDefinition:
    """The parts of a Bundle that a run uses; see `medfedaug.federation.messages.run_definition.Definition`.

    Args:
        bundle: the Bundle, as `medfedaug.config.bundle_reference.find` gave it.

    Raises:
        ConfigError: naming file and key of what is missing or cannot be used.
    """

    def __init__(self, bundle: AllowedBundle) -> None:
        self.bundle, self.configuration = bundle, BundleConfiguration(bundle)
        given = self.configuration
        self.loader = given.find(given.trainer, "train_data_loader")
        for name, usual in _STEPS.items():
            found = given.raw(f"{self.loader}#{name}")
            if found is not None and given.make(f"{self.loader}#{name}") != usual:
                raise given.problem(
                    f"{self.loader}#{name}", "cannot be kept: every sample is used once an epoch"
                )
        self._optimiser = given.find(given.trainer, "optimizer")
        params = given.raw(f"{self._optimiser}#params")
        if not isinstance(params, str) or not _ALL_PARAMETERS.fullmatch(params):
            raise given.problem(
                f"{self._optimiser}#params", f"must be the network's parameters, got {params!r}"
            )
        defaults = self.optimiser([nn.Parameter(torch.zeros(1))], None).defaults
        self.learning_rate = float(defaults["lr"])
        self.momentum = float(defaults.get("momentum", 0.0))

    @classmethod
    def of(cls, config: RunConfig) -> BundleDefinition:
        """Build the definition from a run's configuration.

        Raises:
            ConfigError: when its Bundle may not be used here.
        """
        return cls(find(config.bundle))

    @property
    def batch_size(self) -> int:
        """Cases of a step, of which each may give several samples."""
        found = self.configuration.make(f"{self.loader}#batch_size") if self._has_batch_size else 1
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.configuration.problem(
                f"{self.loader}#batch_size", f"must be a whole number, got {found!r}"
            )
        return found

    @property
    def _has_batch_size(self) -> bool:
        return self.configuration.raw(f"{self.loader}#batch_size") is not None

    def network(self) -> nn.Module:
        """The network, on the CPU.

        Raises:
            ConfigError: when it cannot be made.
        """
        identifier = self.configuration.find(self.configuration.trainer, "network")
        # Anew each time: what is made once is kept, and a run must not train the network of another one.
        found = BundleConfiguration(self.bundle).make(identifier)
        if not isinstance(found, nn.Module):
            raise self.configuration.problem(identifier, f"gives {type(found).__name__}, and no network")
        return found.cpu()

    @staticmethod
    def channels(network: nn.Module) -> int:
        """The channels of the images that a network takes: those of its first convolution.

        Raises:
            ConfigError: when it has none.
        """
        for module in network.modules():
            if isinstance(module, _ConvNd):
                return int(module.in_channels)
        raise ConfigError("the Bundle's network has no convolution that tells the channels of its images")

    @staticmethod
    def spatial_dims(network: nn.Module) -> int:
        """The dimensions of the images that a network takes, 2 or 3."""
        return 3 if any(isinstance(module, nn.Conv3d) for module in network.modules()) else 2

    def task(self, config: RunConfig, *, normalised: bool) -> BundleTask:
        """The task of a run.

        Args:
            config: the run.
            normalised: whether a method normalises the images.

        Raises:
            ConfigError: when the Bundle's transforms would undo that.
        """
        task = BundleTask(self.configuration, config)
        scaling = task.parts.rescaling
        if normalised and task.methods_first and scaling:
            raise self.configuration.problem(
                self.configuration.find(self.configuration.trainer, "train_data_loader", "dataset")
                + "#transform",
                f"{scaling} scales images after its random transforms, and would undo a method that "
                "normalises them: use --normalise-at end",
            )
        return task

    def optimiser(self, parameters: Iterable[Tensor], rate: float | None) -> torch.optim.Optimizer:
        """The Bundle's optimiser for some parameters.

        Args:
            parameters: to be optimised.
            rate: learning rate; ``None`` for the Bundle's.

        Raises:
            ConfigError: when it cannot be made.
        """
        component = self.configuration.component(self._optimiser, "params")
        more: dict[str, Any] = {} if rate is None else {"lr": rate}
        try:
            found: Any = component.instantiate(params=list(parameters), **more)
        except Exception as error:  # whatever a class does with its arguments
            reason = withheld(first_line(error))
            raise self.configuration.problem(self._optimiser, f"cannot be made ({reason})") from error
        if not isinstance(found, torch.optim.Optimizer):
            raise self.configuration.problem(
                self._optimiser, f"gives {type(found).__name__}, and no optimiser"
            )
        return found


def bundle_settings(bundle: AllowedBundle) -> dict[str, Any]:
    """Settings of a run that follow from its Bundle, in the place of a task's defaults.

    Raises:
        ConfigError: when the Bundle cannot be used.
    """
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
