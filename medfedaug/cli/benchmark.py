"""The command `benchmark`: comparisons on one's own data, and those of the papers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from medfedaug.cli.catalogue import check_methods
from medfedaug.cli.console import err_console, out_console, say
from medfedaug.cli.options import Device, Each, Init, Limit, Pictures, Threads
from medfedaug.cli.options import Workers as WorkersOption
from medfedaug.cli.progress import SweepProgress, resumable
from medfedaug.errors import ConfigError, RunFailed, warn

if TYPE_CHECKING:
    from medfedaug.analysis.score_table import Table
    from medfedaug.analysis.text_table import TextTable
    from medfedaug.experiments.experiment import Experiment
    from medfedaug.experiments.preset import Preset
    from medfedaug.experiments.search import Choices, Searched
    from medfedaug.experiments.workers import Workers


_TABLE_EVERY = 60.0  # seconds between two writings of table.md, while runs are made


class ValuesInARow(TyperCommand):
    """A command whose repeatable options also take several values in a row: ``--methods fedavg fedrdn``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {name for p in self.params if getattr(p, "multiple", False) for name in p.opts}
        repeated: list[str] = []
        option, values = "", 0
        for arg, following in zip(args, [*args[1:], "--"], strict=True):
            if arg in repeatable and following.startswith("--"):
                raise ConfigError(f"{arg} needs a value, or several in a row")
            if arg.startswith("--"):
                name, with_value, _ = arg.partition("=")
                option, values = name if name in repeatable else "", len(with_value)
            else:
                repeated += [option] if option and values else []
                values += 1
            repeated.append(arg)
        return super().parse_args(ctx, repeated)


def benchmark(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A paper's table or figure (fedfa+:table10), or a protocol (office_caltech_10); --list "
            "names them all. None for an experiment of your own."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder that holds one folder per site; with a protocol, the published files, or their "
            "parent if it has the data set's name."
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Combinations of methods, separated by spaces: fedavg fedrdn,fedfa+ ..."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs (METHODS/VARIANT/seed-K), tables and report.html."),
    ] = None,
    experiment: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A YAML file with data, methods, out, seeds, folds, settings, ...; options given besides "
            "take precedence. It is written to --out as experiment.yml.",
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Each combination runs with seeds 0, 1, ... [default: 5]")
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Share of the protocol's rounds to run; below 1 results are marked as reduced."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE,...",
            help="An argument of a method (METHOD.ARG), a setting of the run (rounds, network, patch_size, "
            "...) or an option of the data; several values are run in turn.",
        ),
    ] = None,
    plan_: Annotated[
        str | None,
        typer.Option("--plan", metavar="FILE|auto", help="A plan of volumes, for data of your own."),
    ] = None,
    fraction: Annotated[
        list[str] | None, typer.Option(help="Shares of each site's training cases, for instance 1/6 1/2 1.")
    ] = None,
    local_epochs: Annotated[
        list[int] | None, typer.Option(help="Local epochs per round, for instance 1 5 20.")
    ] = None,
    statistics_noise: Annotated[
        list[float] | None,
        typer.Option(help="Standard deviations of noise on fedfa's statistics, for instance 0 0.1 0.4."),
    ] = None,
    holdout: Annotated[
        list[str] | None, typer.Option(help="Sites to leave out in turn; all for all of them, none for none.")
    ] = None,
    folds: Annotated[
        int | None,
        typer.Option(min=0, help="Number of folds by patient, 3 or more, so that every patient is tested."),
    ] = None,
    cross_site: Annotated[
        bool, typer.Option("--cross-site", help="Also test each site's local model at every site.")
    ] = False,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="inprocess: all runs share the decoded images; nvflare: each run decodes its own.",
        ),
    ] = "inprocess",
    device: Device = "auto",
    search: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Search settings: a YAML file says what each may be (fedfa.prob: {low: 0, high: 1}). Only "
            "validation is seen; the best configuration alone is tested, with all seeds.",
        ),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Number of configurations that a search tries.")] = 20,
    workers: WorkersOption = None,
    each: Each = None,
    memory: Annotated[
        float, typer.Option(min=0, help="GiB of decoded images that each process keeps.")
    ] = 4.0,
    threads: Threads = 0,
    limit: Limit = None,
    init: Init = None,
    pictures: Pictures = True,
    cost: Annotated[
        bool,
        typer.Option(
            "--cost",
            help="Measure in place of the runs: time of a step and of inference, parameters, bytes, memory.",
        ),
    ] = False,
    list_: Annotated[
        bool,
        typer.Option(
            "--list",
            help="List the papers' tables, figures and protocols, or the details of one; with --data, say "
            "whether its data exist.",
        ),
    ] = False,
) -> None:
    """Compare methods x seeds x folds x settings, on your own data or in a paper's protocol.

    An interrupted comparison is continued by the same command.
    """
    if list_:
        _print_list(name, data)
        return
    for text in methods or ():
        check_methods(text)
    shorthands = {"fraction": fraction, "local_epochs": local_epochs, "fedfa.noise": statistics_noise}
    settings = [*(set_ or []), *(f"{k}={','.join(map(str, v))}" for k, v in shorthands.items() if v)]
    settings += [f"plan={plan_}"] if plan_ is not None else []
    given = {
        **{"data": data, "methods": methods or None, "out": out, "seeds": seeds},
        **{"scale": scale, "holdout": holdout or None, "folds": folds, "limit": limit, "init": init},
        **{"cross_site": cross_site or None, "workers": workers, "each": each or None},
    }
    failures = []
    choices: Choices = {}
    if search is not None:
        from medfedaug.experiments.search import read_choices

        choices = read_choices(search)
        given |= {"methods": methods or choices.get("methods")}
    for asked in _asked(name, experiment, given, settings):
        if cost:
            _measure_costs(asked, device, threads)
            continue
        sentences: list[str] = []
        if choices:
            made_by = _workers(asked, memory)
            found = _search(asked, choices, trials, device=device, workers=made_by, threads=threads)
            asked, sentences = found.experiment, found.sentences()
        outcome = run_experiment(
            asked,
            engine=engine,
            device=device,
            memory=memory,
            threads=threads,
            pictures=pictures,
            advise=lambda scores, first=sentences: first,  # type: ignore[misc]
        )
        for table in outcome.tables.values():
            out_console.print(table)
        for note in [*sentences, *outcome.notes]:
            say(f"- {note}")
        if outcome.tables:
            written = ("table.md", "report.html", "experiment.yml")
            say(", ".join(f"{asked.out}/{file}" for file in written))
        if outcome.failure:
            failures.append(outcome.failure)
    if failures:
        raise RunFailed("; ".join(failures))


