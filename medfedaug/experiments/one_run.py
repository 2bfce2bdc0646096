"""`simulate`: one run from Python, with a keyword for every setting."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from medfedaug.config.run import Execution, RunConfig
from medfedaug.data.sites import find_sites
from medfedaug.errors import ConfigError
from medfedaug.experiments import simulate as engine
from medfedaug.methods.registry import parse_methods
from medfedaug.runs.prediction.loaded_run import LoadedRun
from medfedaug.utils.validation import not_known

_RUN = {entry.name for entry in fields(RunConfig)} - {"methods"}
_EXECUTION = {entry.name for entry in fields(Execution)}
_OPTIONS = {
    name
    for name, parameter in inspect.signature(engine.simulate).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
} - {"execution", "sites"}


def simulate(
    data: str | Path,
    out: str | Path,
    config: RunConfig | None = None,
    *,
    methods: str | Sequence[Mapping[str, Any]] = "fedavg",
    execution: Execution | None = None,
    **settings: Any,
) -> LoadedRun:
    """Run a federation over the sites below a folder, on this machine.

    Task, channels and classes follow from the data, and network and optimiser's settings from the task, as on
    the command line.

    Args:
        data: the folder that holds the sites' folders.
        out: the folder of the run's files (`medfedaug.experiments.simulate.simulate`).
        config: all settings of the run, in place of ``methods`` and ``settings``.
        methods: names, joined by commas, or ``[{"name": "fedfa", "args": {"prob": 0.5}}, ...]``.
        execution: settings that change no result, in place of single ones.
        **settings: fields of `medfedaug.config.run.RunConfig` (``rounds``, ``seed``, ``network``, ...) and of
            `medfedaug.config.run.Execution` (``threads``, ...), and arguments of
            `medfedaug.experiments.simulate.simulate` (``engine``, ``device``, ``overwrite``, ...).

    Returns:
        The run: ``scores`` by site, ``best`` round, ``report`` page, ``predict`` for a new image. It is also
        a mapping with the content of ``results.json``.

    Raises:
        ConfigError: for a keyword that is no setting, with similar names.
        MedFedAugError: one line that names the mistake and its place.

    Example:
        On a phantom of three hospitals::

            import medfedaug as mfa

            run = mfa.simulate("data", "runs/fedrdn", methods="fedrdn", rounds=20)
            run.scores["mean"]["dice"]
    """
    known = {*_RUN, *_EXECUTION, *_OPTIONS}
    for name in settings:
        if name not in known:
            raise ConfigError(f"{name} {not_known(name, sorted(known))}")
    options = {name: value for name, value in settings.items() if name in _OPTIONS}
    chosen = {name: value for name, value in settings.items() if name in _RUN}
    of_execution = {name: value for name, value in settings.items() if name in _EXECUTION}
    if config is not None and (chosen or methods != "fedavg"):
        raise ConfigError(f"config has all settings: leave out {next(iter(chosen), 'methods')}, or config")
    if execution is not None and of_execution:
        raise ConfigError(f"execution has all its settings: leave out {next(iter(of_execution))}")
    sites = find_sites(Path(data), limit=config.limit if config else chosen.get("limit"))
    if config is None:
        specified = parse_methods(methods) if isinstance(methods, str) else map(dict, methods)
        config = engine.configure(sites, methods=tuple(specified), **chosen)
    engine.simulate(
        data, out, config, execution=execution or Execution(**of_execution), sites=sites, **options
    )
    return LoadedRun.of(Path(out))
