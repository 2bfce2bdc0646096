"""Exchange in which each site sends tensors and receives the tensors of all sites."""

from medfedaug.methods.base import Payload, ServerExchange, Shapes


class GatheredServer(ServerExchange):
    """The server's half: every site receives ``<key>/<site>`` of all sites."""

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
