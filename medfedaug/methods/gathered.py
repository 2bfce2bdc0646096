"""An exchange that some methods need: each site sends tensors, and receives those of all sites."""

from __future__ import annotations

import torch
from torch import Tensor

from medfedaug.config.run import derive_seed
from medfedaug.errors import DataError
from medfedaug.methods.base import Payload, ServerExchange, Shapes, SiteContext


def random_groups(method: str, site: str, samples: int, size: int) -> Tensor:
    """Divide a site's samples at random into groups of ``size`` or more, (samples), always the same."""
    generator = torch.Generator().manual_seed(derive_seed(method, site))
    return torch.randperm(samples, generator=generator) % (samples // size)


def sample_groups(method: str, context: SiteContext, size: int) -> Tensor:
    """The `random_groups` of a site's training samples.

    Raises:
        DataError: for a site with fewer samples than a group has.
    """
    count = context.num_samples()
    if count < size:
        raise DataError(
            f"{count} training samples, and {method} sends means of {size}",
            site=context.name,
            hint="Leave the site out or use another method.",
        )
    return random_groups(method, context.name, count, size)


def fewest_cases(method: str, context: SiteContext, size: int) -> int:
    """The number of different cases in the group of `random_groups` that has the fewest.

    At most ``size``, of a site that has too few samples for a group as well.
    """
    by_case = torch.tensor(context.samples_by_case())
    samples = int(by_case.sum())
    if samples < size:
        return size
    groups = random_groups(method, context.name, samples, size)
    cases = torch.repeat_interleave(torch.arange(len(by_case)), by_case)
    pairs = torch.stack([groups, cases]).unique(dim=1)
    return min(size, int(pairs[0].bincount().min()))


class GatheredServer(ServerExchange):
    """The server's half: every site receives ``<key>/<site>`` of all sites.

    It grows with the number of sites, as its result must.

    Args:
        shapes: of what a site sends.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.sites: dict[str, Payload] = {}

    def accept(self, site: str, payload: Payload, weight: float = 1.0) -> None:
        """Keep the tensors of one site, which may also join later."""
        self.sites[site] = payload

    def result(self) -> Payload:
        return {
            f"{key}/{site}": value for site in sorted(self.sites) for key, value in self.sites[site].items()
        }

    def state(self) -> Payload:
        """The tensors of all sites, to which those of a site that joins after a restart are added."""
        return self.result()

    def restore(self, state: Payload) -> None:
        for path, value in state.items():
            key, site = path.split("/", 1)
            self.sites.setdefault(site, {})[key] = value
