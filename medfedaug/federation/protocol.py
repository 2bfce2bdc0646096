"""The order of a federation and of an evaluation. It is defined only here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from medfedaug.errors import ConfigError
from medfedaug.federation.messages.messages import TEST, TRAIN, VALIDATE, Reply, Request
from medfedaug.federation.messages.refusal import refusal
from medfedaug.federation.secure.unmasking import ServerMasks
from medfedaug.federation.server.evaluation import Evaluation
from medfedaug.federation.server.pilot import pilot_trainings
from medfedaug.federation.server.server import FederationServer

Accept = Callable[[str, Reply], bool]
"""Takes a site's name and its reply, and returns whether the reply could be used."""


class Carrier(ABC):
    """The protocol's view of an engine, which knows the connected sites and transports requests and replies.

    It decides nothing about the run. If it is stopped from outside, `ask` raises, and the run ends.
    """

    @abstractmethod
    def connected(self) -> list[str]:
        """The names of the sites that can be asked now, sorted."""

    def away(self) -> set[str]:
        """Return the connected sites that are not heard from at the moment, and may come back."""
        return set()

    @abstractmethod
    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Send a request, and hand over the replies.

        Args:
            request: the server's, the same for all.
            sites: the sites to ask.
            needed: the number of good replies to wait for. The carrier decides how much longer it waits for
                the other replies. With 0 it waits for none: replies may arrive during later requests, and a
                site that has not answered such a request yet is not asked a second time.
            accept: called once for each reply, in any thread.

        Returns:
            The sites that did not answer, each with the reason.
        """

    def gather(
        self, request: Request, sites: Sequence[str], needed: int, accept: Accept
    ) -> Mapping[str, str]:
        """Send a request, and hand over replies to it and to earlier ones until so many were good.

        The other replies stay under way, for a later call.

        Args:
            request: the server's, the same for all.
            sites: the sites to ask, of which none is under way.
            needed: the number of good replies to wait for.
            accept: called once for each reply, between the beginning of this call and its end.

        Returns:
            The sites that will not answer, each with the reason.

        Raises:
            ConfigError: for an engine without buffered rounds.
        """
        raise ConfigError("this engine has no buffered rounds: leave out buffer, or take another engine")

    def under_way(self) -> Collection[str]:
        """The sites whose reply to a request of `gather` has not been handed over."""
        return ()

    @abstractmethod
    def round_done(self, server: FederationServer) -> None:
        """Called after each round, when the state of the server can be saved."""


def run(server: FederationServer, carrier: Carrier) -> None:
    """Run a federation to its end, from the beginning or from the round of a restored server.

    Sites that join late, or could not be prepared before, are prepared during a round and take part from the
    next round on.

    Args:
        server: makes all decisions.
        carrier: sends, waits and saves.

    Raises:
        MedFedAugError: when too few sites can train, or too few updates of a round can be used.
    """
    if server.config.prospect:
        _prospect(server, carrier)
        for one in pilot_trainings(server):
            run(one, carrier)
        return
    if server.config.planning:
        everybody = carrier.connected()
        _ask(server, carrier, server.planning.request(), everybody, len(everybody), server.planning.accept)
        server.adopt_plan()
    if not server.known:
        everybody = carrier.connected()
        _ask(server, carrier, server.prepare(), everybody, len(everybody), server.accept_preparation)
        server.finish_preparation()
    while not server.trained:
        _round(server, carrier)
    training = _present(server, VALIDATE, server.sites, carrier.connected())
    _ask(server, carrier, server.validate(), training, server.needed, server.accept_validation)
    server.finish_validation()
    if not server.execution.tested:
        return
    # Every site's test counts, so this waits for all sites except those that did not answer a moment ago.
    everybody = _present(server, TEST, server.known, carrier.connected())
    needed = max(1, len(set(everybody) - server.missing()))
    _ask(server, carrier, server.test(), everybody, needed, server.accept_test)


def evaluate(evaluation: Evaluation, carrier: Carrier) -> None:
    """Let sites score models of finished runs: first they lend models of their own, if these are asked for.

    A site that does not answer a request is waited for no longer than the others in the next ones.
    """
    connected = carrier.connected()
    for request, sites in evaluation.loans(connected):
        needed = max(1, len(set(sites) - evaluation.silent))
        _ask(evaluation, carrier, request, sites, needed, evaluation.accept_loan)
    for request, sites in evaluation.scores(connected):
        needed = max(1, len(set(sites) - evaluation.silent))
        _ask(evaluation, carrier, request, sites, needed, evaluation.accept_scores)
    evaluation.finish()


def _prospect(server: FederationServer, carrier: Carrier) -> None:
    """Gather the sites' fingerprints, and tell each of them those of all."""
    asked, everybody = server.prospecting, carrier.connected()
    _ask(server, carrier, asked.request(), everybody, len(everybody), asked.accept)
    asked.finish()
    there = sorted(asked.sites)
    _ask(server, carrier, asked.telling(), there, len(there), asked.accept_receipt)


