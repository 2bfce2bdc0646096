"""Let sites score models of finished runs, each on its own cases, with any engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from medfedaug.config.machine import Machine
from medfedaug.config.run import Execution
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError
from medfedaug.federation.engine import SiteEvaluation
from medfedaug.federation.engines import check_device, find_engine
from medfedaug.federation.server.evaluation import FEDERATION, EvaluatedRun, Evaluation
from medfedaug.runs.finished_run import FinishedRun

__all__ = ["evaluate_sites", "evaluated_runs"]


def evaluated_runs(
    model: str | Path,
    local: Sequence[str] = (),
    *,
    config: str | Path | None = None,
    state: str | Path | None = None,
) -> tuple[dict[str, EvaluatedRun], dict[str, Path]]:
    """Open the runs of an evaluation, and the folders of their sites' state.

    Args:
        model: see `medfedaug.runs.finished_run.FinishedRun.open`.
        local: models of sites that trained alone: the folder of a run with ``single``, or ``SITE=RUN`` with a
            site's own run, repeated.
        config: the record of the evaluated run, see `medfedaug.runs.finished_run.FinishedRun.open`.
        state: the folder of its sites' state, see there.

    Raises:
        ConfigError: one line that names the mistake and its place.
    """
    opened = {FEDERATION: ("", FinishedRun.open(model, config=config, state=state))}
    for text in local:
        owner, equals, path = text.rpartition("=")
        key = f"local {owner}" if equals else "local"
        if key in opened:
            raise ConfigError(f"--local {text}: there are local models of {owner or 'all sites'} already")
        opened[key] = (owner, FinishedRun.open(path))
    if "local" in opened and len(opened) > 2:
        raise ConfigError("--local: give one run of all sites, or one run for each site")
    runs = {key: _evaluated(run, owner) for key, (owner, run) in opened.items()}
    return runs, {key: run.state for key, (_, run) in opened.items()}


def _evaluated(run: FinishedRun, owner: str) -> EvaluatedRun:
    run.check_whole()
    return EvaluatedRun(
        config=run.config,
        run=run.record["run"],
        round=run.round,
        weights=run.whole_weights(owner) if owner else {k: run.weights[k] for k in run.composition.shared},
        payload=run.payload,
        owner=owner,
        sites=tuple(run.record.get("sites", ())),
        sha256=run.sha256,
    )


def evaluate_sites(
    model: str | Path,
    data_dir: str | Path,
    *,
    local: Sequence[str] = (),
    engine: str = "inprocess",
    device: str = "auto",
    on_event: Callable[[dict[str, Any]], None] | None = None,
    config: str | Path | None = None,
    state: str | Path | None = None,
    execution: Execution | None = None,
) -> dict[str, Any]:
    """Let the sites of a folder score a finished run, each on its own cases, as in a job.

    Args:
        model: see `evaluated_runs`.
        data_dir: the folder that holds the sites' folders.
        local: see `evaluated_runs`.
        on_event: see `medfedaug.federation.server.evaluation.Evaluation`.
        engine: its name; see `medfedaug.federation.engines.find_engine`.
        device: the sites' device.
        config: see `evaluated_runs`.
        state: see `evaluated_runs`.
        execution: see `medfedaug.config.run.Execution`.

    Returns:
        The content of ``evaluation.json``.

    Raises:
        MedFedAugError: one line that names the mistake and its place.
    """
    carrier = find_engine(engine)
    check_device(device)
    runs, states = evaluated_runs(model, local, config=config, state=state)
    Evaluation(runs)  # checked before data are read
    return carrier.evaluate(
        SiteEvaluation(
            runs=runs,
            states=states,
            data_dir=Path(data_dir),
            sites=[site.name for site in find_sites(data_dir)],
            device=device,
            execution=execution or Execution(),
            machine=Machine.from_environment(),
            on_event=on_event,
        )
    )
