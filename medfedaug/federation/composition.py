"""Several methods and one network, put together the same way at the server and at every site."""

from __future__ import annotations

import torch
from torch import nn

from medfedaug.config import RunConfig, derive_seed
from medfedaug.errors import ConfigError
from medfedaug.federation.messages import shared_keys
from medfedaug.methods import Method, build_methods
from medfedaug.models import build_network

__all__ = ["Composition"]


class Composition:
    """The network with all methods' layers, and which of its entries are shared.

    Args:
        config: the run. The network's initial weights follow from ``config.seed`` alone.

    Raises:
        ConfigError: when methods and network do not go together.
    """

    def __init__(self, config: RunConfig) -> None:
        self.methods: list[Method] = build_methods(config.methods)
        self.pools_data = any(method.pools_data for method in self.methods)
        for method in self.methods:
            if config.task not in method.tasks:
                raise ConfigError(f"{method.name} is defined for {' and '.join(method.tasks)} alone")
        # Forked, so that building a network does not disturb a caller's own random numbers.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(config.seed, "network"))
            try:
                network: nn.Module = build_network(
                    config.network,
                    in_channels=config.in_channels,
                    out_channels=config.num_classes,
                    **config.network_args,
                )
                plain = set(network.state_dict())
                for method in self.methods:
                    network = method.prepare_network(network)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"network {config.network}: {error}") from error
        changed = plain ^ set(network.state_dict())
        if changed:
            raise ConfigError(f"a method changed the network's entries: {', '.join(sorted(changed)[:3])}")
        self.network = network
        self.normalises_input = any(method.normalises_input for method in self.methods)
        self.kept_keys = frozenset[str]().union(*(method.kept_at_site(network) for method in self.methods))
        self.personal = bool(self.kept_keys) or any(method.personalises for method in self.methods)
        self.shared = shared_keys(network.state_dict(), self.kept_keys)
