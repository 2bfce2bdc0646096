"""Run a job in NVFlare's simulator, with one process per site on one machine."""

import json
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nvflare.recipe.spec import Recipe

from medfedaug.config import bundle_reference as bundles
from medfedaug.config.machine import DATA_VARIABLE, DEVICE_VARIABLE, STATE_VARIABLE, Machine
from medfedaug.config.run import Execution, RunConfig
from medfedaug.errors import MedFedAugWarning, RunFailed
from medfedaug.federation.engine import Engine, FederationRun
from medfedaug.federation.job_folder import EVENTS, JOB_FOLDER, RESULTS
from medfedaug.federation.messages.initial_weights import InitialWeights
from medfedaug.hospital.privacy import PrivacyPolicy
from medfedaug.hospital.privacy.site_settings import SETTINGS_FILE
from medfedaug.nvflare_jobs.job.messages import VARIABLE, WARNING, identifiers
from medfedaug.nvflare_jobs.job.recipe import MedFedAugRecipe
from medfedaug.nvflare_jobs.kit.kit import allowed_classes
from medfedaug.nvflare_jobs.simulator.simulator_process import SimulatorProcess, Start, no_fast_start
from medfedaug.utils import plugins
from medfedaug.utils.event_text import OnEvent, follow

LOG_FILE = "nvflare.log"


class NVFlareEngine(Engine):
    """NVFlare's simulator, with a process for the server and for every site."""

    name = "nvflare"
    own_processes = runs_scripts = True

    def run(self, run: FederationRun, work: Path) -> dict[str, Any]:
        """Run a federation; see `Engine.run`. ``work`` also gets the simulator's log."""
        names = [site.name for site in run.sites]
        if run.on_event:
            text = f"starting NVFlare: a server and {len(names)} sites, a process each"
            if reason := no_fast_start():
                text += f", which import their packages afresh ({reason})"
            renamed = [f"{name!r} is {known}" for name, known in identifiers(names).items() if name != known]
            if renamed:
                text += f"; in its log {', '.join(renamed)}"
            run.on_event({"event": "stage", "text": text})
        # The simulator's workspace has sockets and thousands of small files: not on a user's data disk.
        with tempfile.TemporaryDirectory(prefix="medfedaug-") as folder:
            try:
                # A run's fields are the arguments; the simulator opens the sites by their names.
                output = run_in_simulator(work_dir=folder, **{**vars(run), "sites": names})
                results: dict[str, Any] = json.loads((output / RESULTS).read_text())
            except RunFailed as error:
                log = Path(tempfile.mkdtemp(prefix="medfedaug-log-")) / LOG_FILE
                shutil.copyfile(Path(folder) / LOG_FILE, log)
                raise RunFailed(f"{error} [log: {log}]") from error
            finally:  # a failed run has its last good models
                for file in [*output_folder(folder).glob("*"), Path(folder) / LOG_FILE]:
                    if file.exists() and file.name != RESULTS:
                        shutil.move(str(file), work / file.name)
        return results


def run_in_simulator(
    config: RunConfig,
    data_dir: str | Path,
    sites: Sequence[str],
    work_dir: str | Path,
    *,
    execution: Execution | None = None,
    resume: bool = False,
    initial: InitialWeights | None = None,
    script: Path | None = None,
    **of_job: Any,
) -> Path:
    """Export the job of a run, and run it in NVFlare's simulator; arguments as in `run_job`.

    Returns:
        The folder with ``results.json`` and the models.
    """
    execution = execution or Execution()
    recipe = MedFedAugRecipe(
        config=config,
        min_clients=execution.min_sites or len(sites),
        execution=execution,
        resume=resume,
        initial=initial,
        script=script,
    )
    return run_job(recipe, data_dir, sites, work_dir, RESULTS, execution=execution, **of_job)


