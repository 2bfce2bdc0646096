"""The commands `compare` and `benchmark`: methods compared on custom data or in the papers' protocols."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from medfedaug.cli.catalogue import check_methods
from medfedaug.cli.console import SweepProgress, err_console, out_console, resumable, say
from medfedaug.cli.options import Data, Device, Each, Init, JsonFile, Limit, Pictures, Threads, existing_file
from medfedaug.cli.options import Workers as WorkersOption
from medfedaug.config.comparison import parse_budget
from medfedaug.errors import RunFailed, warn

if TYPE_CHECKING:
    from medfedaug.research.papers.presets import Preset
    from medfedaug.research.sweeps.experiment import Experiment
    from medfedaug.research.sweeps.search import Choices
    from medfedaug.research.sweeps.workers import Workers


def compare(
    data: Data,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Methods to try besides single and fedavg: fedrdn fedrdn,fedfa ... By default one for each "
            "cause of differences: fedrdn fedbn ditto fedfa."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time for all trainings: 90s, 10min, 2h.")
    ] = "10min",
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.html.")] = Path("compare"),
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Settings of all trainings, as in benchmark."),
    ] = None,
    device: Device = "auto",
    threads: Threads = 0,
    limit: Limit = None,
    json_: JsonFile = None,
) -> None:
    """Measure what training together and a few methods bring on your data, by short trainings.

    Each site by itself, all sites by plain averaging, and each method are trained with two seeds, for as many
    rounds as the budget allows, and compared on validation patients. The same command continues an
    interrupted comparison.
    """
    seconds = parse_budget(budget)
    for text in methods or ():
        check_methods(text)
    with err_console.status(f"reading {data}"):
        from medfedaug.analysis.gain_page import gain_table
        from medfedaug.config.run import Execution
        from medfedaug.research.sweeps.short_trainings import PAGE, Request, compare_methods
        from medfedaug.simulate import check_device
        from medfedaug.utils.files import write_json

        check_device(device)
    request = Request(
        data=data,
        out=out,
        methods=tuple(methods or ()),
        budget=seconds,
        settings=tuple(set_ or ()),
        limit=limit,
    )

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "stage":
            say(event["text"])

    with resumable():
        results = compare_methods(request, device=device, execution=Execution(threads=threads), on_event=show)
    if results["gains"]:
        out_console.print(gain_table(results))
    for sentence in results["conclusions"]:
        say(sentence)
    if json_ is not None:
        write_json(json_, results)
    say(f"{out / PAGE}, {out / 'compare.json'}")


_DECODED = 4 * 2**30  # bytes of decoded images that each process keeps


def benchmark(
    name: Annotated[str | None, Argument(help="A paper's table or figure, or a protocol (--list).")] = None,
    data: Annotated[Path | None, Option(help="Folder of sites, or a protocol's published files.")] = None,
    methods: Annotated[list[str] | None, Option(help="Combinations of methods: fedavg fedrdn,fedfa")] = None,
    out: Annotated[Path | None, Option(help="Folder for runs, tables and report.html.")] = None,
    experiment: Annotated[Path | None, Option(metavar="FILE", help="YAML; options take precedence.")] = None,
    seeds: Annotated[int | None, Option(min=1, help="Runs of each combination. [default: 5]")] = None,
    scale: Annotated[float | None, Option(help="Share of the protocol's rounds.")] = None,
    set_: Annotated[
        list[str] | None,
        Option("--set", metavar="NAME=VALUE,...", help="METHOD.ARG, a setting, or an option of the data."),
    ] = None,
    plan_: Annotated[str | None, Option("--plan", metavar="FILE|auto", help="Plan of volumes.")] = None,
    holdout: Annotated[list[str] | None, Option(help="Sites to leave out in turn; or all, none.")] = None,
    folds: Annotated[int | None, Option(min=0, help="Folds by patient, 3 or more.")] = None,
    engine: Annotated[str, Option(metavar="NAME", help="inprocess or nvflare.")] = "inprocess",
    device: Device = "auto",
    search: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            callback=existing_file,
            help="YAML with ranges of settings to search, by validation only.",
        ),
    ] = None,
    trials: Annotated[int, Option(min=1, help="Number of configurations that a search tries.")] = 20,
    workers: WorkersOption = None,
    each: Each = None,
    threads: Threads = 0,
    limit: Limit = None,
    init: Init = None,
    pictures: Pictures = True,
    list_: Annotated[bool, Option("--list", help="List papers' experiments, or show one.")] = False,
) -> None:
    """Compare methods x seeds x folds x settings, on your own data or in a paper's protocol.

    The same command continues an interrupted comparison.
    """
    if list_:
        _print_list(name)
        return
    _check_names(name, methods or ())
    settings = [*(set_ or []), *([f"plan={plan_}"] if plan_ is not None else [])]
    given: dict[str, Any] = {"data": data, "methods": methods or None, "out": out, "seeds": seeds}
    given |= {"scale": scale, "holdout": holdout or None, "folds": folds, "limit": limit, "init": init}
    given |= {"workers": workers, "each": each or None}
    failures: list[str] = []
    choices: Choices = {}
    if search is not None:
        from medfedaug.research.sweeps.search import read_choices

        choices = read_choices(search)
        given |= {"methods": methods or choices.get("methods")}
    for comparison in _experiments(name, experiment, given, settings):
        sentences: list[str] = []
        if choices:
            from medfedaug.research.sweeps.search import search as search_best

            with resumable(), SweepProgress(trials) as progress:
                result = search_best(
                    comparison,
                    choices,
                    trials,
                    on_event=progress.show,
                    device=device,
                    workers=_workers(comparison),
                    threads=threads,
                )
            comparison, sentences = result.experiment, result.sentences()
        failures += _run(
            comparison, engine=engine, device=device, threads=threads, pictures=pictures, sentences=sentences
        )
    if failures:
        raise RunFailed("; ".join(failures))


def _workers(comparison: Experiment) -> Workers:
    from medfedaug.research.sweeps.workers import find_workers

    return find_workers(comparison.workers, comparison.out, memory=_DECODED, each=comparison.each)


def _check_names(name: str | None, methods: Sequence[str]) -> None:
    """Check the names of a comparison before PyTorch is imported."""
    from medfedaug.research.papers.papers import find_entry
    from medfedaug.research.papers.presets import find_preset

    if name:
        (find_entry if ":" in name else find_preset)(name)
    for text in methods:
        check_methods(text)


def _experiments(
    name: str | None, file: Path | None, given: dict[str, Any], settings: list[str]
) -> list[Experiment]:
    """Return the experiments of a command: one, or one for each of an entry's protocols with data."""
    from medfedaug.research.datasets.benchmarks import is_available
    from medfedaug.research.papers.papers import find_entry
    from medfedaug.research.papers.presets import PRESETS
    from medfedaug.research.sweeps.experiment import make_experiment

    if not name or ":" not in name:
        return [make_experiment(file, {**given, "protocol": name}, settings)]
    protocols = [] if find_entry(name).reason else find_entry(name).protocols
    data, out, several = given["data"], given["out"], len(protocols) > 1
    available = [each for each in protocols if data is None or is_available(PRESETS[each].benchmark, data)]
    lacking = [each for each in protocols if each not in available]
    if available and lacking:
        warn(f"{name} is run without {', '.join(lacking)}, whose data are not in {data}")
    return [
        make_experiment(
            file,
            {**given, "entry": name, "protocol": each, "out": out / each if out and several else out},
            settings,
        )
        for each in available or protocols[:1] or [""]
    ]


