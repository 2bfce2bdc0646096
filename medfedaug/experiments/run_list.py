"""List the runs of a sweep: all combinations of methods, settings, held-out sites, folds and seeds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from medfedaug.config.plan import PLAN_FIELDS, Plan, planning_settings
from medfedaug.config.run import RunConfig, task_defaults
from medfedaug.data.base import SiteFolder
from medfedaug.data.benchmarks import check_options, find_benchmark, find_root, open_benchmark
from medfedaug.data.sites import federation_settings
from medfedaug.errors import ConfigError
from medfedaug.experiments.axes import Axis, Comparison, shown
from medfedaug.experiments.planned import PlannedRun
from medfedaug.experiments.presets import Preset
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.initial_weights import InitialWeights
from medfedaug.methods.registry import canonical_name, parse_methods

# What a sweep decides by itself, or what follows from the data.
_NOT_SET = (
    "methods",
    "seed",
    "holdout",
    "task",
    "classes",
    "in_channels",
    "channel_names",
    "limit",
    "purpose",
)
_SETTABLE = [field.name for field in dataclasses.fields(RunConfig) if field.name not in _NOT_SET]


def parse_methods_list(texts: Sequence[str]) -> list[str]:
    """The combinations of methods, each name spelt as its method has it, without repetitions.

    Raises:
        ConfigError: for unknown methods.

    Example:
        >>> parse_methods_list(["fedavg fedrdn,fedfa+", "fedavg"])
        ['fedavg', 'fedrdn,fedfa+']
    """
    found = [
        ",".join(map(canonical_name, filter(None, text.split(","))))
        for item in texts
        for text in item.split()
    ]
    for text in found:
        parse_methods(text)
    return list(dict.fromkeys(found))


def plan(
    preset: Preset,
    root: str | Path,
    methods: Sequence[str],
    *,
    seeds: int = 5,
    axes: Sequence[Axis] = (),
    also: Sequence[Comparison] = (),
    holdout: Sequence[str] = (),
    folds: int = 0,
    scale: float = 1.0,
    limit: int | None = None,
    init: Path | None = None,
) -> list[PlannedRun]:
    """List the runs of a sweep: all with the first seed, then all with the second, and so on.

    Within a seed the first fold, or the first site to be left out, comes first with all methods. A sweep that
    is stopped early has thus compared all its methods.

    Args:
        preset: the protocol.
        root: the folder with the data set's files, or a folder that contains it under the data set's name.
        methods: combinations of methods.
        seeds: number of seeds; they are 0, 1, ...
        axes: settings that take several values. An argument of a method applies to the combinations that
            contain the method.
        also: further methods with settings of their own.
        holdout: sites to leave out in turn, or ``"all"``; ``"none"`` for a preset that would leave sites out.
        folds: number of folds by patient; 0 for none.
        scale: share of the preset's rounds.
        limit: at most this many cases per split and site.
        init: a file with weights to start from; to be given to `run_all`, too.

    A value, or a site to leave out, that is named twice is run once.

    Raises:
        ConfigError: for unknown settings, methods that cannot be combined, and different runs that would have
            one folder.
        DataError: when the data are missing.
    """
    if seeds < 1:
        raise ConfigError(f"at least one seed is needed, got {seeds}")
    if not 0 < scale <= 1:
        raise ConfigError(f"scale is a share of the rounds, above 0 and at most 1, got {scale}")
    options = find_benchmark(preset.benchmark).options
    compared = [Comparison(tuple(methods), tuple(axes)), *also]
    for one in compared:
        check_axes(one.axes, one.methods, preset.benchmark)
    if folds and "folds" not in options:
        raise ConfigError(f"folds are of patients, and {preset.benchmark} has none")
    first_fold = {"folds": folds} if folds else {}  # whether there are patients enough
    # A site that is left out is left out before the others are dealt.
    own = {**preset.data, **first_fold, "deal": 1, "deal_domains": 1}
    found = open_benchmark(preset.benchmark, find_root(root, preset.benchmark), limit=limit, **own)
    sites = _held_out(preset, holdout, found)
    runs = [
        _planned(preset, text, chosen, seed, fold, site, folds, scale, limit)
        for seed in range(seeds)
        for fold in range(1, folds + 1) or (0,)
        for site in sites or ("",)
        for one in compared
        for text in one.methods
        for chosen in _combinations([a for a in one.axes if not a.method or a.method in _named(text)])
    ]
    return _checked(_once(runs), preset, found, init)


def _once(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs, each once.

    Raises:
        ConfigError: naming the folder that two different ones would have.
    """
    found: dict[Path, PlannedRun] = {}
    for run in runs:
        if found.setdefault(run.folder, run) != run:
            raise ConfigError(
                f"two runs would be in one folder, {run.folder}: their settings differ in what its name "
                "leaves out; run one of them with another --out"
            )
    return list(found.values())


def check_axes(axes: Sequence[Axis], methods: Sequence[str], benchmark: str) -> None:
    """Check that settings can be set, each once.

    Args:
        axes: the settings.
        methods: combinations of methods, of which one must contain the method of a ``METHOD.ARG``.
        benchmark: the data set, whose options can be set.

    Raises:
        ConfigError: naming the setting.
    """
    named = [axis.name for axis in axes]
    present = {name for text in methods for name in _named(text)}
    known = (*_SETTABLE, *PLAN_FIELDS, *find_benchmark(benchmark).options)
    for axis in axes:
        if named.count(axis.name) > 1:
            raise ConfigError(f"{axis.name} is set twice; give its values together, separated by commas")
        if axis.method and axis.method not in present:
            raise ConfigError(f"--set {axis.name}: {axis.method} is not among the methods")
        if not axis.method and axis.name not in known:
            raise ConfigError(f"--set {axis.name}: neither METHOD.ARG nor one of {', '.join(known)}")


