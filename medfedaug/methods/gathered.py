"""An exchange that some methods need: each site sends tensors, and receives those of all sites."""

from __future__ import annotations

from medfedaug.methods.base import Payload, ServerExchange, Shapes

__all__ = ["GatheredServer"]


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
