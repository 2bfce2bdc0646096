"""How well the model that one site trained serves the others: FedRDN Table 3."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from monai.fl.utils.exchange_object import ExchangeObject

from medfedaug.config import RunConfig, recorded_settings
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.federation import FederationServer, Site, SiteTrainer
from medfedaug.federation.output import GLOBAL_MODEL, RESULTS, STATE, exchange_file, write_json
from medfedaug.methods import build_methods

__all__ = ["CROSS_SITE", "cross_site"]

CROSS_SITE = "cross_site.json"


def cross_site(run: str | Path, data_dir: str | Path, device: str = "auto") -> dict[str, Any]:
    """Test each site's local model at every site.

    The local model of a site is the selected global model after one more round of that site's training,
    before any averaging. The target normalises its images as it does for the global model: with its own
    statistics, where a method exchanges any. Layers that a site keeps to itself belong to its local model.

    Args:
        run: the folder of a finished run; receives ``cross_site.json``, and where that is there already, it
            is read and nothing is trained.
        data_dir: the run's data.
        device: where to compute.

    Returns:
        ``{"metric": name, "round": r, "scores": {source: {target: score}}}``.

    Raises:
        ConfigError: for a method that has no local models.
        RunFailed: when a site cannot be trained.

    Deviations:
        FedRDN says "local model" without the round. What a method keeps at the sites between rounds without
        the model needing it (control variates, for one) begins anew.
    """
    run = Path(run)
    if (run / CROSS_SITE).exists():
        return dict(json.loads((run / CROSS_SITE).read_text()))
    record = json.loads((run / RESULTS).read_text())
    config, round_ = RunConfig.from_dict(recorded_settings(record)), record["selected_round"] + 1
    if any(method.pools_data for method in build_methods(config.methods)):
        raise ConfigError(f"{run}: all images were in one place; there are no local models")
    with tempfile.TemporaryDirectory(prefix="medfedaug-cross-") as folder:
        state = Path(folder) / STATE  # copied, since training on would overwrite what belongs to the run
        if (run / STATE).exists():
            shutil.copytree(run / STATE, state)
        trainers = {name: SiteTrainer(config, data_dir, device, state / name) for name in record["sites"]}
        server = FederationServer(config)
        for name, trainer in trainers.items():
            request = replace(server.prepare(), run=record["run"])
            reply = Site(name, trainer).answer(request)
            if reply.error:
                raise RunFailed(reply.error)
            server.accept_preparation(name, reply)
        server.finish_preparation()
        once = server.start_round(list(trainers)).once
        model = torch.load(run / GLOBAL_MODEL, weights_only=True)
        beside = exchange_file(run / GLOBAL_MODEL)
        payload = torch.load(beside, weights_only=True) if beside.exists() else {}
        data = ExchangeObject(weights=model, statistics={"once": once, "payload": payload})
        scores: dict[str, dict[str, float | None]] = {}
        for source, trainer in trainers.items():
            trainer.train(data, {"round": round_})
            scores[source] = {
                name: _score(target, trainer.network, config.batch_size) for name, target in trainers.items()
            }
    result = {"metric": trainer.task.metric, "round": round_, "scores": scores}
    write_json(run / CROSS_SITE, result)
    return result


def _score(target: SiteTrainer, network: torch.nn.Module, batch_size: int) -> float | None:
    cases = target.task.evaluation_cases(target.folder, "test")
    transform = target.evaluation_transform()
    found = target.task.evaluate(network, cases, transform, target.device, batch_size)
    score: float | None = found[target.task.metric]
    return score
