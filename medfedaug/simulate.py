"""`simulate`: a whole federation on one machine, from the data to a finished run."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Unpack

from medfedaug.config.bundle_reference import allow
from medfedaug.config.machine import Machine
from medfedaug.config.plan import Plan
from medfedaug.config.run import Execution, RunConfig, RunKeywords, asked_settings, task_defaults
from medfedaug.config.training_scripts import loop_reference
from medfedaug.data.base import SiteFolder, is_own_data
from medfedaug.data.checks import check_same_files, fingerprint_sites
from medfedaug.data.sites import arrange, check_voxels, federation_settings, find_sites, is_federation
from medfedaug.errors import ConfigError, RunFailed, config_errors, warn
from medfedaug.federation import FederationServer
from medfedaug.federation.composition import Composition, bundle_module, define, with_open_classes
from medfedaug.federation.engine import Engine, FederationRun, check_device, find_engine
from medfedaug.federation.in_process import PooledEngine
from medfedaug.federation.job_folder import (
    FINAL_MODEL,
    HASHES,
    RESULTS,
    STATE,
    STATISTICS,
    file_hashes,
    server_checkpoint,
)
from medfedaug.federation.messages.initial_weights import InitialWeights
from medfedaug.federation.site.model import SiteModel
from medfedaug.methods.registry import parse_methods
from medfedaug.runs.folder import (
    check_results,
    is_json_with,
    keep_fingerprint,
    kept_fingerprint,
    make_workspace,
    only_process,
    publish,
    remove_results,
    remove_state,
    remove_workspaces,
    sites_lock,
)
from medfedaug.runs.load_results import check_finished
from medfedaug.runs.prediction.predict import LoadedRun
from medfedaug.statistics import save_statistics
from medfedaug.utils.files import parse_json, remove_unfinished, write_json
from medfedaug.utils.plugins import added_module
from medfedaug.utils.validation import check_choice

__all__ = ["Simulation", "configure", "run_simulation", "simulate"]

_FILES = "files"  # of `results.json`: a hash for each site


def configure(sites: Sequence[SiteFolder], **options: Any) -> RunConfig:
    """Make a configuration that fits the sites' data.

    The task follows from the data. Network, optimiser's settings and augmentation follow from the task
    (`medfedaug.config.run.task_defaults`), or from a Bundle. Without ``partial_loss``, methods for sites that
    have outlined different structures are added (`medfedaug.federation.composition.with_open_classes`).

    Args:
        sites: the sites.
        **options: fields of `RunConfig`; ``None`` leaves one to the default. ``bundle`` is the folder of a
            Bundle, which this process may use from then on.

    Raises:
        MedFedAugError: when the sites do not fit each other, or the options the data.
    """
    settings = {name: value for name, value in options.items() if value is not None}
    from_data = federation_settings(sites, settings.get("holdout", ()))
    task = from_data["task"]
    if settings.get("task", task) != task:
        raise ConfigError(f"the data are for {task}, and the setting task is {settings['task']}")
    config = RunConfig(**{**usual_settings(task, settings, own_data=is_own_data(sites)), **from_data})
    return config if "partial_loss" in settings else with_open_classes(config, sites)


def usual_settings(task: str, settings: Mapping[str, Any], *, own_data: bool) -> dict[str, Any]:
    """Complete settings by the defaults of the task, or by those of the Bundle.

    Args:
        settings: fields of `RunConfig`; ``bundle`` is the folder of a Bundle.
    """
    if not settings.get("bundle"):
        return {**task_defaults(task, settings.get("plan"), own_data=own_data), **settings}
    fixed = bundle_module().bundle_settings(allow(settings["bundle"]))
    for name in ("network", "optimizer", "plan"):
        if settings.get(name, fixed[name]) not in (fixed[name], Plan()):
            raise ConfigError(f"{name} follows from the Bundle; leave it out")
    return {**fixed, **settings, "bundle": fixed["bundle"], "plan": fixed["plan"]}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A run on this machine: what it computes, and how it is carried out.

    Args:
        data: the folder that holds the sites' folders.
        out: receives ``results.json``, ``global_model.pt`` (the selected round), ``final_model.pt``,
            ``statistics.json``, ``report.html``, ``model_card.html`` and, with NVFlare, ``nvflare.log``.
            Until the run is over it holds ``state/``, the files of server and sites after every
            round.
        config: the run; channels and classes are taken from the data.
        sites: sites that are open already, with the ``limit`` of ``config``; by default those of ``data``.
        engine: its name (`medfedaug.federation.engine.find_engine`): ``"nvflare"``, ``"inprocess"``, or the
            name of a package's engine; without effect where all images are in one place.
        device: the sites' device.
        overwrite: replace the results of an earlier run, finished or not.
        resume: continue an interrupted run after its last finished round. A finished run stays as it is, and
            without an earlier one the run begins.
        on_event: see `medfedaug.federation.FederationServer`.
        pictures: show in ``report.html`` the intensities and features of the sites, and each site's worst and
            best case; without effect with a Bundle, whose images only its transforms can read.
        report: write ``report.html``; `medfedaug.analysis.write_report` makes it of a finished run later.
        execution: see `medfedaug.config.run.Execution`; without a number of threads, sites that are processes
            share the cores.
        machine: memory and folder of every site's prepared images; by default from ``MEDFEDAUG_MEMORY`` and
            ``MEDFEDAUG_CACHE``.
        init: a file with initial weights (`medfedaug.models.entries`). Entries that do not fit the network
            start from the seed, and ``results.json`` lists them.
        loop: the path of a script with a custom training loop, or the name of a package's loop
            (`medfedaug.config.training_scripts`), which the sites run instead of the federation's; with
            NVFlare only.
    """

    data: Path
    out: Path
    config: RunConfig
    sites: Sequence[SiteFolder] = ()
    engine: str = "nvflare"
    device: str = "auto"
    overwrite: bool = False
    resume: bool = False
    on_event: Callable[[dict[str, Any]], None] | None = None
    pictures: bool = False
    report: bool = True
    execution: Execution = field(default_factory=Execution)
    machine: Machine | None = None
    init: str | Path | None = None
    loop: str | None = None

    @classmethod
    def of(
        cls,
        data: str | Path,
        out: str | Path | None = None,
        config: RunConfig | None = None,
        *,
        methods: str | Sequence[str | Mapping[str, Any]] = "fedavg",
        **settings: Any,
    ) -> Simulation:
        """Open the sites, and complete the settings by those that follow from the data.

        The arguments are those of `simulate`.
        """
        of_this = _names(cls) - {"data", "out", "config"}
        # Files of `init` and `loop` are named here; the run's settings have their hash and name.
        of_run, of_execution = _names(RunConfig) - of_this - {"methods"}, _names(Execution)
        known = of_run | of_execution | of_this
        for name in settings:
            check_choice("the setting", name, sorted({*known, "methods"}))
        options = {name: value for name, value in settings.items() if name in of_this}
        chosen = {name: value for name, value in settings.items() if name in of_run}
        if config is not None and (chosen or methods != "fedavg"):
            raise ConfigError(
                f"config has all settings: leave out {next(iter(chosen), 'methods')}, or config"
            )
        limit = config.limit if config is not None else chosen.get("limit")
        options["sites"] = options.get("sites") or find_sites(Path(data), limit=limit)
        if given := {name: value for name, value in settings.items() if name in of_execution}:
            options["execution"] = replace(options.get("execution", Execution()), **given)
        if config is None:
            config = configure(options["sites"], methods=_specified(methods), **chosen)
        folder = Path("runs", ",".join(str(method["name"]) for method in config.methods))
        return cls(data=Path(data), out=folder if out is None else Path(out), config=config, **options)


