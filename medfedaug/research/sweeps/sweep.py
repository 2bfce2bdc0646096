"""Make the runs of a sweep, which `medfedaug.research.sweeps.run_list.plan` lists.

`medfedaug.research.sweeps.tables` writes their tables.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path
from traceback import format_exc
from typing import Any

from medfedaug.config.run import Execution, RunConfig, asked_settings
from medfedaug.data.sites import MARKER
from medfedaug.errors import ConfigError, MedFedAugError, first_line
from medfedaug.federation.engine import check_device, find_engine
from medfedaug.federation.job_folder import RESULTS
from medfedaug.research.datasets.benchmarks import find_benchmark, find_root, write_federation
from medfedaug.research.papers.presets import Preset
from medfedaug.research.sweeps.run_list import PlannedRun
from medfedaug.research.sweeps.workers import ThisProcess, Workers
from medfedaug.simulate import Simulation, run_simulation

# The files of `medfedaug.research.sweeps.tables`.
TABLES = ("table", "patients", "metrics", "published")

_FROM_THE_DATA = ("task", "classes", "in_channels", "channel_names")


def run_all(
    runs: Sequence[PlannedRun],
    preset: Preset,
    root: str | Path,
    out: str | Path,
    *,
    engine: str = "inprocess",
    device: str = "auto",
    workers: Workers | None = None,
    execution: Execution | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    init: Path | None = None,
) -> dict[Path, str]:
    """Make the missing runs and continue interrupted ones; finished runs stay as they are.

    A failed run does not stop the others. ``seed-<k>.log`` has the events of a run, one JSON object per line.

    Args:
        workers: of `medfedaug.research.sweeps.workers.find_workers`; by default this process.
        on_event: called with ``{"event": "run", "folder": ..., "made": bool, "number": n, "of": n}`` for each
            finished run, or ``{"event": "failed", "folder": ..., "made": bool, "reason": ...}``; runs of an
            earlier call come first, with a false ``made``. Runs in this process add their own events.

    Returns:
        The folders of failed runs, each with the reason.
    """
    out, source = Path(out), find_root(root, preset.benchmark)
    check_folder(out)
    workers = workers or ThisProcess()
    if workers.elsewhere:  # relative paths, and this machine's devices, mean nothing there
        out, source, init = out.absolute(), source.absolute(), init and init.absolute()
    else:
        check_device(device)
    if not (workers.alone or workers.elsewhere) and find_engine(engine).own_processes:
        raise ConfigError(f"--workers needs --engine inprocess: sites of {engine} are processes already")
    emit = on_event or (lambda event: None)
    for folder, run in {run.data_folder(preset.benchmark): run for run in runs}.items():
        write_federation(out / folder, preset.benchmark, source, **run.data)
    make = partial(
        _run,
        benchmark=preset.benchmark,
        out=out,
        engine=engine,
        device=device,
        execution=execution or Execution(),
        init=init,
    )
    failed: dict[Path, str] = {}
    finished = {run.folder for run in runs if (out / run.folder / RESULTS).exists()}
    earlier = ((run, make(run)) for run in runs if run.folder in finished)
    missing = [run for run in runs if run.folder not in finished]
    begin = partial(make, on_event=emit) if workers.alone else make
    # Closed when the caller stops, so that no further run begins.
    with closing(workers.outcomes(begin, missing)) as outcomes:
        for number, (run, reason) in enumerate(chain(earlier, outcomes), start=1):
            entry = {"folder": str(run.folder), "made": run.folder not in finished}
            if reason:
                failed[run.folder] = reason
                emit({"event": "failed", **entry, "reason": reason})
            else:
                emit({"event": "run", **entry, "number": number, "of": len(runs)})
    return failed


def check_folder(out: Path) -> None:
    """Check that the tables and the page replace only an earlier sweep's."""
    tables = [f"{name}{suffix}" for name in TABLES for suffix in (".md", ".csv")]
    existing = next((out / name for name in ("report.html", *tables) if (out / name).exists()), None)
    if existing is not None and not any(out.glob(f"data/**/{MARKER}")):
        raise ConfigError(f"{existing} is not of a benchmark; choose another folder, or move the file away")


def difference(results: Path, benchmark: str, run: PlannedRun) -> str:
    """Return ``"data"`` or ``"settings"`` where a finished run differs from its plan, or an empty text.

    A run of an earlier preset has the same folder.
    """
    record = json.loads(results.read_text())
    defaults = find_benchmark(benchmark).options
    if {**defaults, **record.get("data_options", {})} != {**defaults, **run.data}:
        return "data"
    config = RunConfig.from_dict(asked_settings(record))
    fields = (field.name for field in dataclasses.fields(RunConfig) if field.name not in _FROM_THE_DATA)
    return "settings" if any(getattr(config, name) != getattr(run.config, name) for name in fields) else ""


def _run(
    run: PlannedRun,
    *,
    benchmark: str,
    out: Path,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    **options: Any,
) -> str:
    """Make one run, with fields of `Simulation`; return the reason if it failed."""
    folder = out / run.folder
    finished = (folder / RESULTS).exists()
    if finished and (other := difference(folder / RESULTS, benchmark, run)):
        return f"{folder} holds a finished run with other {other}; choose another folder"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        log = None if finished else stack.enter_context(open(f"{folder}.log", "a", encoding="utf-8"))

        def emit(event: dict[str, Any]) -> None:
            if log is not None:
                print(json.dumps(event, default=str), file=log, flush=True)
            if on_event is not None:
                on_event(event)

        try:
            # One page shows all runs; `medfedaug report` draws the page of one run.
            simulation = Simulation(
                data=out / run.data_folder(benchmark),
                out=folder,
                config=run.config,
                resume=True,
                on_event=emit,
                report=False,
                **options,
            )
            run_simulation(simulation)
        except Exception as error:  # an error of a plugin or of CUDA's memory fails this run only
            expected = isinstance(error, MedFedAugError)
            reason = str(error) if expected else f"{type(error).__name__}: {first_line(error)}"
            emit({"event": "failed_run", "reason": reason} | ({} if expected else {"trace": format_exc()}))
            return reason
    return ""
