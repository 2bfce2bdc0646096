"""A finished model on the cases of one site or of several."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monai.fl.utils.exchange_object import ExchangeObject

from medfedaug.data.sites import find_sites, is_federation, is_site
from medfedaug.errors import ConfigError, DataError
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.metrics.registry import over_sites
from medfedaug.privacy import PrivacyPolicy, Pseudonyms, released_scores
from medfedaug.runs.finished_run import FinishedRun

__all__ = ["evaluate_model", "open_model"]


def open_model(
    model: str | Path,
    data: str | Path,
    *,
    config: str | Path | None = None,
    limit: int | None = None,
    device: str = "auto",
    state: str | Path | None = None,
) -> Iterator[tuple[SiteTrainer, int]]:
    """A global model at one site after the other.

    Args:
        model: see `medfedaug.runs.finished_run.FinishedRun.open`, as for ``config`` and ``state``.
        data: a site's folder, or one that holds several sites' folders.
        config: the run's ``results.json``.
        limit: the largest number of cases per site.
        device: where to compute.
        state: where the sites keep what is theirs.

    Yields:
        The site's trainer with the global model in its network, and the round that the model is of, for
        `SiteTrainer.recall_round`. One site at a time, since a trainer holds the site's images.

    Raises:
        MedFedAugError: one line that says what is wrong and where.
    """
    return _at_sites(FinishedRun.open(model, config=config, state=state), Path(data), limit, device)


def _at_sites(
    run: FinishedRun, data: Path, limit: int | None, device: str
) -> Iterator[tuple[SiteTrainer, int]]:
    single = data.is_dir() and is_site(data) and not is_federation(data)
    names = [data.resolve().name] if single else [site.name for site in find_sites(data)]
    if run.composition.personal and not run.payload and not run.sites_with_layers:
        raise ConfigError(
            f"{run.model}: its run left layers or weights at the sites, and {run.state} has none; "
            "say where with --state"
        )
    for name in names:
        yield run.trainer(name, data, device, limit=limit), run.round


def evaluate_model(
    model: str | Path,
    data: str | Path,
    *,
    config: str | Path | None = None,
    split: str = "test",
    limit: int | None = None,
    device: str = "auto",
    state: str | Path | None = None,
    pseudonyms: Pseudonyms | None = None,
) -> dict[str, Any]:
    """Score a global model on the images of sites, each normalised as at the site that they come from.

    Args:
        model: see `open_model`, as for all that is not named here.
        data: a site's folder, or one that holds several sites' folders.
        config: the run's ``results.json``.
        split: ``"test"`` or ``"validation"``.
        limit: the largest number of cases per site.
        device: where to compute.
        state: where the sites keep what is theirs.
        pseudonyms: what stands for the names of the cases; by default they keep their names.

    Returns:
        The split; ``sites``, ``mean``, ``worst`` and ``disparity`` as under ``test`` in ``results.json``; and
        under ``scored`` whose model each site's scores are of
        (`medfedaug.runs.finished_run.FinishedRun.whose`).

    Raises:
        MedFedAugError: one line that says what is wrong and where.
    """
    run = FinishedRun.open(model, config=config, state=state)
    sites: dict[str, Any] = {}
    for trainer, round_ in _at_sites(run, Path(data), limit, device):
        if not trainer.folder.cases.get(split):
            raise DataError(f"no case in the split {split!r}", site=trainer.name, path=trainer.folder.path)
        scores = trainer.evaluate(ExchangeObject(), {"split": split, "round": round_, "full": True})
        # Nothing leaves the site here: as in a simulation, with which patient each case is of.
        policy, patients = PrivacyPolicy.of_simulation(), trainer.folder.patients(split)
        found = released_scores(scores.metrics or {}, policy, patients)
        sites[trainer.name] = pseudonyms.scores(found) if pseudonyms else found
    scored = {name: run.whose(name, split) for name in sites}
    return {"split": split, "scored": scored, "sites": sites, **over_sites(sites, trainer.task.metrics)}
