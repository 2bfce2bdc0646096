"""The trainings of a pilot: several methods one after the other, with the settings of one job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError
from medfedaug.metrics.convergence import ATTEMPTS


def pilot_training(job: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return a training of a job's pilot, if the job announced it; server and sites derive the same."""
    methods, rounds = settings.get("methods"), settings.get("rounds")
    if {*settings} != {"methods", "rounds"} or type(methods) is not str or methods not in job.pilot:
        raise ConfigError(
            f"a training of the pilot is of {', '.join(job.pilot)}, got {str(dict(settings))[:80]}"
        )
    allowed = [times * job.rounds for times in ATTEMPTS]
    if type(rounds) is not int or rounds not in allowed:
        raise ConfigError(
            f"a training of the pilot has {', '.join(map(str, allowed))} rounds, got {str(rounds)[:20]}"
        )
    chosen = ({"name": methods, "args": {}},)
    return replace(job, prospect=False, pilot=(), methods=chosen, rounds=rounds)
