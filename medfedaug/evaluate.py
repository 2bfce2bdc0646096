"""A finished model on the cases of one site or of several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from monai.fl.utils.constants import ExtraItems
from monai.fl.utils.exchange_object import ExchangeObject

from medfedaug.config import RunConfig
from medfedaug.data.sites import find_sites, is_site
from medfedaug.errors import ConfigError, DataError, first_line
from medfedaug.federation.output import RESULTS
from medfedaug.federation.site import SiteTrainer

__all__ = ["evaluate_model", "load_run_config", "open_model"]


def load_run_config(path: str | Path) -> RunConfig:
    """The configuration that a run's ``results.json`` records.

    Raises:
        ConfigError: when there is none.
    """
    path = Path(path)
    try:
        return RunConfig.from_dict(json.loads(path.read_text())["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no configuration of a run ({error})") from error


def open_model(
    model: str | Path,
    data: str | Path,
    *,
    config: str | Path | None = None,
    limit: int | None = None,
    device: str = "auto",
) -> Iterator[SiteTrainer]:
    """A global model at one site after the other, with what the site needs to use it.

    Args:
        model: ``global_model.pt`` of a run.
        data: a site's folder, or one that holds several sites' folders.
        config: the run's ``results.json``; by default the one beside the model.
        limit: at most so many cases a site.
        device: where to compute.

    Yields:
        The site's trainer, the model in its network; one at a time, since it holds the site's images.

    Raises:
        MedFedAugError: one line that says what is wrong and where.
    """
    model, data = Path(model), Path(data)
    run = load_run_config(config or model.parent / RESULTS)
    weights = _load_weights(model)
    folders = [data] if data.is_dir() and is_site(data) else [site.path for site in find_sites(data)]
    run = RunConfig.from_dict({**run.to_dict(), "limit": limit, "holdout": []})
    for folder in folders:
        trainer = SiteTrainer(run, folder, device)
        trainer.initialize({ExtraItems.CLIENT_NAME: folder.resolve().name})
        if trainer.kept_keys:
            raise ConfigError(
                f"{model}: its run kept layers at the sites, so that the global model is not complete"
            )
        trainer.receive(ExchangeObject(weights=weights))
        yield trainer


def evaluate_model(
    model: str | Path,
    data: str | Path,
    *,
    config: str | Path | None = None,
    split: str = "test",
    limit: int | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Score a global model on the images of sites, each normalised as at the site that they come from.

    Args:
        model: ``global_model.pt`` of a run.
        data: a site's folder, or one that holds several sites' folders.
        config: the run's ``results.json``; by default the one beside the model.
        split: ``"test"`` or ``"validation"``.
        limit: at most so many cases a site.
        device: where to compute.

    Returns:
        ``{"sites": {name: {metric: value, "cases": {...}}}, "mean": {metric: value}}``.

    Raises:
        MedFedAugError: one line that says what is wrong and where.
    """
    sites: dict[str, Any] = {}
    for trainer in open_model(model, data, config=config, limit=limit, device=device):
        if not trainer.folder.cases.get(split):
            raise DataError(f"no case in the split {split!r}", site=trainer.name, path=trainer.folder.path)
        sites[trainer.name] = trainer.evaluate(ExchangeObject(), {"split": split}).metrics
    metric = trainer.task.metric
    known = [scores[metric] for scores in sites.values() if scores[metric] is not None]
    return {"split": split, "sites": sites, "mean": {metric: sum(known) / len(known) if known else None}}


def _load_weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails anywhere between zip and pickle
        raise ConfigError(f"{path}: not a model ({first_line(error)})") from error
    if not isinstance(weights, Mapping) or not all(isinstance(v, torch.Tensor) for v in weights.values()):
        raise ConfigError(f"{path}: not a state dict")
    return dict(weights)
