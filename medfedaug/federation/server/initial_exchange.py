"""Result of the exchange before training, and the sites that have it."""

from __future__ import annotations

from collections.abc import Iterable

from medfedaug.methods.base import Payload


class OnceShared:
    """Sent to a site once, and again after it has changed, since another site has joined.

    A site has it when it has answered a request with it: a request may be lost, and a process may end before
    it has written what it received.

    Attributes:
        payload: the methods' entries, keys ``<method>/<key>``.
        ready: whether the first preparation is over.
    """

    def __init__(self) -> None:
        self.payload: Payload = {}
        self.ready = False
        self._version = 0
        self._asked: dict[str, int] = {}
        self._known: dict[str, int] = {}

    def site_joined(self) -> None:
        """Mark everything that was sent before as out of date."""
        self._version += 1

    def due(self, sites: Iterable[str]) -> Payload:
        """Return the exchange for a request to these sites: nothing where all of them have it."""
        sites = list(sites)
        self._asked.update(dict.fromkeys(sites, self._version))
        # Popped: until they answer, it is not known what they have.
        fresh = [site for site in sites if self._known.pop(site, None) != self._version]
        return self.payload if fresh else {}

    def answered(self, site: str) -> None:
        """A site has answered the last request that it was sent."""
        self._known[site] = self._asked.get(site, 0)

    def restore(self, payload: Payload) -> None:
        """Continue after a restart: sites may have lost what they were sent, and are sent it again."""
        self.payload, self.ready = payload, True
        self._known = {}
