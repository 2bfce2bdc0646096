"""The order of requests in a federation and in a comparison."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from medfedaug.errors import ConfigError, MedFedAugError
from medfedaug.federation.messages.messages import TEST, TRAIN, VALIDATE, Reply, Request, refusal
from medfedaug.federation.server.aggregation import Ask
from medfedaug.federation.server.comparison import Comparison, Turn
from medfedaug.federation.server.server import FederationServer

Accept = Callable[[str, Reply], bool]
"""Takes a site's name and its reply, and returns whether the reply could be used."""


class Carrier(ABC):
    """The protocol's view of an engine, which knows the connected sites and transports messages.

    It makes no decision about the run. If it is stopped from outside, `ask` raises, and the run ends.
    """

    @abstractmethod
    def connected(self) -> list[str]:
        """Return the sorted names of the connected sites."""

    def away(self) -> set[str]:
        """Return the connected sites that are silent at the moment, and may come back."""
        return set()

    @abstractmethod
    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Send a request, and hand over the replies.

        Args:
            needed: the number of good replies to wait for. The carrier decides how much longer it waits for
                other replies. With 0 it does not wait: replies may arrive during later requests, and a site
                with such an open request is not asked again.
            accept: called once for each reply, in any thread.

        Returns:
            The sites that did not answer, each with the reason.
        """

    def gather(
        self, request: Request, sites: Sequence[str], needed: int, accept: Accept
    ) -> Mapping[str, str]:
        """Send a request, and hand over replies to it and to earlier ones until enough are good.

        Other replies stay pending for a later call.

        Args:
            accept: called once for each reply, during this call.

        Returns:
            The sites that will not answer, each with the reason.
        """
        raise ConfigError("this engine has no buffered rounds: leave out buffer, or take another engine")

    def under_way(self) -> Collection[str]:
        """Return the sites with a pending reply to a request of `gather`."""
        return ()

    @abstractmethod
    def round_done(self, server: FederationServer) -> None:
        """Save the server's state after a round."""


def run(server: FederationServer, carrier: Carrier, rounds: int = 0) -> None:
    """Run a federation to its end, from the beginning or from the round of a restored server.

    Sites that join late, or failed to prepare, are prepared during a round and take part from the next round.

    Args:
        rounds: the round after which to stop; 0 for the last one.

    Raises:
        MedFedAugError: when too few sites can train, or too few updates of a round can be used.
    """
    if server.config.planning:
        everybody = carrier.connected()
        _ask(server, carrier, server.planning.request(), everybody, len(everybody), server.planning.accept)
        server.adopt_plan()
    if not server.known:
        everybody = carrier.connected()
        _ask(server, carrier, server.prepare(), everybody, len(everybody), server.accept_preparation)
        server.finish_preparation()
    while not server.trained and (not rounds or server.round < rounds):
        _round(server, carrier)
    training = _present(server, VALIDATE, server.sites, carrier.connected())
    _ask(server, carrier, server.validate(), training, server.needed, server.accept_validation)
    server.finish_validation()
    if not server.execution.tested:
        return
    # Every site's test counts, so this waits for all sites that answered the last request.
    everybody = _present(server, TEST, server.known, carrier.connected())
    needed = max(1, len(set(everybody) - server.missing()))
    _ask(server, carrier, server.test(), everybody, needed, server.accept_test)


def compare(comparison: Comparison, carrier: Carrier) -> None:
    """Make the trainings of a comparison, stage by stage, and let the sites score each model."""
    for turn in comparison.turns():
        own = _TrainingCarrier(carrier, turn)
        try:
            run(turn.server, own, turn.rounds)
        except MedFedAugError as error:
            comparison.fail(turn, error)
            continue
        sites = sorted(turn.server.sites.keys() & set(carrier.connected()))
        silent = own.ask(
            comparison.scoring(turn), sites, max(1, len(sites)), partial(comparison.accept, turn)
        )
        for site, reason in sorted(silent.items()):
            comparison.no_answer(turn, site, reason)
        comparison.finish(turn)


class _TrainingCarrier(Carrier):
    """Carries the requests of one training of a comparison, and saves its server after each round."""

    def __init__(self, carrier: Carrier, turn: Turn) -> None:
        self.carrier, self.turn = carrier, turn

    def connected(self) -> list[str]:
        return self.carrier.connected()

    def away(self) -> set[str]:
        return self.carrier.away()

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        return self.carrier.ask(replace(request, training=str(self.turn.training)), sites, needed, accept)

    def round_done(self, server: FederationServer) -> None:
        self.carrier.round_done(server)
        server.save(self.turn.checkpoint)


def _round(server: FederationServer, carrier: Carrier) -> None:
    connected = _worth_asking(server, carrier)
    strangers = sorted(set(connected) - server.known)
    if strangers:
        carrier.ask(server.prepare(), strangers, 0, server.accept_preparation)
    targets = sorted(server.sites.keys() & {*connected}.difference(carrier.under_way()))
    request = server.start_round(targets)
    _present(server, TRAIN, server.sites, connected)
    weights = server.participation.weights({site: server.sites[site] for site in targets})
    _ask_each(server, carrier, server.aggregation.agree(request, server.once.payload, weights))
    request, targets = server.aggregation.training(request, targets)
    if server.config.buffer:
        silent = carrier.gather(request, targets, server.config.buffer, server.accept)
    else:
        silent = carrier.ask(request, targets, _needed(server), server.accept)
    _record(server, request, silent)
    _ask_each(server, carrier, server.aggregation.confirm())
    server.finish_round()
    carrier.round_done(server)


def _worth_asking(server: FederationServer, carrier: Carrier) -> list[str]:
    """Return the connected sites, without silent ones if the round has enough without them."""
    connected, away = carrier.connected(), carrier.away()
    present = [site for site in connected if site not in away]
    return present if len(server.sites.keys() & set(present)) >= server.needed else connected


def _present(
    server: FederationServer, task: str, sites: Collection[str], connected: Collection[str]
) -> list[str]:
    """Return the connected sites; record the others."""
    for site in sorted(set(sites) - set(connected)):
        server.no_answer(task, site, f"site {site} is not connected")
    return sorted(set(sites) & set(connected))


def _ask_each(server: FederationServer, carrier: Carrier, asks: Iterable[Ask]) -> None:
    """Send requests one after another; each waits for as many good answers as a round needs."""
    for ask in asks:

        def accept(site: str, reply: Reply, ask: Ask = ask) -> bool:
            reason = refusal(site, partial(ask.use, site, reply))
            if reason is not None:
                server.no_answer(ask.request.task, site, reason)
            return reason is None

        needed = max(1, min(_needed(server), len(ask.sites)))
        _ask(server, carrier, ask.request, list(ask.sites), needed, accept)


def _needed(server: FederationServer) -> int:
    """Return the number of good answers that a round needs, and its sum."""
    return max(server.needed, server.aggregation.least_answers)


def _ask(
    server: FederationServer,
    carrier: Carrier,
    request: Request,
    sites: Sequence[str],
    needed: int,
    accept: Accept,
) -> None:
    _record(server, request, carrier.ask(request, sites, needed, accept))


def _record(server: FederationServer, request: Request, silent: Mapping[str, str]) -> None:
    for site, reason in sorted(silent.items()):
        server.no_answer(request.task, site, reason)