def _round(server: FederationServer, carrier: Carrier) -> None:
    connected = _worth_asking(server, carrier)
    strangers = sorted(set(connected) - server.known)
    if strangers:
        carrier.ask(server.prepare(), strangers, 0, server.accept_preparation)
    targets = server.choose_sites({*connected}.difference(carrier.under_way()))
    request = server.start_round(targets)
    _present(server, TRAIN, server.sites, connected)
    masks = server.aggregation.masks
    if masks is not None:
        request, targets = _agree_on_masks(server, masks, carrier, request, targets)
    if server.config.buffer:
        silent = carrier.gather(request, targets, server.config.buffer, server.accept)
    else:
        silent = carrier.ask(request, targets, _needed(server), server.accept)
    _record(server, request, silent)
    if masks is not None:
        confirmed = masks.accept_confirmation
        _ask(server, carrier, *_answers(server, masks.confirmation(), masks.summed, confirmed))
        _ask(server, carrier, *_answers(server, masks.opening(), masks.with_signature, masks.accept_opening))
    server.finish_round()
    if server.config.tests(server.round):
        there = sorted(server.known & set(carrier.connected()).difference(carrier.under_way()))
        _ask(server, carrier, server.test_round(), there, len(there), server.accept_round_test)
    carrier.round_done(server)


def _worth_asking(server: FederationServer, carrier: Carrier) -> list[str]:
    """The connected sites, without those that are away if the round has enough without them."""
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


def _agree_on_masks(
    server: FederationServer, masks: ServerMasks, carrier: Carrier, request: Request, sites: Sequence[str]
) -> tuple[Request, list[str]]:
    """Let the sites of a round exchange keys and shares.

    Returns:
        The request with what they need to mask their updates, and the sites that can do so.
    """
    weights = server.participation.weights({site: server.sites[site] for site in sites})
    keys = masks.keys(request, server.exchanged_once, weights)
    _ask(server, carrier, *_answers(server, keys, sites, masks.accept_keys))
    _ask(server, carrier, *_answers(server, masks.shares(), masks.with_keys, masks.accept_shares))
    return masks.training(request), masks.with_shares


def _answers(
    server: FederationServer, request: Request, sites: Sequence[str], use: Callable[[str, Reply], None]
) -> tuple[Request, Sequence[str], int, Accept]:
    """A request with what to do with its answers, of which as many are waited for as a round needs."""

    def accept(site: str, reply: Reply) -> bool:
        reason = refusal(site, partial(use, site, reply))
        if reason is not None:
            server.no_answer(request.task, site, reason)
        return reason is None

    return request, list(sites), max(1, min(_needed(server), len(sites))), accept


def _needed(server: FederationServer) -> int:
    """The number of good answers to wait for: those that a round needs, and under masks its sum."""
    masks = server.aggregation.masks
    return server.needed if masks is None else max(server.needed, masks.least_answers)


def _ask(
    server: FederationServer | Evaluation,
    carrier: Carrier,
    request: Request,
    sites: Sequence[str],
    needed: int,
    accept: Accept,
) -> None:
    _record(server, request, carrier.ask(request, sites, needed, accept))


def _record(server: FederationServer | Evaluation, request: Request, silent: Mapping[str, str]) -> None:
    for site, reason in sorted(silent.items()):
        server.no_answer(request.task, site, reason)