def run_job(
    recipe: Recipe,
    data_dir: str | Path,
    sites: Sequence[str],
    work_dir: str | Path,
    result: str,
    *,
    execution: Execution,
    device: str = "auto",
    on_event: OnEvent | None = None,
    state_dir: str | Path | None = None,
    machine: Machine | None = None,
    lock: str | Path | None = None,
) -> Path:
    """Run any of our jobs in NVFlare's simulator.

    Args:
        data_dir: the folder with the sites' folders.
        sites: the sites' names, with unseen sites.
        work_dir: an empty folder for the job, the simulator's workspace and its log, `LOG_FILE`.
        result: the file of the result in the server's folder.
        state_dir: a folder for the state of server and sites; by default in ``work_dir``.
        lock: a file that is locked while a process of the run is alive; by default in ``work_dir``.

    Returns:
        The server's folder.
    """
    known = identifiers(sites)
    work, log = Path(work_dir), Path(work_dir) / LOG_FILE
    recipe.export(job_dir=str(work / "job"))
    workspace = work / "workspace"
    _write_site_settings(workspace)
    start = Start(
        job=str(work / "job" / recipe.name),
        workspace=str(workspace),
        sites=[*known.values()],
        lock=str(lock or work / "processes.lock"),
    )
    environment = {
        VARIABLE: json.dumps({identifier: name for name, identifier in known.items()}),
        DATA_VARIABLE: str(Path(data_dir).resolve()),
        DEVICE_VARIABLE: device,
        **(machine.variables() if machine else {}),
        STATE_VARIABLE: str(Path(state_dir or work / "state").resolve()),
    }
    if execution.threads:
        # If each site starts as many threads as there are cores, sites mostly wait for each other.
        environment["OMP_NUM_THREADS"] = str(execution.threads)
    output, failure = output_folder(work), ""
    process = SimulatorProcess(start, environment, log)
    try:
        for event in _events(work, [*known.values()], process):
            if event["event"] == WARNING:
                warnings.warn(event["text"], MedFedAugWarning, stacklevel=2)
                continue
            if event["event"] == "failed":
                failure = event["message"]
            if on_event:
                on_event(event)
    finally:
        process.end()
    if failure:
        raise RunFailed(failure)
    if not (output / result).is_file():
        raise RunFailed(
            f"NVFlare's simulator ended without results (exit code {process.returncode}): {_tail(log)}"
        )
    return output


def output_folder(work_dir: str | Path, name: str = "server") -> Path:
    """Return the folder of the server, or a site, in a run of `run_in_simulator`."""
    return Path(work_dir) / "workspace" / name / "simulate_job" / JOB_FOLDER


def _write_site_settings(workspace: Path) -> None:
    """Write the sites' settings, for sites that are all on the user's machine."""
    file = workspace / SETTINGS_FILE
    file.parent.mkdir(parents=True)
    # The user has installed the packages and named the Bundles.
    settings = {
        "privacy": PrivacyPolicy.of_simulation().to_dict(),
        "plugins": sorted({p.package for group in plugins.JOB_GROUPS for p in plugins.installed(group)}),
        "bundles": {bundle.name: bundle.to_dict() for bundle in bundles.known()},
        "simulation": True,
    }
    file.write_text(json.dumps(settings))
    # The server and all sites share this list.
    classes = [*allowed_classes(server=True), *allowed_classes(server=False)]
    resources = {"format_version": 2, "class_allow_list": classes}
    file.with_name("resources.json").write_text(json.dumps(resources, indent=1))


def _events(
    work: Path, sites: Sequence[str], process: SimulatorProcess, period: float = 0.1
) -> Iterator[dict[str, Any]]:
    """Yield the server's events, and all warnings, until the run is over or its process has ended.

    A run is over when the server and all sites say so: NVFlare then only closes connections, for a second.
    """
    server = output_folder(work) / EVENTS
    positions = dict.fromkeys((*(output_folder(work, site) / EVENTS for site in sites), server), 0)
    under_way, ended = set(positions), False
    while under_way and not ended:
        ended = process.returncode is not None
        for path in filter(Path.exists, positions):
            for event, end in follow(path, positions[path]):
                positions[path] = end
                if path == server or event["event"] == WARNING:
                    yield event
                if path == server and event["event"] == "failed":
                    return
                if event["event"] in ("finished", "ended"):
                    under_way.discard(path)
        if under_way and not ended:
            time.sleep(period)


def _tail(log: Path) -> str:
    """Return the line of the log that most likely has the reason."""
    lines = log.read_text(errors="replace").splitlines()
    errors = (line for word in ("CRITICAL", "Error: ", "ERROR") for line in lines if word in line)
    return next(errors, "its log says nothing of an error").strip()[-300:]
