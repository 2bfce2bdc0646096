"""`pilot_trainings`: the server's half of a pilot, one federation after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from medfedaug.federation.planning.pilot import pilot_training
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.convergence import longer

if TYPE_CHECKING:
    from medfedaug.federation.server.server import FederationServer


def pilot_trainings(server: FederationServer) -> Iterator[FederationServer]:
    """Yield the trainings that a job announced; each is to be run to its end before the next is taken.

    The first method is trained again, with twice the rounds, while its validation score rises
    (`medfedaug.metrics.convergence.longer`). The others get the rounds of its last training. The results of
    each method's last training are kept in `FederationServer.pilot`.
    """
    job, rounds = server.config, server.config.rounds
    first = job.pilot[0] if job.pilot else ""
    for methods in job.pilot:
        wanted: int | None = rounds
        while wanted is not None:
            rounds, told = wanted, {"methods": methods, "rounds": wanted}
            training = server.another(pilot_training(job, told), told)
            yield training
            server.pilot[methods] = training.results()
            wanted = longer(_validation(training), job.rounds) if methods == first else None


def _validation(training: FederationServer) -> list[float | None]:
    """Mean validation score of each round."""
    return [mean_score(training.record.scores_of(entry).values()) for entry in training.rounds]
