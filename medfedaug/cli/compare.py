"""The command `compare`: a small trial on a user's own data, with a recommendation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medfedaug.cli.console import err_console, out_console, say
from medfedaug.cli.options import Data, Device, Each, Limit, Threads, Workers
from medfedaug.errors import ConfigError, RunFailed
from medfedaug.utils.printable import counted

if TYPE_CHECKING:
    from medfedaug.analysis.score_table import Table
    from medfedaug.cli.benchmark import Outcome
    from medfedaug.experiments.experiment import Experiment

_ALWAYS = ("single", "fedavg")


def compare(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the runs, tables and the page.")] = Path("compare"),
    methods: Annotated[
        str | None,
        typer.Option(help="Methods to try in place of those that `inspect` suggests, separated by spaces."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each method.")] = 3,
    rounds: Annotated[
        int,
        typer.Option(
            min=3,
            help="Communication rounds of each training; doubled, at most twice, while the validation "
            "score of fedavg still rises.",
        ),
    ] = 10,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of every training (network, image_size, batch_size, ...), as in `benchmark`.",
        ),
    ] = None,
    device: Device = "auto",
    workers: Workers = None,
    each: Each = None,
    threads: Threads = 0,
    limit: Limit = None,
    json_: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Also write scores and recommendation to this file."),
    ] = None,
) -> None:
    """Try training alone, plain averaging and remedies on your own data, and recommend what to do next.

    Nothing is recommended while plain averaging still improves. An interrupted trial is continued by the
    same command.
    """
    with err_console.status(f"reading {data}"):
        from medfedaug.analysis.score_table import Table
        from medfedaug.cli.benchmark import run_experiment
        from medfedaug.data.quality.inspection import inspect_sites
        from medfedaug.experiments.experiment import make_experiment
        from medfedaug.experiments.trial import Suggestion, recommend, suggest
        from medfedaug.utils.files import write_json

        if methods is None:
            suggestion = suggest(inspect_sites(data, limit))
        else:
            suggestion = Suggestion(tuple(methods.split()), "asked for")
    tried = list(dict.fromkeys([*_ALWAYS, *suggestion.methods]))
    say(f"trying {', '.join(tried)} ({suggestion.reason}): {counted(seeds, 'training')} each")
    given = {"data": data, "methods": tried, "out": out, "seeds": seeds, "limit": limit}
    given |= {"workers": workers, "each": each or None}

    def trial(number: int, **changed: object) -> Experiment:
        asked = make_experiment(None, {**given, **changed}, [f"rounds={number}", *(set_ or [])])
        if asked.vary:
            raise ConfigError(
                f"--set {next(iter(asked.vary))}: give one value; medfedaug benchmark compares several"
            )
        return asked

    train = partial(run_experiment, engine="inprocess", device=device, memory=4.0, threads=threads)
    number, rising = _until_converged(trial, train, rounds, out)
    advise = partial(recommend, rising=number if rising else None)
    outcome = train(trial(number), pictures=True, advise=advise)
    table = outcome.tables.get("table")
    if isinstance(table, Table):
        out_console.print(table)
        if "classes" in outcome.tables:
            out_console.print(outcome.tables["classes"])
        advice = advise(table)
        for sentence in advice:
            say(sentence)
        if json_ is not None:
            told = {"methods": tried, "reason": suggestion.reason, "metric": table.metric}
            write_json(json_, {**told, "scores": _scores(table), "recommendation": advice})
        say(f"{out}/report.html, {out}/table.md")
    if outcome.failure:
        raise RunFailed(outcome.failure)


def _scores(table: Table) -> dict[str, dict[str, Any]]:
    """Return the mean scores of a table by methods."""
    return {
        row.label: {"mean": row.mean.mean, "sites": {s: one.mean for s, one in row.sites.items()}}
        for row in table.rows
    }


def _until_converged(
    trial: Callable[..., Experiment], train: Callable[..., Outcome], rounds: int, out: Path
) -> tuple[int, bool]:
    """Train FedAvg for more rounds while it improves; returns the last number, and whether it still does."""
    from medfedaug.metrics.convergence import is_converged, longer
    from medfedaug.runs.load_results import load_run

    wanted: int | None = rounds
    number, validation = rounds, list[float | None]()
    while wanted is not None:
        if wanted > rounds:
            say(f"fedavg still improves after {number} rounds: training for {wanted}")
        number = wanted
        # Beside the trial: a folder holds runs of one number of rounds.
        tried_out = out.with_name(f"{out.name}_rounds") / str(number)
        first = train(trial(number, methods=["fedavg"], seeds=1, out=tried_out), pictures=False)
        if first.failure:
            raise RunFailed(first.failure)
        validation = load_run(first.runs[0]).validation()
        wanted = longer(validation, rounds)
    return number, not is_converged(validation)
