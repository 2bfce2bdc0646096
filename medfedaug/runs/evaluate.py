"""Evaluate a finished run on the cases of sites, also against the models that sites trained by themselves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medfedaug.data.sites import find_sites, is_federation, is_site
from medfedaug.errors import ConfigError
from medfedaug.federation.site.model import SiteModel
from medfedaug.federation.site.site import all_scores
from medfedaug.federation.site.trainer import SiteTrainer
from medfedaug.metrics.registry import GLOBAL, LOCAL, PERSONAL, described, over_sites
from medfedaug.metrics.significance import difference, paired_by_patient
from medfedaug.runs.finished_run import FinishedRun


def open_model(
    model: str | Path,
    data: str | Path,
    *,
    limit: int | None = None,
    device: str = "auto",
) -> Iterator[tuple[SiteModel, bool]]:
    """Open a global model at one site after the other.

    `medfedaug.runs.finished_run.FinishedRun.open` describes ``model``. The data are a site's folder, or a
    folder with several sites' folders, with at most ``limit`` cases per site.

    Yields:
        The site's model, and whether it is complete: a site that did not train lacks the layers that sites
        keep. One site at a time, since a model holds the site's images.
    """
    run = FinishedRun.open(model)
    for name in sites_of(run, Path(data)):
        opened = run.at_site(name, data, device, limit=limit)
        yield opened, opened.recall(run.local_state(name))


def sites_of(run: FinishedRun, data: Path) -> list[str]:
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
    for name in sites_of(run, Path(data)):
        trainer = run.trainer(name, data, device, limit=limit)
        trainer.folder.cases_of(split)
        scores = trainer.evaluate_round(split, run.round, full=True)
        sites[name] = all_scores(scores, trainer.folder.patients(split))  # nothing leaves the site here
    scored = {name: run.whose(name, split) for name in sites}
    return {"split": split, "scored": scored, "sites": sites, **over_sites(sites, trainer.task.metrics)}


def evaluate_sites(
    model: str | Path,
    data_dir: str | Path,
    local: str | Path,
    *,
    device: str = "auto",
    state: str | Path | None = None,
) -> dict[str, Any]:
    """Score a finished run at each site on its own test cases, and compare it with the site's own model.

    A site scores its local model; the global model, with the statistics of its images as its only own part;
    and its personal model, if sites keep entries or state of the run.

    `medfedaug.runs.finished_run.FinishedRun.open` describes ``model`` and ``state``. In the run ``local``
    each site trained by itself (``single``). The result is the content of ``evaluation.json``.
    """
    run, alone = FinishedRun.open(model, state=state), FinishedRun.open(local)
    _check(run, alone)
    personal = run.composition.scored["test"] != GLOBAL
    sites: dict[str, dict[str, Any]] = {}
    for name in [site.name for site in find_sites(data_dir)]:
        models = sites[name] = {}
        for scored in (LOCAL, GLOBAL, *([PERSONAL] if personal else [])):
            source = alone if scored == LOCAL else run
            opened = source.trainer(name, data_dir, device)
            scores = _global(opened) if scored == GLOBAL else opened.evaluate_round("test", source.round)
            patients = opened.folder.patients("test")
            models[scored] = all_scores(scores, patients)
            if scored != LOCAL:
                models[scored]["against"] = _against(models, scored, patients)
    task = run.composition.task()
    described_runs = {GLOBAL: run, LOCAL: alone} | ({PERSONAL: run} if personal else {})
    trained = run.record.get("sites", {})
    return {
        "split": "test",
        "metric": task.metric,
        **described(task.metrics),
        "models": {model: _described(model, of) for model, of in described_runs.items()},
        "unseen": sorted(sites.keys() - set(trained)) if trained else [],
        "sites": dict(sorted(sites.items())),
        "mean": {
            model: over_sites({site: by[model] for site, by in sites.items()}, task.metrics)["mean"]
            for model in described_runs
        },
        "missing": {
            site: {GLOBAL: f"site {site} is not in {data_dir}"} for site in sorted({*trained} - sites.keys())
        },
    }


def _check(run: FinishedRun, alone: FinishedRun) -> None:
    for each in (run, alone):
        each.check_whole()
        each.composition.check_apart("an evaluation")
    for name in ("task", "classes"):
        ours, theirs = getattr(alone.config, name), getattr(run.config, name)
        if ours != theirs:
            raise ConfigError(f"the local models differ from the federation in {name}: {ours}, {theirs}")
    if not run.composition.shared:
        raise ConfigError("the sites of this run share no model: give it as --local")
    if alone.composition.shared:
        raise ConfigError(
            "the sites of a run of local models share some of the network: give a run with --methods single"
        )


def _global(trainer: SiteTrainer) -> dict[str, Any]:
    """Score the received model with the statistics of this site's images as its only own part."""
    if trainer.kept_keys and not trainer.complete_network():
        return trainer.no_scores()
    assert trainer.samples is not None
    return trainer.score(trainer.samples.evaluation("test"), True)


def _against(models: dict[str, Any], scored: str, patients: dict[str, int]) -> dict[str, Any]:
    """Return the differences from the models that were scored before, over common patients."""
    cases = {
        name: {case: score for case, score in scores["cases"].items() if score is not None}
        for name, scores in models.items()
    }
    unit = "patients" if patients else "cases"
    found = {
        other: difference(paired_by_patient(cases[scored], cases[other], patients), unit)
        for other in cases
        if other != scored
    }
    return {other: values for other, values in found.items() if values}


def _described(model: str, run: FinishedRun) -> dict[str, Any]:
    return {
        "scored": run.composition.scored["test"] if model == PERSONAL else model,
        "methods": [method["name"] for method in run.config.methods],
        "runs": [
            {
                "run": run.record["run"],
                "round": run.round,
                "sha256": run.sha256,
                "sites": [*run.record.get("sites", ())],
            }
        ],
    }
