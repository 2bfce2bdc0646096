"""A whole federation on one machine: check the data, run an engine, leave the results in one folder."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from medfedaug.config.bundle_reference import allow
from medfedaug.config.plan import Plan
from medfedaug.config.run import Execution, RunConfig, asked_settings, task_defaults
from medfedaug.config.storage import Storage
from medfedaug.config.training_scripts import loop_reference
from medfedaug.data.datasets.registry import OWN_DATA, is_federation, read_federation
from medfedaug.data.quality.file_hashes import (
    check_made_with,
    check_unchanged,
    fingerprint_files,
    fingerprint_sites,
)
from medfedaug.data.quality.intensity_scales import uneven_sites
from medfedaug.data.sites import SiteFolder, federation_settings, find_sites
from medfedaug.errors import ConfigError, RunFailed, first_line
from medfedaug.federation import FederationServer, run_in_process
from medfedaug.federation.composition import Composition
from medfedaug.federation.initial_weights import InitialWeights
from medfedaug.federation.pooled import run_pooled
from medfedaug.federation.run_definition import bundle_run_settings, define
from medfedaug.federation.server.checkpoint import server_checkpoint
from medfedaug.federation.server.output import (
    FINAL_MODEL,
    HASHES,
    RESULTS,
    STATE,
    STATISTICS,
    file_hashes,
    write_run,
)
from medfedaug.privacy.site_settings import SiteSettings
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
from medfedaug.statistics import save_statistics
from medfedaug.utils.files import remove_unfinished, write_json
from medfedaug.utils.validation import check_choice

__all__ = ["ENGINES", "check_device", "configure", "simulate"]

ENGINES = ("nvflare", "inprocess")
"""Engines: a process for each site, or all sites in turn in one process."""

_FILES = "files"  # of `results.json`: a hash for each site


def configure(sites: Sequence[SiteFolder], **options: Any) -> RunConfig:
    """A configuration that fits the sites' data.

    The task follows from the data, and with the task the network and the optimiser's settings
    (`medfedaug.config.run.task_defaults`); where a Bundle is named, they follow from it.

    Args:
        sites: the sites.
        **options: fields of `RunConfig`; ``None`` leaves one to the default. ``bundle`` is the folder of a
            Bundle, which then may be used in this process.

    Raises:
        MedFedAugError: when the sites do not fit each other, or the options the data.
    """
    given = {name: value for name, value in options.items() if value is not None}
    found = federation_settings(sites, given.get("holdout", ()))
    task = found["task"]
    if given.get("task", task) != task:
        raise ConfigError(f"the data are for {task}, and the task asked for is {given['task']}")
    return RunConfig(**{**usual_settings(task, given), **found})


def usual_settings(task: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, with those that follow from the task, or from the Bundle, where one is named.

    Args:
        task: of the run.
        given: fields of `RunConfig`; ``bundle`` is the folder of a Bundle.

    Raises:
        ConfigError: for a Bundle that cannot be used, or a plan beside it.
    """
    if not given.get("bundle"):
        return {**task_defaults(task, given.get("plan")), **given}
    bundle = allow(given["bundle"])
    settled = bundle_run_settings(bundle)
    plan = given.get("plan", Plan())
    if plan not in (Plan(), settled["plan"]):
        raise ConfigError("a plan follows from the transforms of the Bundle; leave it out")
    named = [name for name in ("network", "optimizer") if given.get(name, settled[name]) != settled[name]]
    if named:
        raise ConfigError(f"{named[0]} follows from the Bundle; leave it out")
    return {**settled, **given, "bundle": settled["bundle"], "plan": settled["plan"]}