class Keywords(RunKeywords, total=False):
    """Settings of `simulate`: those of the run, and fields of `Simulation`."""

    sites: Sequence[SiteFolder]
    engine: str
    device: str
    overwrite: bool
    resume: bool
    on_event: Callable[[dict[str, Any]], None] | None
    pictures: bool
    report: bool
    execution: Execution
    machine: Machine | None


def _names(group: type[Any]) -> set[str]:
    return {entry.name for entry in fields(group)}


def _specified(methods: str | Sequence[str | Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    each = [methods] if isinstance(methods, str) else methods
    parsed = (parse_methods(method) if isinstance(method, str) else [dict(method)] for method in each)
    return tuple(chain.from_iterable(parsed))


def simulate(
    data: str | Path,
    out: str | Path | None = None,
    config: RunConfig | None = None,
    *,
    methods: str | Sequence[str | Mapping[str, Any]] = "fedavg",
    **settings: Unpack[Keywords],
) -> LoadedRun:
    """Run a federation over the sites below a folder, on this machine.

    Task, channels and classes follow from the data, and network and optimiser's settings from the task, as on
    the command line.

    Args:
        data: the folder that holds the sites' folders.
        out: the folder of the run's files; by default ``runs/`` and the methods' names.
        config: all settings of the run, instead of ``methods`` and single ones.
        methods: names, as ``["fedrdn", "fedfa"]`` or ``"fedrdn,fedfa"``; a method with arguments is
            ``{"name": "fedfa", "args": {"prob": 0.5}}``.
        **settings: fields of `medfedaug.config.run.RunConfig` (``rounds``, ``seed``, ``network``, ...), of
            `medfedaug.config.run.Execution` (``threads``, ...) and of `Simulation` (``engine``, ``device``,
            ``overwrite``, ...).

    Returns:
        The run: ``scores`` by site, ``best`` round, ``report`` page, ``predict`` for a new image. It is also
        a mapping with the content of ``results.json``.

    Raises:
        ConfigError: for a keyword that is not a setting, with similar names.
        MedFedAugError: one line that names the mistake and its place.

    Example:
        On a phantom of three hospitals::

            import medfedaug as mfa

            run = mfa.simulate("data", "runs/fedrdn", methods="fedrdn", rounds=20)
            run.scores["mean"]["dice"]
    """
    simulation = Simulation.of(data, out, config, methods=methods, **settings)
    run_simulation(simulation)
    return LoadedRun.of(simulation.out)


def run_simulation(simulation: Simulation) -> dict[str, Any]:
    """Prepare a run, let the engine carry it, and write its files.

    Everything is checked before anything is written. Where layers stay at the sites, the sites' part of
    ``state/`` remains, since it completes the model.

    Returns:
        The content of ``results.json``. ``data`` is the name of the folder, or of the benchmark whose data it
        holds; a benchmark's options, such as the tested fold, are ``data_options``. ``files`` has a hash of
        each site's files, which identifies the data of a finished run.

    Raises:
        MedFedAugError: one line that names the mistake and its place.
    """
    if simulation.resume and simulation.overwrite:
        raise ConfigError("resume and overwrite exclude each other")
    prepared = _prepare(simulation)
    with only_process(simulation.out):
        earlier = _earlier_results(prepared)
        if earlier is not None:
            return earlier
        prepared = _begin(prepared)
        work = make_workspace(simulation.out)
        try:
            results = _finish(prepared, work, _carry(prepared, work))
        finally:
            shutil.rmtree(work, ignore_errors=True)
            if not server_checkpoint(prepared.state).exists():  # nothing to continue: leave no trace
                remove_state(prepared.state)
        # The sites' own layers are part of the trained model; the rest only served to continue.
        remove_state(prepared.state, server_only=prepared.composition.personal)
        _draw(prepared)
        return results


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A checked run."""

    asked: Simulation
    run: FederationRun
    engine: Engine
    composition: Composition
    made_with: dict[str, str] = field(default_factory=dict)

    def emit(self, **event: Any) -> None:
        if self.asked.on_event is not None:
            self.asked.on_event(event)

    @property
    def out(self) -> Path:
        return self.asked.out

    @property
    def state(self) -> Path:
        return self.out / STATE


def _prepare(asked: Simulation) -> _Prepared:
    """Check that data, settings, methods and engine go together, before anything is written."""
    out, config, engine = asked.out, asked.config, find_engine(asked.engine)
    check_device(asked.device)
    sites = asked.sites or find_sites(asked.data, limit=config.limit)
    if asked.resume and server_checkpoint(out / STATE).exists():
        now = fingerprint_sites(sites, ("training",))
        check_same_files(kept_fingerprint(out / STATE), now, "the run began", asked.data)
    config = replace(config, **federation_settings(sites, config.holdout))
    sites = arrange(sites, config.channel_names, config.classes)
    composition = Composition(config)  # checks that methods and network go together
    task = composition.task()
    training = [folder.name for folder in sites if folder.trains and folder.name not in config.holdout]
    for folder in sites:
        task.check_site(folder)
        if folder.name in training:
            used = folder if config.unlabelled_weight else folder.without_unlabelled()
            composition.check_annotated(used)
            if not used.trains:
                hint = "--unlabelled-weight 1 lets its images train, with condist or teacher."
                warn("has outlined nothing, and is tested without training", site=folder.name, hint=hint)
    initial, script = None, None
    if asked.init is not None:
        initial = InitialWeights.read(asked.init, composition.network.state_dict())
    if asked.loop is not None:
        reference, script = loop_reference(asked.loop)
        config = replace(config, loop=reference)
    config = replace(config, init=initial.digest if initial is not None else None)
    if composition.pools_data:
        engine = PooledEngine()  # no message needs another engine
    _check_engine(asked, config, engine)
    execution = asked.execution
    if engine.own_processes and not execution.threads:
        execution = replace(execution, threads=max(1, (os.cpu_count() or 1) // len(training)))
    _rehearse(config, sites, engine)
    run = FederationRun(
        config=config,
        data_dir=asked.data,
        sites=sites,
        device=asked.device,
        state_dir=out / STATE,
        execution=execution,
        initial=initial,
        script=script,
        on_event=asked.on_event,
        machine=asked.machine or Machine.from_environment(),
        lock=sites_lock(out) if engine.own_processes else None,
    )
    return _Prepared(asked=asked, run=run, engine=engine, composition=composition)


def _check_engine(asked: Simulation, config: RunConfig, engine: Engine) -> None:
    if asked.execution.site_speed and not engine.keeps_time:
        raise ConfigError("site_speed needs sites that take turns (--engine inprocess), and a federation")
    if config.loop is not None and not engine.runs_scripts:
        raise ConfigError(
            "a custom loop runs in a process of its site: it needs --engine nvflare, and a federation"
        )


def _rehearse(config: RunConfig, sites: Sequence[SiteFolder], engine: Engine) -> None:
    """Build the server, and one site's model with all methods, so that their errors come first."""
    with torch.random.fork_rng(devices=[]):
        FederationServer(config, travels=engine.travels)
        site = next(site for site in sites if site.trains and site.name not in config.holdout)
        SiteModel(config, site, "cpu").open(site.name)


def _earlier_results(prepared: _Prepared) -> dict[str, Any] | None:
    """Make room for a run's files, or return the results of the finished run that ``resume`` continues."""
    out, resume, overwrite = prepared.out, prepared.asked.resume, prepared.asked.overwrite
    if not overwrite and is_json_with(out / RESULTS, "config", "rounds", "test"):
        if resume:
            return _finished(prepared)
        raise ConfigError(f"{out} holds the results of an earlier run; choose another folder or --overwrite")
    check_results(out)
    if not prepared.run.config.bundle:  # a Bundle's transforms read the files
        check_voxels(prepared.run.sites)
    if overwrite:
        remove_results(out)
    checkpoint = server_checkpoint(prepared.state)
    remove_unfinished(checkpoint.parent)
    if checkpoint.exists() and not resume:
        raise ConfigError(f"{out} holds an unfinished run: --resume continues it, --overwrite begins anew")
    return None


def _finished(prepared: _Prepared) -> dict[str, Any]:
    out, run = prepared.out, prepared.run
    kinds = (ConfigError, TypeError, ValueError, AttributeError, KeyError)
    with config_errors(f"{out / RESULTS} is damaged", *kinds):
        results: dict[str, Any] = parse_json((out / RESULTS).read_text(encoding="utf-8"))
        check_finished(results)
        same = RunConfig.from_dict(asked_settings(results)) == run.config
    if not same:
        raise ConfigError(f"{out} holds a finished run with other settings; choose another folder")
    made = f"the finished run in {out} was made"
    check_same_files(results.get(_FILES, {}), fingerprint_sites(run.sites), made, run.data_dir)
    return results


def _begin(prepared: _Prepared) -> _Prepared:
    """Record the data of the run, or check that an earlier run may continue."""
    run, state = prepared.run, prepared.state
    resume = server_checkpoint(state).exists()
    if resume:
        # Restored to refuse the checkpoint of another run.
        FederationServer(run.config, travels=prepared.engine.travels).restore(server_checkpoint(state))
        remove_workspaces(prepared.out)
    else:
        keep_fingerprint(state, fingerprint_sites(run.sites, ("training",)))
    return replace(prepared, run=replace(run, resume=resume), made_with=fingerprint_sites(run.sites))


def _carry(prepared: _Prepared, work: Path) -> dict[str, Any]:
    """Let the engine run the federation, and keep the last good models of a failed run."""
    started = time.perf_counter()
    try:
        results = prepared.engine.run(prepared.run, work)
    except RunFailed as error:
        if not (work / FINAL_MODEL).exists():
            raise
        out = prepared.out
        publish(work, out, [path.name for path in work.glob("*.pt")])
        raise RunFailed(f"{error} [the last good model: {out / FINAL_MODEL}; --resume continues]") from error
    return {**results, "engine": prepared.engine.name, "seconds": time.perf_counter() - started}


def _finish(prepared: _Prepared, work: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Complete and write the results, and move all files to the run's folder."""
    run, composition = prepared.run, prepared.composition
    results[_FILES] = prepared.made_with
    results["data"] = run.data_dir.resolve().name
    if is_federation(run.data_dir):
        benchmarks = added_module("datasets.benchmarks", str(run.data_dir))
        results["data"], _, results["data_options"] = benchmarks.read_federation(run.data_dir)
    if not (work / STATISTICS).exists():  # no method exchanged them
        config = RunConfig.from_dict(results["config"])
        task = define(config).task(config, normalised=composition.normalises_input)
        statistics = {
            site.name: task.statistics(site, composition.statistics_over)
            for site in run.sites
            if site.name in results["sites"]
        }
        intensity = {"none": "raw", "bundle": "bundle"}.get(results["input"]["scaling"], "scale")
        intensity = "normalised" if config.plan.normalises else intensity
        save_statistics(work / STATISTICS, statistics, intensity)
    results[HASHES] = file_hashes(work)
    write_json(work / RESULTS, results)
    publish(work, prepared.out)
    return results


def _draw(prepared: _Prepared) -> None:
    from medfedaug.analysis.model_card import write_model_card
    from medfedaug.runs.recorded_run import RecordedRun

    out, run = prepared.out, prepared.run
    prepared.emit(event="stage", text="writing the model card")
    write_model_card(RecordedRun.of(out), out)
    if not prepared.asked.report:
        return
    from medfedaug.analysis import write_report  # matplotlib takes a second

    prepared.emit(event="stage", text="drawing report.html")
    data = run.data_dir if prepared.asked.pictures and not run.config.bundle else None
    write_report([out], out / "report.html", data=data, device=run.device)