def _run(
    experiment: Experiment,
    *,
    engine: str,
    device: str,
    threads: int,
    pictures: bool,
    sentences: Sequence[str],
) -> list[str]:
    """Make the runs of an experiment, print its tables, and return a line on failed runs, if any."""
    from medfedaug.config.run import Execution
    from medfedaug.research.sweeps.experiment import write_experiment
    from medfedaug.research.sweeps.sweep import check_folder, run_all
    from medfedaug.research.sweeps.tables import write_tables

    preset = experiment.preset()
    runs = experiment.runs(preset)
    check_folder(experiment.out)
    write_experiment(experiment, preset)
    with resumable(), SweepProgress(len(runs)) as progress:
        failed = run_all(
            runs,
            preset,
            experiment.root,
            experiment.out,
            engine=engine,
            device=device,
            workers=_workers(experiment),
            execution=Execution(threads=threads),
            on_event=progress.show,
            init=experiment.init,
        )
    if len(failed) < len(runs):
        with err_console.status("tables and page"):
            tables, notes = write_tables(
                runs,
                preset,
                experiment.out,
                data=experiment.root if pictures else None,
                device=device,
                failed=failed,
                sentences=sentences,
            )
        for table in tables.values():
            out_console.print(table)
        for note in [*sentences, *notes]:
            say(f"- {note}")
        say(", ".join(f"{experiment.out}/{name}" for name in ("table.md", "report.html", "experiment.yml")))
    return [
        f"{len(failed)} of {len(runs)} runs failed; the first is {folder}: {reason}"
        for folder, reason in [*failed.items()][:1]
    ]


def _print_list(name: str | None) -> None:
    from medfedaug.research.papers.papers import entries, find_entry
    from medfedaug.research.papers.presets import PRESETS, find_preset

    known, presets = list(entries().values()), list(PRESETS.values())
    if name:
        known = [find_entry(name)] if ":" in name else []
        presets = [PRESETS[p] for p in known[0].protocols] if known else [find_preset(name)]
    for entry in known:
        say(f"{entry.name}  {entry.source}: {entry.title}")
        say("    " + (f"cannot be run: {entry.reason}" if entry.reason else ", ".join(entry.protocols)))
        for line in (f"{len(entry.published)} published rows", *entry.notes) if name else ():
            say(f"    - {line}")
    for preset in presets:
        say(preset.name)
        facts = (preset.benchmark, preset.protocol, preset.config["network"], preset.schedule, preset.source)
        say("    " + " · ".join((*facts, f"{preset.cost} a run on one core")))
        for comparison in known[0].comparisons(preset.name) if name and known else ():
            say(f"    {comparison}")
        if name:
            _print_details(preset)


def _print_details(preset: Preset) -> None:
    from medfedaug.research.datasets.benchmarks import BENCHMARKS

    say("    " + ", ".join(f"{key} {value}" for key, value in preset.settings.items()))
    for reading in preset.readings:
        say(f"    - {reading}")
    known = BENCHMARKS[preset.benchmark]
    say(f"    data from {known.source}")
    say(f"    expected: {known.layout}")
