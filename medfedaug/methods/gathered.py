"""Exchange in which each site sends tensors and receives the tensors of all sites."""

from __future__ import annotations

import torch
from torch import Tensor

from medfedaug.config.run import derive_seed
from medfedaug.errors import DataError
from medfedaug.methods.base import Payload, ServerExchange, Shapes, SiteContext


def random_groups(method: str, site: str, samples: int, size: int) -> Tensor:
    """Divide a site's samples at random into groups of ``size`` or more, (samples,), reproducibly."""
    generator = torch.Generator().manual_seed(derive_seed(method, site))
    return torch.randperm(samples, generator=generator) % (samples // size)


def sample_groups(method: str, context: SiteContext, size: int) -> Tensor:
    """Return the `random_groups` of a site's training samples.

    Raises:
        DataError: for a site with fewer samples than a group.
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
    """Return the smallest number of different cases in a group of `random_groups`.

    It is at most ``size``, also for a site with too few samples for a group.
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