def simulate(
    data_dir: str | Path,
    out: str | Path,
    config: RunConfig,
    *,
    engine: str = "nvflare",
    device: str = "auto",
    overwrite: bool = False,
    resume: bool = False,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    tracking: str | None = None,
    pictures: bool = False,
    execution: Execution | None = None,
    sites: Sequence[SiteFolder] | None = None,
    storage: Storage | None = None,
    init: str | Path | None = None,
    loop: str | None = None,
) -> dict[str, Any]:
    """Run a federation over the sites below ``data_dir``.

    Everything is checked before anything is written; ``out`` receives its files when the run is over, and
    until then holds ``state/``, what server and sites keep after every round. Where layers stay at the sites,
    the sites' part of it remains: without it the model is not complete.

    Args:
        data_dir: the folder that holds the sites' folders.
        out: receives ``results.json``, ``global_model.pt`` (the selected round), ``final_model.pt``,
            ``statistics.json``, ``report.html``, ``model_card.html`` and, with NVFlare, ``nvflare.log`` and
            ``tracking``.
        config: the run; channels and classes are taken from the data.
        engine: ``"nvflare"`` or ``"inprocess"``; without effect where all images are in one place.
        device: the sites' device.
        overwrite: replace the results of an earlier run, finished or not.
        resume: continue an interrupted run after its last finished round; a finished one is not run again,
            and where nothing is there yet, the run begins.
        on_event: see `medfedaug.federation.FederationServer`.
        tracking: ``"tensorboard"`` or ``"mlflow"``, with NVFlare alone.
        pictures: show in ``report.html`` the intensities and features of the sites, and each site's worst and
            best case; without effect with a Bundle, whose images only its transforms can read.
        execution: see `medfedaug.config.run.Execution`; with NVFlare and without a number of threads, the
            sites share the cores.
        sites: the sites where they are open already, with the ``limit`` of ``config``.
        storage: where every site keeps its prepared images; by default as ``MEDFEDAUG_MEMORY`` and
            ``MEDFEDAUG_CACHE`` say.
        init: a file with weights to start from (`medfedaug.models.weights`); what does not fit the network
            starts from the seed, and ``results.json`` says what.
        loop: the path of a script with a training loop of one's own, or the name of one that a package adds
            (`medfedaug.config.training_scripts`), which the sites run in the place of the federation's; with
            NVFlare alone.

    Returns:
        The content of ``results.json``. ``data`` is the name of the folder, or of the benchmark whose data it
        holds, and then ``data_options`` are its options: the fold that was tested, for one. ``files`` has a
        hash of each site's files, by which a finished run is known not to be of others.

    Raises:
        MedFedAugError: one line that says what is wrong and where.
    """
    check_choice("engine", engine, ENGINES)
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a folder")
    if resume and overwrite:
        raise ConfigError("resume and overwrite exclude each other")
    check_device(device)
    sites = sites or find_sites(data_dir, limit=config.limit)
    if resume and server_checkpoint(out / STATE).exists():
        began = kept_fingerprint(out / STATE)
        if began is not None:
            check_unchanged(began, fingerprint_files(sites), Path(data_dir))
    config = replace(config, **federation_settings(sites, config.holdout))
    sites = [site.with_channels(config.channel_names) for site in sites]
    composition = Composition(config)  # whether methods and network go together
    task = composition.task()
    for folder in sites:
        task.check_site(folder)
    initial = InitialWeights.read(init, composition.network.state_dict()) if init is not None else None
    config = replace(config, init=initial.digest if initial is not None else None)
    script = None
    if loop is not None:
        reference, script = loop_reference(loop)
        config = replace(config, loop=reference)
    if composition.pools_data:  # nothing is there for NVFlare to carry
        engine = "pooled"
    if tracking and engine != "nvflare":
        raise ConfigError("tracking is NVFlare's: it needs --engine nvflare, and a federation")
    if config.loop is not None and engine != "nvflare":
        raise ConfigError(
            "a loop of one's own runs under NVFlare's Client API: it needs --engine nvflare, and a federation"
        )
    execution = execution or Execution()
    if engine == "nvflare" and not execution.threads:
        training = sum(site.trains and site.name not in config.holdout for site in sites)
        execution = replace(execution, threads=max(1, (os.cpu_count() or 1) // training))
    with only_process(out):
        state = out / STATE
        finished = is_json_with(out / RESULTS, "config", "rounds", "test")
        if finished and not overwrite:
            if resume:
                return _finished(out, config, sites, Path(data_dir))
            raise ConfigError(
                f"{out} holds the results of an earlier run; choose another folder or --overwrite"
            )
        check_results(out)
        if overwrite:
            remove_results(out)
        remove_unfinished(server_checkpoint(state).parent)
        interrupted = server_checkpoint(state).exists()
        if interrupted and not resume:
            raise ConfigError(
                f"{out} holds a run that broke off: --resume continues it, --overwrite begins anew"
            )
        if interrupted:
            same = FederationServer(config, travels=engine != "pooled")
            same.restore(server_checkpoint(state))  # raises where it is of another run
            remove_workspaces(out)
        else:
            keep_fingerprint(state, fingerprint_files(sites))

        made_with = fingerprint_sites(sites)
        started = time.perf_counter()

        def tell(**event: Any) -> None:
            if on_event is not None:
                on_event(event)

        # Whoever published a benchmark has seen to its intensities, and so has a Bundle.
        published = is_federation(Path(data_dir)) and read_federation(data_dir)[0] != OWN_DATA
        found = {} if published or config.bundle else uneven_sites(sites)
        uneven = {site: str(scales) for site, scales in found.items()}
        for site, scales in found.items():
            tell(event="uneven", site=site, reason=scales.sentence(composition.intensity))
        work = make_workspace(out)
        try:
            run: dict[str, Any] = {
                "config": config,
                "data_dir": data_dir,
                "device": device,
                "on_event": on_event,
                "state_dir": state,
                "resume": interrupted,
                "execution": execution,
                "storage": storage or SiteSettings.load(None).storage,
                "initial": initial,
            }
            if engine == "nvflare":
                tell(event="stage", text=f"starting NVFlare: a server and {len(sites)} sites, a process each")
                names = [site.name for site in sites]
                run["script"] = script
                _run_nvflare(work, tracking=tracking, sites=names, lock=sites_lock(out), **run)
            else:
                carry = run_pooled if engine == "pooled" else run_in_process
                write_run(work, carry(sites=sites, **run))
            seconds = time.perf_counter() - started
            told = {"engine": engine, "seconds": seconds, _FILES: made_with}
            results = _finish(work, out, sites, composition, Path(data_dir), told, uneven)
        except RunFailed as error:
            if not (work / FINAL_MODEL).exists():
                raise
            publish(work, out, [path.name for path in work.glob("*.pt")])
            raise RunFailed(
                f"{error} [the last good model: {out / FINAL_MODEL}; --resume continues]"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
            if not server_checkpoint(state).exists():  # nothing that could be continued: leave no trace
                remove_state(state)
        # The sites' own layers are part of the trained model; what else is there served to continue.
        remove_state(state, server_only=composition.personal)
        # Imported here: matplotlib takes a second, and is needed only now.
        from medfedaug.analysis import write_report
        from medfedaug.analysis.model_card import write_model_card
        from medfedaug.runs.finished_run import FinishedRun

        tell(event="stage", text="drawing report.html and the model card")
        write_model_card(FinishedRun.of(out), out)
        shown = data_dir if pictures and not config.bundle else None
        write_report([out], out / "report.html", data=shown, device=device)
        return results


def check_device(device: str) -> None:
    """Check that a device can be used.

    Raises:
        ConfigError: naming it and the reason.
    """
    if device == "auto":
        return
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("it computes nothing")
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without CUDA
        raise ConfigError(f"device {device} cannot be used: {first_line(error)}") from error


def _finished(out: Path, config: RunConfig, sites: Sequence[SiteFolder], data_dir: Path) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((out / RESULTS).read_text())
    try:
        same = RunConfig.from_dict(asked_settings(results)) == config
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigError(f"{out / RESULTS} is damaged: {first_line(error)}") from error
    if not same:
        raise ConfigError(f"{out} holds a finished run with other settings; choose another folder")
    if isinstance(made_with := results.get(_FILES), dict):  # an earlier release recorded none
        check_made_with(made_with, fingerprint_sites(sites), out, data_dir)
    return results


def _run_nvflare(work: Path, **run: Any) -> None:
    # Imported here: the in-process engine works without NVFlare, and its import takes seconds.
    from medfedaug.nvflare_jobs.simulator import LOG_FILE, output_folder, run_in_simulator

    # The simulator's workspace holds sockets and thousands of small files: not on a user's data disk.
    with tempfile.TemporaryDirectory(prefix="medfedaug-") as simulator:
        try:
            run_in_simulator(work_dir=simulator, **run)
        except RunFailed as error:
            kept = Path(tempfile.mkdtemp(prefix="medfedaug-log-")) / LOG_FILE
            shutil.copyfile(Path(simulator) / LOG_FILE, kept)
            raise RunFailed(f"{error} [log: {kept}]") from error
        finally:  # also of a run that failed: its last good models
            for file in [*output_folder(simulator).glob("*"), Path(simulator) / LOG_FILE]:
                if file.exists():
                    shutil.move(str(file), work / file.name)


def _finish(
    work: Path,
    out: Path,
    sites: Sequence[SiteFolder],
    composition: Composition,
    data_dir: Path,
    told: dict[str, Any],
    uneven: dict[str, str],
) -> dict[str, Any]:
    results: dict[str, Any] = json.loads((work / RESULTS).read_text())
    results.update(told, data=data_dir.resolve().name)
    intensity = {"none": "raw", "bundle": "bundle"}.get(results["input"]["scaling"], "scale")
    if uneven:
        results["input"]["uneven"] = uneven
    if is_federation(data_dir):
        results["data"], _, results["data_options"] = read_federation(data_dir)
    if not (work / STATISTICS).exists():  # no method exchanged them; on one machine they can be had without
        done = RunConfig.from_dict(results["config"])
        task = define(done).task(done, normalised=composition.normalises_input)
        statistics = {
            site.name: task.statistics(site, composition.statistics_over)
            for site in sites
            if site.name in results["sites"]
        }
        save_statistics(work / STATISTICS, statistics, intensity)
    results[HASHES] = file_hashes(work)
    write_json(work / RESULTS, results)
    publish(work, out)
    return results
