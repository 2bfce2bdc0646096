"""The command `compare`: a small trial on a user's data, with a recommendation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medfedaug.cli.console import err_console, out_console, say
from medfedaug.cli.options import Data, Device, Each, JsonFile, Limit, Threads, Trained, Workers
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.runs.run import Run

_ALWAYS = ("single", "fedavg")


def _enough(rounds: int, train: Callable[[int], Run]) -> tuple[int, bool]:
    """Return a sufficient number of rounds for FedAvg, and whether it still improves after them."""
    from medfedaug.metrics.convergence import is_converged, longer
    from medfedaug.metrics.nothing_learned import nothing_learned_at

    number, run = rounds, train(rounds)
    while True:
        scores, silent = run.validation(), nothing_learned_at(run.metric, run.sites)
        if (wanted := longer(scores, rounds, learned=not silent)) is None:
            return number, not is_converged(scores)
        reason = "still improves" if not is_converged(scores) else f"has 0.000 at {', '.join(silent)}"
        say(f"fedavg {reason} after {number} rounds: training for {wanted}")
        number, run = wanted, train(wanted)


def _drop_spare_models(out: Path, tried: Path) -> None:
    """Delete models that nothing uses again: of a last round beside the selected one, of trials of rounds."""
    from medfedaug.federation.job_folder import FINAL_MODEL, GLOBAL_MODEL, exchange_file

    spare = [model.with_name(FINAL_MODEL) for model in out.rglob(GLOBAL_MODEL)]
    spare += [model for name in (GLOBAL_MODEL, FINAL_MODEL) for model in tried.rglob(name)]
    for model in spare:
        for file in (model, exchange_file(model)):
            file.unlink(missing_ok=True)


def compare(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the runs, tables and the page.")] = Path("compare"),
    methods: Annotated[
        str | None, typer.Option(help="Methods to try instead of suggested ones, separated by spaces.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each method.")] = 3,
    rounds: Annotated[
        int, typer.Option(min=3, help="Rounds of each training; at most doubled twice while fedavg improves.")
    ] = 10,
    set_: Trained = None,
    device: Device = "auto",
    workers: Workers = None,
    each: Each = None,
    threads: Threads = 0,
    limit: Limit = None,
    json_: JsonFile = None,
) -> None:
    """Try training alone, plain averaging and remedies on your own data, and recommend the next step.

    The command recommends nothing while plain averaging still improves. The same command continues an
    interrupted trial. Each run keeps one model, that of its selected round.
    """
    with err_console.status(f"reading {data}"):
        from medfedaug.analysis.score_table import Table
        from medfedaug.cli.benchmark import run_experiment
        from medfedaug.data.federation import unlabelled_sites
        from medfedaug.data.sites import find_sites
        from medfedaug.research.comparison.trial import (
            WITHOUT_OUTLINES,
            Suggestion,
            recommend,
            suggest,
            taken_in,
        )
        from medfedaug.research.sweeps.experiment import Experiment, make_experiment
        from medfedaug.runs.load_results import load_run
        from medfedaug.utils.files import write_json

        asked_for = Suggestion(tuple((methods or "").split()), "asked for")
        sites = find_sites(data, limit=limit)
        suggestion = asked_for if methods is not None else suggest(sites)
        silent = unlabelled_sites(sites)
    if silent:
        say(f"{', '.join(silent)}: no training case has an outline, and comes in last")
    combinations = list(dict.fromkeys([*_ALWAYS, *suggestion.methods]))
    say(f"trying {', '.join(combinations)} ({suggestion.reason}): {counted(seeds, 'training')} each")
    given = {"data": data, "methods": combinations, "out": out, "seeds": seeds, "limit": limit}
    given |= {"workers": workers, "each": each or None}

    def trial(number: int, weight: float = 1 - bool(silent), **changed: object) -> Experiment:
        settings = [f"rounds={number}", *([f"unlabelled_weight={weight}"] if silent else []), *(set_ or [])]
        experiment = make_experiment(None, {**given, **changed}, settings)
        if experiment.vary:
            raise ConfigError(
                f"--set {next(iter(experiment.vary))}: give one value; medfedaug benchmark compares several"
            )
        return experiment

    train = partial(run_experiment, engine="inprocess", device=device, memory=4.0, threads=threads)

    def tried(number: int) -> Run:
        # In another folder: a folder holds runs of one number of rounds.
        tried_out = out.with_name(f"{out.name}_rounds") / str(number)
        first = train(trial(number, methods=["fedavg"], seeds=1, out=tried_out), pictures=False)
        if first.failure:
            raise RunFailed(first.failure)
        return load_run(first.runs[0])

    number, rising = _enough(rounds, tried)
    advise = partial(recommend, rising=number if rising else None)
    outcome = train(trial(number), pictures=True, advise=advise)
    table, failures = outcome.tables.get("table"), [outcome.failure]
    if isinstance(table, Table):
        out_console.print(table, *filter(None, [outcome.tables.get("classes")]))
        advice = advise(table)
        if silent:
            more = {"methods": WITHOUT_OUTLINES, "out": out.with_name(f"{out.name}_unlabelled")}
            further = train(trial(number, 1, **more), pictures=False)
            advice += taken_in(further.tables.get("table"), table, silent)
            failures.append(further.failure)
        for sentence in advice:
            say(sentence)
        if json_ is not None:
            scores = {
                row.label: {"mean": row.mean.mean, "sites": {s: v.mean for s, v in row.sites.items()}}
                for row in table.rows
            }
            content = {"methods": combinations, "reason": suggestion.reason, "metric": table.metric}
            write_json(json_, {**content, "scores": scores, "recommendation": advice})
        say(f"{out}/report.html, {out}/table.md")
    if failures := [*filter(None, failures)]:
        raise RunFailed(failures[0])
    _drop_spare_models(out, out.with_name(f"{out.name}_rounds"))
