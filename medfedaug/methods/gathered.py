"""Exchange in which each site sends tensors and receives the tensors of all sites."""

import torch
from torch import Tensor

from medfedaug.config.run import derive_seed
from medfedaug.errors import DataError
from medfedaug.methods.base import Payload, ServerExchange, Shapes, SiteContext


def sample_groups(method: str, context: SiteContext, size: int) -> Tensor:
    """Divide a site's training samples at random into groups of ``size`` or more, reproducibly."""
    count = context.num_samples()
    if count < size:
        raise DataError(
            f"{count} training samples, and {method} sends means of {size}",
            site=context.name,
            hint="Leave the site out or use another method.",
        )
    generator = torch.Generator().manual_seed(derive_seed(method, context.name))
    return torch.randperm(count, generator=generator) % (count // size)


class GatheredServer(ServerExchange):
    """The server's half: every site receives ``<key>/<site>`` of all sites.

    Args:
        shapes: of a site's payload.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.sites: dict[str, Payload] = {}

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        self.sites[site] = payload

    def result(self) -> Payload:
        payloads = sorted(self.sites.items())
        return {f"{key}/{site}": value for site, payload in payloads for key, value in payload.items()}

    def state(self) -> Payload:
        return self.result()

    def restore(self, state: Payload) -> None:
        for path, value in state.items():
            key, site = path.split("/", 1)
            self.sites.setdefault(site, {})[key] = value
