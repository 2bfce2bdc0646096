"""Score the model that one site trained at all other sites: FedRDN Table 3."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation import FederationServer, Request, SiteTrainer
from medfedaug.federation import run as federate
from medfedaug.federation.in_process import Checkpointing, InProcessCarrier
from medfedaug.federation.job_folder import GLOBAL_MODEL, RESULTS, STATE, exchange_file
from medfedaug.federation.messages.messages import TRAIN
from medfedaug.federation.protocol import Accept
from medfedaug.utils.files import write_json

CROSS_SITE = "cross_site.json"

Visit = Callable[[str, Mapping[str, SiteTrainer]], None]


def cross_site(run: str | Path, data_dir: str | Path, device: str = "auto") -> dict[str, Any]:
    """Test each site's local model at every site.

    The local model of a site is the selected global model after one more round of that site's training,
    before any averaging. The target normalises its images as for the global model: with its own statistics,
    where a method exchanges any. Layers that stay at a site belong to its local model.

    Args:
        run: the folder of a finished run; receives ``cross_site.json``. If it has this file of the same run
            and round already, nothing is trained.

    Returns:
        ``{"metric": name, "run": id, "round": r, "scores": {source: {target: score}}}``.

    Deviations:
        FedRDN says "local model" without the round. What a method keeps at the sites between rounds without
        the model needing it (control variates, for one) begins anew.
    """
    run = Path(run)
    record = json.loads((run / RESULTS).read_text())
    round_ = record["selected_round"] + 1
    if (run / CROSS_SITE).exists():
        result = dict(json.loads((run / CROSS_SITE).read_text()))
        # The folder may have another run by now, or more rounds.
        if (result["run"], result["round"]) == (record["run"], round_):
            return result
    scores: dict[str, dict[str, float | None]] = {}

    def visit(source: str, sites: Mapping[str, SiteTrainer]) -> None:
        network = sites[source].network
        scores[source] = {name: _score(target, network) for name, target in sites.items()}

    metric = train_local_models(run, data_dir, device, visit)
    result = {"metric": metric, "run": record["run"], "round": round_, "scores": scores}
    write_json(run / CROSS_SITE, result)
    return result


def train_local_models(run: Path, data_dir: str | Path, device: str, visit: Visit) -> str:
    """Train the local model of each site (`cross_site`).

    Args:
        visit: called with the site, whose network is its local model, and all sites.

    Returns:
        The name of the metric.
    """
    record = json.loads((run / RESULTS).read_text())
    config, round_ = RunConfig.from_dict(record["config"]), record["selected_round"] + 1
    config = replace(config, rounds=max(config.rounds, round_))  # sites refuse later rounds
    try:
        server = FederationServer(replace(config, rounds=round_, buffer=0))
    except ConfigError as error:
        raise ConfigError(f"{run}: {error}") from error
    with tempfile.TemporaryDirectory(prefix="medfedaug-cross-") as folder:
        state = Path(folder) / STATE  # copied, since training would overwrite the run's files
        if (run / STATE).exists():
            shutil.copytree(run / STATE, state)
        trainers = {name: SiteTrainer(config, data_dir, device, state / name) for name in record["sites"]}
        # The state of the run's server after the selected round.
        model, exchange = torch.load(run / GLOBAL_MODEL, weights_only=True), exchange_file(run / GLOBAL_MODEL)
        server.run, server.round, server.state = record["run"], round_ - 1, model
        server.payload = torch.load(exchange, weights_only=True) if exchange.exists() else {}
        carrier = _LocalCarrier(server, trainers, Checkpointing(server, trainers.values(), None))
        carrier.visit = visit
        with suppress(_Visited):
            federate(server, carrier)
    return server.record.metric


class _Visited(Exception):
    """Every site's model was visited: the round is not averaged."""


class _LocalCarrier(InProcessCarrier):
    """Visits the model of each site as soon as it is trained."""

    visit: Visit

    def ask(self, request: Request, sites: Sequence[str], needed: int, accept: Accept) -> Mapping[str, str]:
        """Let the sites train one after another, then end the federation."""
        if request.task != TRAIN:
            return super().ask(request, sites, needed, accept)
        for source in sites:
            reply = self.sites[source].answer(request)
            if reply.error:
                raise RunFailed(reply.error)
            self.visit(source, {name: site.trainer for name, site in self.sites.items()})
        raise _Visited


def _score(target: SiteTrainer, network: torch.nn.Module) -> float | None:
    cases = target.task.evaluation_cases(target.folder, "test")
    transform = target.evaluation_transform()
    scores = target.task.evaluate(network, cases, transform, target.device, target.config.batch_size)
    score: float | None = scores[target.task.metric]
    return score