def _workers(asked: Experiment, memory: float) -> Workers:
    from medfedaug.experiments.workers import find_workers

    return find_workers(asked.workers, asked.out, memory=int(memory * 2**30), each=asked.each)


def _search(asked: Experiment, choices: Choices, trials: int, **options: Any) -> Searched:
    from medfedaug.experiments.search import search

    with resumable(), SweepProgress(trials) as progress:
        return search(asked, choices, trials, on_event=progress.show, **options)


def _measure_costs(asked: Experiment, device: str, threads: int) -> None:
    """Print what the methods of an experiment cost, and write it beside its runs."""
    from medfedaug.experiments.cost import cost_table

    preset = asked.preset()
    with err_console.status("measuring"):
        table = cost_table(asked.runs(preset), preset, asked.root, device=device, threads=threads)
    table.save(asked.out / "cost")
    table.draw().savefig(asked.out / "cost.svg", metadata={"Date": None})
    out_console.print(table)
    say(f"{asked.out}/cost.md, .csv, .tex, .svg")


def _asked(
    name: str | None, file: Path | None, given: dict[str, Any], settings: list[str]
) -> list[Experiment]:
    """The experiments of a command: that of a protocol, or of an entry one for each protocol with data."""
    from medfedaug.data.benchmarks import is_available
    from medfedaug.experiments.experiment import make_experiment
    from medfedaug.experiments.papers import find_entry
    from medfedaug.experiments.presets import PRESETS

    if not name or ":" not in name:
        return [make_experiment(file, {**given, "protocol": name}, settings)]
    protocols = [] if find_entry(name).reason else find_entry(name).protocols
    data, out, several = given["data"], given["out"], len(protocols) > 1
    there = [found for found in protocols if data is None or is_available(PRESETS[found].benchmark, data)]
    lacking = [found for found in protocols if found not in there]
    if there and lacking:
        warn(f"{name} is run without {', '.join(lacking)}, whose data are not in {data}")
    return [
        make_experiment(
            file,
            {**given, "entry": name, "protocol": found, "out": out / found if out and several else out},
            settings,
        )
        for found in there or protocols[:1] or [""]
    ]


