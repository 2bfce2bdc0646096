"""Commands that define a run: `simulate` carries it out on this machine, `export` writes it as a job."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import typer
from typer import Option

from medfedaug.cli.catalogue import check_methods, check_network
from medfedaug.cli.console import RoundProgress, err_console, print_scores, resumable, say, starting
from medfedaug.cli.options import (
    Assignments,
    Bundle,
    Config,
    Data,
    Device,
    Given,
    Init,
    Loop,
    Methods,
    Pictures,
    PlanFile,
    PlanMemory,
    Report,
    is_given,
    takes,
)
from medfedaug.config.bundle_reference import content_hash, described_data, locate
from medfedaug.config.comparison import REFERENCE, REMEDIES, ComparisonConfig, choose_methods, parse_budget
from medfedaug.config.machine import Machine
from medfedaug.config.options import read_text
from medfedaug.config.plan import Plan, PlanningConfig, load_plan
from medfedaug.config.run import Execution, RunConfig, task_defaults
from medfedaug.config.training_scripts import loop_reference
from medfedaug.errors import ConfigError
from medfedaug.utils.files import parse_json
from medfedaug.utils.printable import counted
from medfedaug.utils.validation import check_choice

_AUTO = "auto"


@takes(
    RunConfig,
    Plan,
    Execution,
    Machine,
    without=("task", "in_channels", "channel_names", "classes"),
    holdout="Site that is tested but does not train; repeatable.",
)
def simulate(
    data: Data,
    out: Annotated[Path, Option(help="Folder for results, model and report.")],
    *,
    given: Given,
    methods: Methods = None,
    config: Config = None,
    set_: Assignments = None,
    plan: PlanFile = None,
    plan_memory: PlanMemory = None,
    bundle: Bundle = None,
    task: Annotated[str | None, Option(help="By default the data's task.", hidden=True)] = None,
    engine: Annotated[str, Option(metavar="NAME", help="nvflare, inprocess, ...")] = "nvflare",
    device: Device = "auto",
    init: Init = None,
    loop: Loop = None,
    check: Annotated[
        bool, Option("--check", help="With --loop: run one batch and print its connections.", hidden=True)
    ] = False,
    pictures: Pictures = True,
    report: Report = True,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace the results of an earlier run.")] = False,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted run.")] = False,
) -> None:
    """Train a federation on this machine, and test it at every site."""
    options, arguments = _settings(
        given, methods, set_, plan=plan, memory=plan_memory, bundle=bundle, init=init, loop=loop
    )
    # In a process that has computed before, OpenMP may have threads, and a fork would hang.
    prepares = engine == "nvflare" and not check and "torch" not in sys.modules
    with starting():
        if prepares:
            import nvflare  # noqa: F401, first, since it looks through all modules that are imported before it

        from medfedaug.data.sites import describe_federation, num_patients
        from medfedaug.federation.job_folder import REPORT
        from medfedaug.metrics.registry import REMEDIES, nothing_learned_at, nothing_learned_in
        from medfedaug.metrics.segmentation import oversized_in
        from medfedaug.runs.run import recorded_input
        from medfedaug.simulate import Simulation, run_simulation

        if prepares:
            from medfedaug.nvflare_jobs.simulator import forked_simulator, simulator  # noqa: F401, for the fork
    if prepares:
        forked_simulator.prepare()

    options["methods"] = _methods(options, methods, arguments)
    for name in ("in_channels", "channel_names", "classes"):  # these follow from the data
        options.pop(name, None)
    options["task"] = task or options.get("task")
    with err_console.status(f"reading {data}"):
        simulation = Simulation.of(
            data,
            out,
            engine=engine,
            device=device,
            overwrite=overwrite,
            resume=resume,
            pictures=pictures,
            report=report,
            execution=Execution(**given[Execution]),
            machine=Machine(**given[Machine]),
            init=init,
            loop=loop,
            **options,
        )
    settled = simulation.config
    patients = [num_patients(site) for site in simulation.sites]
    dims = f"{settled.plan.spatial_dims}D"
    say(describe_federation(settled.task, dims, settled.classes, patients))
    if added := [method["name"] for method in settled.methods[len(options["methods"]) :]]:
        say(
            f"sites have outlined different structures: {' and '.join(added)} join the methods "
            "(--partial-loss marginal leaves them out)"
        )
    if check:
        from medfedaug.cli.loop_check import check_loop

        check_loop(simulation)
        return
    with resumable("--resume"), RoundProgress(settled.rounds) as progress:
        results = run_simulation(replace(simulation, on_event=progress.show))
    title = f"test, model of round {results['selected_round']}"
    print_scores(results["test"], title, results.get("scored", {}))
    if reason := nothing_learned_in(results["test"]):
        say(f"nothing was learned: {reason}. {REMEDIES}", "yellow", err=True)
    else:
        metric = next(iter(results["test"]["mean"]), "")
        by_site = {site: entry.get(metric) for site, entry in results["test"]["sites"].items()}
        for site in nothing_learned_at(metric, by_site):
            say(f"nothing was learned at {site}: {metric} 0.000", "yellow", err=True)
    for sentence in oversized_in(results["test"]):
        say(sentence, "yellow", err=True)
    if missing := results["test"].get("missing", {}):
        text = f"{', '.join(missing)}: not tested ({out}/results.json has the reason) and not in the mean. "
        model = quote(f"{out}/global_model.pt")
        text += f"After repair: medfedaug evaluate --model {model} --data {quote(str(data))}"
        say(text, "yellow", err=True)
    say(f"input: {recorded_input(results)}")
    say(f"augmentation: {results['config']['augmentation']}")
    say(f"{out}/results.json" + (f", {out}/report.html" if (out / REPORT).exists() else ""))


@takes(RunConfig, Plan, Execution, without=("min_sites", "round_timeout", "limit", "site_speed"))
def export(
    context: typer.Context,
    out: Annotated[Path, Option(help="Job folder to write, for nvflare job submit.")],
    *,
    given: Given,
    methods: Methods = None,
    config: Config = None,
    compare: Annotated[bool, Option("--compare", help="Compare methods as medfedaug compare does.")] = False,
    budget: Annotated[str | None, Option(metavar="TIME", help="Time of --compare, such as 2h.")] = None,
    set_: Assignments = None,
    plan: PlanFile = None,
    plan_memory: PlanMemory = None,
    bundle: Bundle = None,
    min_sites: Annotated[int, Option(min=2, metavar="N", help="Sites that a round needs.")] = 2,
    round_timeout: Annotated[float, Option(min=0, metavar="X", help="Seconds to wait for a site.")] = 7200,
    resume: Annotated[bool, Option("--resume", help="Continue this interrupted run.")] = False,
    init: Init = None,
    loop: Loop = None,
) -> None:
    """Write a run or a comparison as a job, without data, paths and code (except --loop)."""
    if out.exists():
        raise ConfigError(f"{out} exists already; choose another folder")
    execution = Execution(**{**given[Execution], "min_sites": min_sites, "round_timeout": round_timeout})
    if budget is not None and not compare:
        raise ConfigError("--budget is for a comparison (--compare); a run has --rounds")
    names = (methods or " ".join(REMEDIES)).split() if compare else []
    listed = ",".join(dict.fromkeys(part for name in names for part in name.split(","))) or methods
    options, arguments = _settings(
        given, listed, set_, plan=plan, memory=plan_memory, bundle=bundle, init=init, loop=loop
    )
    if options["bundle"]:
        described = described_data(options["bundle"])
        options |= {name: value for name, value in described.items() if not is_given(context, name)}
    if compare:
        for option, value in {"init": init, "loop": loop, "resume": resume}.items():
            if value:
                raise ConfigError(f"--{option} is for a run, not for a comparison")
        _export_comparison(names, options, arguments, budget, execution, out, needed=bool(methods))
        return
    reference, script = loop_reference(loop) if loop is not None else (None, None)
    from medfedaug.federation.composition import Composition, check_counted, with_trimmed_mean
    from medfedaug.federation.messages.initial_weights import InitialWeights
    from medfedaug.nvflare_jobs import MedFedAugRecipe
    from medfedaug.simulate import usual_settings
    from medfedaug.utils.event_text import EventLines

    options["methods"] = _methods(options, methods, arguments)
    settled = RunConfig.from_dict(usual_settings(options["task"], options, own_data=True))
    check_counted(settled)
    plain, settled = settled, with_trimmed_mean(settled, min_sites)
    if settled is not plain:
        say("five sites or more: the trimmed mean averages the models (trimmed_mean)")
    initial = None
    if init is not None:
        initial = InitialWeights.read(init, Composition(settled).network.state_dict())
        settled = replace(settled, init=initial.digest)
    recipe = MedFedAugRecipe(
        config=replace(settled, loop=reference),
        name=out.name,
        resume=resume,
        execution=execution,
        initial=initial,
        script=script,
    )
    recipe.export(job_dir=str(out.parent))
    if reference is not None:
        note = "the job carries code" if script else "of an installed package"
        say(f"training loop {reference} ({note}): sites take part that allow it with")
        say(f"  medfedaug site configure KIT --allow-loop {reference}")
    if initial is not None:
        for line in EventLines().lines({"event": "init", **initial.report}):
            say(line)
    say(f"augmentation: {settled.augmentation}")
    say(f"{out}: submit it with `nvflare job submit -j {quote(str(out))}`")


def _export_comparison(
    names: Sequence[str],
    options: dict[str, Any],
    arguments: Mapping[str, dict[str, Any]],
    budget: str | None,
    execution: Execution,
    out: Path,
    *,
    needed: bool,
) -> None:
    from medfedaug.federation.composition import Composition, check_counted, with_trimmed_mean
    from medfedaug.methods import parse_methods
    from medfedaug.nvflare_jobs.job.comparison import ComparisonRecipe
    from medfedaug.simulate import usual_settings

    run = RunConfig.from_dict(
        usual_settings(options["task"], {**options, "methods": parse_methods(REFERENCE)}, own_data=True)
    )

    def configure(name: str) -> RunConfig:
        parts = [part["name"] for part in parse_methods(name)]
        chosen = {part: arguments[part] for part in parts if part in arguments}
        config = replace(run, methods=tuple(parse_methods(name, chosen)))
        Composition(config).check_apart("a job")
        check_counted(config)
        return with_trimmed_mean(config, execution.min_sites)

    configs, left_out = choose_methods(names, configure, needed=needed)
    comparison = ComparisonConfig(
        run=run,
        methods={name: list(config.methods) for name, config in configs.items()},
        budget=parse_budget(budget) if budget else 0.0,
    )
    recipe = ComparisonRecipe(
        config=comparison, name=out.name, min_clients=execution.min_sites, execution=execution
    )
    recipe.export(job_dir=str(out.parent))
    for name, reason in left_out.items():
        say(f"without {name}: {reason}")
    time = f" within {budget}" if budget else ""
    say(
        f"{len(comparison.configs())} trainings ({', '.join(comparison.order)}; {comparison.seeds} seeds) of "
        f"up to {counted(run.rounds, 'round')}{time}; the server writes compare.json"
    )
    say(f"{out}: submit it with `nvflare job submit -j {quote(str(out))}`")


def _plan(file: str | None, memory: float | None, given: Given) -> dict[str, Any]:
    """Return settings of the run: the plan with the values of single options, or the planning."""
    if memory is not None and file != _AUTO:
        raise ConfigError(f"--plan-memory is for --plan {_AUTO}")
    plan = load_plan(file) if file not in (None, _AUTO) else Plan()
    settings: dict[str, Any] = {"plan": Plan.from_dict({**plan.to_dict(), **given[Plan]})}
    if file == _AUTO:
        settings["planning"] = PlanningConfig.keeping((*given[Plan], *given[RunConfig]), memory)
    return settings


def _settings(
    given: Given,
    methods: str | None,
    assigned: Sequence[str] | None,
    *,
    plan: str | None,
    memory: float | None,
    bundle: str | None,
    init: Path | None,
    loop: str | None,
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Check names, values and files before importing PyTorch for further checks.

    Returns:
        The settings of the run, and the arguments of methods by ``--set``, which also sets values of all
        groups in ``given``.
    """
    check_methods(methods or "")
    arguments: dict[str, dict[str, Any]] = {}
    for item in assigned or ():
        target, equals, value = item.partition("=")
        method, dot, name = target.strip().rpartition(".")
        if not (equals and name):
            raise ConfigError(
                f"--set {item!r}: write METHOD.ARG=VALUE, such as fedfa.prob=0.3, or NAME=VALUE, such as "
                "image_size=32"
            )
        if dot:
            parsed: Any = value
            with suppress(ValueError):
                parsed = parse_json(value)
            arguments.setdefault(method, {})[name] = parsed
        else:
            groups = {entry.name: cls for cls in given for entry in fields(cls)}
            check_choice("--set: setting", name, groups)
            given[groups[name]][name] = read_text(groups[name], name, value.strip())
    check_methods(methods or "", arguments)
    # A training script augments the images itself.
    settings = {**({} if loop is None else {"augmentation": "none"}), **given[RunConfig]}
    if methods is None and not settings.get("methods"):
        raise ConfigError("--methods is missing: name one or more, such as --methods fedrdn,fedfa")
    if methods is None and arguments:
        raise ConfigError(f"--set {next(iter(arguments))}.…: give its method with --methods too")
    for name, option in (("init", init), ("loop", loop)):
        if settings.pop(name, None) and option is None:
            raise ConfigError(f"--{name} is missing: the settings of --config are of a run with it")
    reference = settings.get("bundle") or {}
    folder = bundle or reference.get("name")
    settings["bundle"] = locate(folder) if folder else {}
    if reference and not bundle and content_hash(settings["bundle"]) != reference["hash"]:
        raise ConfigError(f"--bundle {folder}: its content differs from that of --config; give the Bundle")
    settings |= _plan(plan, memory, given)
    if "task" in settings and not folder:  # a Bundle has the other settings
        usual = task_defaults(settings["task"], settings["plan"], own_data=True)
        check_network(RunConfig.from_dict({**usual, "methods": [{"name": methods}], **settings}).network)
    return settings, arguments


def _methods(
    settings: dict[str, Any], methods: str | None, arguments: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the named methods, or the methods of the settings, after a check that they combine."""
    from medfedaug.methods import build_methods, parse_methods

    selected = settings["methods"] if methods is None else parse_methods(methods, arguments)
    build_methods(selected)
    return list(selected)
