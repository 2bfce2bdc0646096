"""Result of the exchange before training, and the sites that have received it."""

from __future__ import annotations

from collections.abc import Iterable

from medfedaug.methods.base import Payload


class InitialExchange:
    """Sends the result to each site once, and again after another site has joined and changed it.

    A site has the result once it has answered a request with it: a request may be lost, and a process may
    end before it has written the result.

    Attributes:
        payload: the methods' entries, keys ``<method>/<key>``.
        ready: whether the first preparation is over.
    """

    def __init__(self) -> None:
        self.payload: Payload = {}
        self.ready = False
        self._version = 0
        self._sent: dict[str, int] = {}
        self._known: dict[str, int] = {}

    def site_joined(self) -> None:
        """Mark every earlier result as out of date."""
        self._version += 1

    def due(self, sites: Iterable[str]) -> Payload:
        """Return the result for a request to these sites; empty if all of them have it."""
        sites = list(sites)
        self._sent.update(dict.fromkeys(sites, self._version))
        # Popped: until they answer, the server does not know which result they have.
        outdated = [site for site in sites if self._known.pop(site, None) != self._version]
        return self.payload if outdated else {}

    def answered(self, site: str) -> None:
        """Record that a site has answered its last request."""
        self._known[site] = self._sent.get(site, 0)

    def restore(self, payload: Payload) -> None:
        """Continue after a restart, and send the result again: sites may have lost it."""
        self.payload, self.ready, self._known = payload, True, {}
