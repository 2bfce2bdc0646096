"""`pilot_trainings`: the server's half of a pilot, one training after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from medfedaug.federation.planning.pilot import pilot_training
from medfedaug.metrics.base import mean_score
from medfedaug.metrics.convergence import longer

if TYPE_CHECKING:
    from medfedaug.federation.server.server import FederationServer


def pilot_trainings(server: FederationServer) -> Iterator[FederationServer]:
    """Yield the trainings of a job's pilot; run each to its end before taking the next.

    The first method is trained again, with twice the rounds, while its validation score rises
    (`medfedaug.metrics.convergence.longer`). The other methods get the rounds of its last training.
    `FederationServer.pilot` keeps the results of each method's last training.
    """
    job, rounds = server.config, server.config.rounds
    first = job.pilot[0] if job.pilot else ""
    for methods in job.pilot:
        wanted: int | None = rounds
        while wanted is not None:
            rounds, settings = wanted, {"methods": methods, "rounds": wanted}
            training = server.another(pilot_training(job, settings), settings)
            yield training
            server.pilot[methods] = training.results()
            scores = (training.record.scores_of(entry) for entry in training.rounds)
            validation = [mean_score(by_site.values()) for by_site in scores]
            wanted = longer(validation, job.rounds) if methods == first else None
