"""Evaluate a finished model on the cases of one or several sites."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medfedaug.data.folders import is_federation, is_site
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError, DataError
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.site import all_scores
from medfedaug.metrics.registry import over_sites
from medfedaug.runs.finished_run import FinishedRun

__all__ = ["evaluate_model", "open_model"]


def open_model(
    model: str | Path,
    data: str | Path,
    *,
    limit: int | None = None,
    device: str = "auto",
    state: str | Path | None = None,
) -> Iterator[tuple[SiteModel, bool]]:
    """Open a global model at one site after the other.

    `medfedaug.runs.finished_run.FinishedRun.open` describes ``model`` and ``state``. The data are
    a site's folder, or a folder with several sites' folders, with at most ``limit`` cases per site.

    Yields:
        The site's model, and whether it is complete: a site that did not train lacks the layers that sites
        keep. One site at a time, since a model holds the site's images.
    """
    run = FinishedRun.open(model, state=state)
    for name in _sites(run, Path(data)):
        opened = run.at_site(name, data, device, limit=limit)
        yield opened, opened.recall(run.local_state(name))


def _sites(run: FinishedRun, data: Path) -> list[str]:
    """List the sites of a folder, or the folder's site; refuse a run without its layers of the sites."""
    single = data.is_dir() and is_site(data) and not is_federation(data)
    names = [data.resolve().name] if single else [site.name for site in find_sites(data)]
    if run.composition.personal and not run.payload and not run.sites_with_layers:
        raise ConfigError(
            f"{run.model}: its run left layers or weights at the sites, and {run.state} has none; "
            "name their folder with --state"
        )
    return names


def evaluate_model(
    model: str | Path,
    data: str | Path,
    *,
    split: str = "test",
    limit: int | None = None,
    device: str = "auto",
    state: str | Path | None = None,
) -> dict[str, Any]:
    """Score a global model on the images of sites, with each site's normalisation.

    Returns:
        The split, ``"test"`` or ``"validation"``; ``sites``, ``mean``, ``worst`` and ``disparity`` as under
        ``test`` in ``results.json``; and under ``scored`` the model of each site's scores.
    """
    run = FinishedRun.open(model, state=state)
    sites: dict[str, Any] = {}
    for name in _sites(run, Path(data)):
        trainer = run.trainer(name, data, device, limit=limit)
        if not trainer.folder.cases.get(split):
            raise DataError(f"no case in the split {split!r}", site=name, path=trainer.folder.path)
        scores = trainer.evaluate_round(split, run.round, full=True)
        sites[name] = all_scores(scores, trainer.folder.patients(split))  # nothing leaves the site here
    scored = {name: run.whose(name, split) for name in sites}
    return {"split": split, "scored": scored, "sites": sites, **over_sites(sites, trainer.task.metrics)}
