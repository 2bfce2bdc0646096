"""The order of a federation: preparation, rounds, validation, test. It stands here and nowhere else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from medfedaug.federation.messages import TRAIN, Reply, Request
from medfedaug.federation.server import FederationServer

__all__ = ["Accept", "Carrier", "run"]

Accept = Callable[[str, Reply], bool]
"""Takes a site's name and reply; whether the reply could be used."""


class Carrier(ABC):
    """An engine, as the protocol sees it: it knows who is there, and carries requests and replies.

    It decides nothing about the run. One that is stopped from outside raises out of `ask`, and the run ends
    there.
    """

    @abstractmethod
    def connected(self) -> list[str]:
        """The names of the sites that can be asked now, sorted."""

    @abstractmethod
    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Send a request, and hand over the replies.

        Args:
            request: the server's, the same for all.
            sites: who is asked.
            needed: so many good replies are waited for; how much longer the carrier waits for the others is
                its own affair. With 0 nobody is waited for: replies may come while later requests are under
                way, and a site that has not yet answered such a request is not asked a second time.
            accept: called once for each reply, in any thread.

        Returns:
            The sites that gave no answer, each with the reason.
        """

    @abstractmethod
    def round_done(self, server: FederationServer) -> None:
        """A round is over, and what the server knows can be saved."""


def run(server: FederationServer, carrier: Carrier) -> None:
    """Carry a federation to its end: from its beginning, or from where a restored server stands.

    Sites that join late, or could not be prepared before, are prepared beside a round and take part from the
    next one on.

    Args:
        server: decides.
        carrier: sends, waits and saves.

    Raises:
        MedFedAugError: when too few sites can train, or too few updates of a round can be used.
    """
    if not server.known:
        everybody = carrier.connected()
        _ask(server, carrier, server.prepare(), everybody, len(everybody), server.accept_preparation)
        server.finish_preparation()
    while server.round < server.config.rounds:
        _round(server, carrier)
    training = sorted(server.sites.keys() & set(carrier.connected()))
    _ask(server, carrier, server.validate(), training, server.needed, server.accept_validation)
    server.finish_validation()
    # The test of every site counts, so that all are waited for, but for those that were silent just now.
    everybody = sorted(server.known & set(carrier.connected()))
    needed = max(1, len(set(everybody) - server.missing()))
    _ask(server, carrier, server.test(), everybody, needed, server.accept_test)


def _round(server: FederationServer, carrier: Carrier) -> None:
    connected = carrier.connected()
    strangers = sorted(set(connected) - server.known)
    if strangers:
        carrier.ask(server.prepare(), strangers, 0, server.accept_preparation)
    targets = server.choose_sites(connected)
    request = server.start_round(targets)
    for site in sorted(server.sites.keys() - set(connected)):
        server.no_answer(TRAIN, site, f"site {site} is not connected")
    _ask(server, carrier, request, targets, server.needed, server.accept)
    server.finish_round()
    carrier.round_done(server)


def _ask(
    server: FederationServer,
    carrier: Carrier,
    request: Request,
    sites: Sequence[str],
    needed: int,
    accept: Accept,
) -> None:
    for site, reason in sorted(carrier.ask(request, sites, needed, accept).items()):
        server.no_answer(request.task, site, reason)