def _checked(
    runs: Sequence[PlannedRun], preset: Preset, sites: Sequence[SiteFolder], init: Path | None
) -> list[PlannedRun]:
    """The runs with the weights that they start from, if networks, methods and data options go together."""
    found = federation_settings(sites)
    digests: dict[str, str] = {}
    checked = []
    for run in runs:
        config = dataclasses.replace(run.config, **found)
        said = json.dumps([config.methods, config.network, config.network_args, config.image_size])
        check_options(preset.benchmark, run.data)
        if said not in digests:
            composition = Composition(config)  # whether methods and network go together
            digests[said] = ""
            if init:
                digests[said] = InitialWeights.read(init, composition.network.state_dict()).digest
        if init:
            settings = tuple(sorted((*run.settings, ("init", init.stem))))
            config = dataclasses.replace(run.config, init=digests[said])
            run = dataclasses.replace(run, settings=settings, config=config)
        checked.append(run)
    return checked


def _named(methods: str) -> list[str]:
    return [spec["name"] for spec in parse_methods(methods)]


def _combinations(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    for values in product(*(axis.values for axis in axes)):
        yield {axis.name: value for axis, value in zip(axes, values, strict=True)}


def _held_out(preset: Preset, holdout: Sequence[str], sites: Sequence[SiteFolder]) -> list[str]:
    able = [site.name for site in sites if site.trains]
    if list(holdout) == ["none"] or not (holdout or preset.holdout):
        return []
    if not holdout or list(holdout) == ["all"]:
        return able
    for name in holdout:
        if name not in able:
            raise ConfigError(f"cannot hold out {name!r}; the sites that train are {', '.join(able)}")
    return list(holdout)


def _planned(
    preset: Preset,
    methods: str,
    chosen: Mapping[str, Any],
    seed: int,
    fold: int,
    site: str,
    folds: int,
    scale: float,
    limit: int | None,
) -> PlannedRun:
    draft = _Draft(preset, _named(methods), held_out=bool(site))
    for name, value in chosen.items():
        draft.choose(name, value)
    draft.settle(chosen)
    config, data, reduced = draft.config, draft.data, []
    if scale < 1 and isinstance(config["rounds"], int):  # or `RunConfig` says what is wrong with them
        config["rounds"] = max(1, round(scale * config["rounds"]))
        reduced.append(f"scale={shown(scale)}")
    if limit is not None:
        reduced.append(f"limit={limit}")
    if fold:
        data.update(folds=folds, fold=fold, fold_seed=seed)
    if site and preset.whole_site:
        data["unseen"] = site
    run = RunConfig.from_dict(
        {
            **config,
            "methods": parse_methods(methods, draft.arguments),
            "seed": seed,
            "limit": limit,
            "holdout": [site] if site else [],
        }
    )
    # Sorted: the folder must not depend on the order in which settings were given.
    return PlannedRun(methods, tuple(sorted(draft.chosen)), run, data, ",".join(reduced), site, fold, folds)


class _Draft:
    """The settings of a run in the making: the preset's, and those that were chosen in their place.

    Attributes:
        config: fields of the run's configuration.
        data: options of the data set.
        arguments: of each method.
        chosen: names and values of the settings that differ from the preset.
    """

    def __init__(self, preset: Preset, methods: Sequence[str], *, held_out: bool) -> None:
        self.preset = preset
        self.config, self.data = dict(preset.config), dict(preset.data)
        self.arguments = {name: preset.arguments_of(name, held_out=held_out) for name in methods}
        self.chosen: list[tuple[str, str]] = []

    def choose(self, name: str, value: Any) -> None:
        """Set one of them; record it unless the preset has that value."""
        method, _, argument = name.rpartition(".")
        if method:
            differs = _put(self.arguments[method], argument, value)
        elif name in _SETTABLE:
            differs = _put(self.config, name, value, getattr(RunConfig, name, None))
        elif name in PLAN_FIELDS:
            differs = self._choose_plan(name, value)
        elif name == "fraction":
            differs = self._choose_fraction(value)
        else:
            differs, self.data[name] = True, value
        if differs:
            self.chosen.append((name, shown(value)))

    def _choose_plan(self, name: str, value: Any) -> bool:
        before = dict(self.config.get("plan", {}))
        after = {**before, name: value}
        if Plan.from_dict(after) == Plan.from_dict(before):
            return False
        self.config["plan"] = after
        return True

    def _choose_fraction(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"fraction is a share of the training cases, as in 1/6, got {value!r}")
        # Of what the paper trains with, which may be a share itself.
        whole = self.data.get("fraction", find_benchmark(self.preset.benchmark).options["fraction"])
        if value != 1:
            self.data["fraction"] = value * whole
        return value != 1

    def settle(self, chosen: Mapping[str, Any]) -> None:
        """Set what follows from the settings that were chosen."""
        config, preset = self.config, self.preset
        if asked := config.get("planning"):  # what varies is given, and no plan's to decide
            config["planning"] = planning_settings((*asked.get("given", ()), *chosen), asked.get("memory"))
        if preset.follows:
            own = task_defaults(preset.task, Plan.from_dict(config.get("plan", {})))
            config |= {name: own[name] for name in preset.follows if name not in chosen}
        # The preset's arguments are of its own network.
        other = "network" in chosen and chosen["network"] != preset.config["network"]
        given = {} if other else preset.config.get("network_args", {})
        config["network_args"] = {**given, **chosen.get("network_args", {})}


def _put(settings: dict[str, Any], name: str, value: Any, default: Any = None) -> bool:
    """Set a value. Returns whether there was another."""
    if value == settings.get(name, default):
        return False
    settings[name] = value
    return True