@dataclass(frozen=True)
class Outcome:
    """Result of an experiment.

    Args:
        tables: see `medfedaug.experiments.tables.write_tables`; none where all runs failed.
        notes: see there.
        runs: the folders of the finished runs.
        failure: one line on the runs that failed; empty where none did.
    """

    tables: dict[str, TextTable]
    notes: list[str]
    runs: list[Path]
    failure: str


def run_experiment(
    asked: Experiment,
    *,
    engine: str,
    device: str,
    memory: float,
    threads: int,
    pictures: bool,
    advise: Callable[[Table], list[str]] = lambda scores: [],
) -> Outcome:
    """Make the runs of an experiment, with their progress, then tables and page."""
    from medfedaug.config.run import Execution
    from medfedaug.experiments.experiment import write_experiment
    from medfedaug.experiments.sweep import check_folder, run_all
    from medfedaug.experiments.tables import write_scores, write_tables

    preset = asked.preset()
    runs = asked.runs(preset)
    check_folder(asked.out)
    write_experiment(asked, preset)
    written = time.monotonic()

    def show(event: dict[str, Any]) -> None:
        nonlocal written
        progress.show(event)
        if event["event"] == "run" and event["made"] and time.monotonic() - written > _TABLE_EVERY:
            write_scores(runs, preset, asked.out)
            written = time.monotonic()

    with resumable(), SweepProgress(len(runs)) as progress:
        failed = run_all(
            runs,
            preset,
            asked.root,
            asked.out,
            engine=engine,
            device=device,
            workers=_workers(asked, memory),
            execution=Execution(threads=threads),
            on_event=show,
            init=asked.init,
        )
    tables: dict[str, TextTable] = {}
    notes: list[str] = []
    if len(failed) < len(runs):
        with err_console.status("tables and page"):
            tables, notes = write_tables(
                runs,
                preset,
                asked.out,
                data=asked.root if pictures else None,
                across=asked.cross_site,
                device=device,
                failed=failed,
                advise=advise,
            )
    failure = ""
    if failed:
        folder, reason = next(iter(failed.items()))
        failure = f"{len(failed)} of {len(runs)} runs failed, the first of them {folder}: {reason}"
    finished = [asked.out / run.folder for run in runs if run.folder not in failed]
    return Outcome(tables, notes, finished, failure)


def _print_list(name: str | None, data: Path | None) -> None:
    """Print all that can be run, or one protocol or entry with its details."""
    from medfedaug.experiments.papers import entries, find_entry
    from medfedaug.experiments.presets import PRESETS, find_preset

    known, presets = list(entries().values()), list(PRESETS.values())
    if name:
        known = [find_entry(name)] if ":" in name else []
        presets = [PRESETS[p] for p in known[0].protocols] if known else [find_preset(name)]
    there: dict[str, str] = {}
    if data is not None:
        from medfedaug.data.benchmarks import is_available  # and with it PyTorch

        with err_console.status("looking"):
            for found in {preset.benchmark for preset in presets}:
                there[found] = "  data: there" if is_available(found, data) else "  data: NOT there"
    for entry in known:
        say(f"{entry.name}  {entry.source}: {entry.title}")
        say("    " + (f"cannot be run: {entry.reason}" if entry.reason else ", ".join(entry.protocols)))
        for line in (f"{len(entry.published)} published rows", *entry.notes) if name else ():
            say(f"    - {line}")
    for preset in presets:
        say(f"{preset.name}{there.get(preset.benchmark, '')}")
        told = (preset.benchmark, preset.protocol, preset.config["network"], preset.schedule, preset.source)
        say("    " + " · ".join((*told, f"{preset.cost} a run on one core")))
        for one in known[0].comparisons(preset.name) if name and known else ():
            say("    " + str(one))
        if name:
            _print_details(preset)


def _print_details(preset: Preset) -> None:
    from medfedaug.cli.catalogue import describe_data_set

    say("    " + ", ".join(f"{key} {value}" for key, value in preset.settings.items()))
    for reading in preset.readings:
        say(f"    - {reading}")
    facts = describe_data_set(preset.benchmark).facts
    say(f"    data from {facts['get it from']}")
    say(f"    expected: {facts['layout']}")
