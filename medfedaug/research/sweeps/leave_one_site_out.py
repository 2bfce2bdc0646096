"""Leave one site out: train on the others, and score the unseen one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, DataError
from medfedaug.federation.job_folder import RESULTS
from medfedaug.federation.messages.run_definition import define
from medfedaug.metrics.registry import UNSEEN, over_sites
from medfedaug.runs.leftovers import is_json_with
from medfedaug.simulate import Simulation, run_simulation
from medfedaug.utils.files import write_json

__all__ = ["HOLDOUT", "leave_one_site_out"]

HOLDOUT = "holdout.json"
"""File of the scores of all held-out sites."""


def leave_one_site_out(simulation: Simulation, sites: Sequence[str] | None = None) -> dict[str, Any]:
    """Run a federation without each site in turn, and collect the scores of the unseen sites.

    Args:
        simulation: its folder receives ``holdout.json``, and a folder for each held-out site with the files
            of a run; sites that it holds out already are unseen in every run. The event ``"holdout"`` names
            the present site.
        sites: the sites to hold out in turn; by default all that could train.

    Returns:
        The content of ``holdout.json``: ``{"metric": name, "unseen": {site: score}, "seen": {site: mean over
        the sites that trained}, "mean": mean over the held-out sites, "metrics": {name: these three},
        "scored": the models of the scores, "config": {...}}``. The first three are of the metric that selects
        the round. A score is ``None`` where the model is not complete without the site
        (`medfedaug.methods.FedBN`), and a mean where sites measure a length in different units.

    Raises:
        MedFedAugError: one line that names the mistake and its place.
    """
    out, config, on_event = simulation.out, simulation.config, simulation.on_event
    if (out / RESULTS).exists():
        raise ConfigError(
            f"{out} holds the results of a run; choose another folder for runs without each site"
        )
    if (out / HOLDOUT).exists() and not is_json_with(out / HOLDOUT, "metric", "unseen", "seen"):
        raise ConfigError(f"{out / HOLDOUT} is not of such runs; choose another folder")
    folders = simulation.sites or find_sites(simulation.data, limit=config.limit)
    able = [site.name for site in folders if site.trains and site.name not in config.holdout]
    chosen = list(sites) if sites is not None else able
    for name in chosen:
        if name not in able:
            raise ConfigError(f"cannot hold out {name!r}; the sites that train are {', '.join(able)}")
    if len(able) < 3:
        raise DataError(
            f"two sites must remain when one is left out, and {len(able)} can train", path=simulation.data
        )
    task = define(config).task(config, normalised=False)
    tests: dict[str, dict[str, Any]] = {}
    for name in chosen:
        if on_event is not None:
            on_event({"event": "holdout", "site": name})
        run = replace(config, holdout=(*config.holdout, name))
        results = run_simulation(replace(simulation, out=out / name, config=run, sites=folders))
        tests[name], scored = results["test"], results.get("scored", {})
        metrics = {metric: _scores(tests, metric) for metric in task.metrics}
        table = {
            "metric": task.metric,
            **metrics[task.metric],
            "metrics": metrics,
            "scored": {"unseen": UNSEEN, "seen": scored.get("test", "not recorded")},
            "config": config.to_dict(),
        }
        write_json(out / HOLDOUT, table)  # after each run, so that an interrupted call leaves a table
    return dict(json.loads((out / HOLDOUT).read_text()))


def _scores(tests: Mapping[str, dict[str, Any]], metric: str) -> dict[str, Any]:
    """Return the scores of the held-out sites, and of the sites that trained without them."""
    scores = {site: test["unseen"].get(site, {}) for site, test in tests.items()}
    return {
        "unseen": {site: by_metric.get(metric) for site, by_metric in scores.items()},
        "seen": {site: test["mean"][metric] for site, test in tests.items()},
        "mean": over_sites(scores, [metric])["mean"][metric],
    }
