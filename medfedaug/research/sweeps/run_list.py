"""List the runs of a sweep (`PlannedRun`): methods, settings, held-out sites, folds and seeds."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from medfedaug.config.options import check_value
from medfedaug.config.plan import PLAN_FIELDS, Plan, PlanningConfig
from medfedaug.config.run import RunConfig
from medfedaug.data.base import SiteFolder
from medfedaug.data.sites import federation_settings
from medfedaug.errors import ConfigError
from medfedaug.federation.composition import Composition
from medfedaug.federation.messages.initial_weights import InitialWeights
from medfedaug.methods.registry import canonical_name, parse_methods
from medfedaug.research.datasets.benchmarks import check_options, find_benchmark, find_root, open_benchmark
from medfedaug.research.papers.axes import Axis, Comparison, shown
from medfedaug.research.papers.presets import Preset
from medfedaug.utils.validation import check_choice, check_keys

BASE = "base"  # name of the preset without other settings


@dataclass(frozen=True)
class PlannedRun:
    """Run of a sweep."""

    methods: str
    # Names and values, as text, of the settings that differ from the preset; sorted.
    settings: tuple[tuple[str, str], ...]
    config: RunConfig
    data: Mapping[str, Any]  # the options of the data set
    reduced: str = ""  # reductions of the preset (a share of the rounds, a limit of cases), in words
    held_out: str = ""
    fold: int = 0  # number of the tested fold; 0 without folds
    folds: int = 0

    @property
    def variant(self) -> str:
        """Return the settings as one string; empty for the preset itself."""
        return ",".join(f"{name}={value}" for name, value in self.settings)

    @property
    def seed(self) -> int:
        """Return the run's seed."""
        return self.config.seed

    @property
    def folder(self) -> Path:
        """Return the run's folder inside the sweep's: ``<methods>/<variant>/seed-<k>``."""
        parts = [text for text in (self.variant, self.reduced) if text]
        parts += [f"without={self.held_out}"] if self.held_out else []
        parts += [f"fold={self.fold}of{self.folds}"] if self.fold else []
        variant = re.sub(r"[\s\"{}]", "", ",".join(parts)).replace("/", "-").replace(":", "-")
        return Path(self.methods) / (variant or BASE) / f"seed-{self.seed}"

    def data_folder(self, benchmark: str) -> Path:
        """Return the folder of the data's marker inside the sweep's, named after the options and the fold."""
        defaults = find_benchmark(benchmark).options
        options = {k: v for k, v in self.data.items() if v != defaults[k] and k not in ("fold", "fold_seed")}
        name = "_".join([benchmark, *(f"{key}-{shown(value)}" for key, value in options.items())])
        if self.fold:  # other seeds have other folds, under the same name
            return Path("data") / f"seed-{self.seed}" / f"{name}_fold-{self.fold}"
        return Path("data") / name


# Settings that a sweep or the data decide.
_DECIDED = (
    *("methods", "seed", "holdout", "limit", "purpose"),
    *("task", "classes", "in_channels", "channel_names"),
)
_SETTABLE = [field.name for field in dataclasses.fields(RunConfig) if field.name not in _DECIDED]


def parse_methods_list(texts: Sequence[str]) -> list[str]:
    """Parse combinations of methods to canonical names, without repetitions.

    Example:
        >>> parse_methods_list(["fedavg fedrdn,fedfa+", "fedavg"])
        ['fedavg', 'fedrdn,fedfa+']
    """
    combinations = [
        ",".join(map(canonical_name, filter(None, text.split(","))))
        for item in texts
        for text in item.split()
    ]
    for text in combinations:
        parse_methods(text)
    return list(dict.fromkeys(combinations))


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

    Within a seed the first fold, or the first held-out site, comes first with all methods, so that a sweep
    that stops early has compared all its methods. A value or site that is named twice runs once.

    Args:
        root: the folder with the data set's files, or a folder that contains it under the data set's name.
        axes: settings that take several values. An argument of a method applies to the combinations that
            contain the method.
        also: further methods, each with its own settings.
        holdout: sites to leave out in turn, or ``"all"``; ``"none"`` overrides a preset with held-out sites.
        init: a file with initial weights, which `run_all` needs too.
    """
    comparisons = [Comparison(tuple(methods), tuple(axes)), *also]
    for comparison in comparisons:
        check_axes(comparison.axes, comparison.methods, preset.benchmark)
    first_fold = {"folds": folds} if folds else {}  # checks that there are enough patients
    data = {**preset.data, **first_fold}
    sites = open_benchmark(preset.benchmark, find_root(root, preset.benchmark), limit=limit, **data)
    held_out = _held_out(preset, holdout, sites)
    runs = [
        _planned(preset, text, chosen, seed, fold, site, folds, scale, limit)
        for seed in range(seeds)
        for fold in range(1, folds + 1) or (0,)
        for site in held_out or ("",)
        for comparison in comparisons
        for text in comparison.methods
        for chosen in _combinations([a for a in comparison.axes if a.method in ("", *_named(text))])
    ]
    unique: dict[Path, PlannedRun] = {}  # without values and sites that are named twice
    for run in runs:
        unique.setdefault(run.folder, run)
    return _checked([*unique.values()], preset, sites, init)


def check_axes(axes: Sequence[Axis], methods: Sequence[str], benchmark: str) -> None:
    """Check that each setting is of a run, of the data set, or of one of the methods."""
    present = {name for text in methods for name in _named(text)}
    known = (*_SETTABLE, *PLAN_FIELDS, *find_benchmark(benchmark).options)
    for axis in axes:
        if axis.method and axis.method not in present:
            raise ConfigError(f"--set {axis.name}: {axis.method} is not among the methods")
    check_keys("--set: neither METHOD.ARG nor a setting:", (a.name for a in axes if not a.method), known)


def _checked(
    runs: Sequence[PlannedRun], preset: Preset, sites: Sequence[SiteFolder], init: Path | None
) -> list[PlannedRun]:
    """Check that networks, methods and data options go together, and add the initial weights."""
    from_data = federation_settings(sites)
    digests: dict[str, str] = {}
    checked = []
    for run in runs:
        config = dataclasses.replace(run.config, **from_data)
        network = json.dumps([config.methods, config.network, config.network_args, config.image_size])
        check_options(preset.benchmark, run.data)
        if network not in digests:
            composition = Composition(config)  # checks that methods and network go together
            digests[network] = ""
            if init:
                digests[network] = InitialWeights.read(init, composition.network.state_dict()).digest
        if init:
            settings = tuple(sorted((*run.settings, ("init", init.stem))))
            config = dataclasses.replace(run.config, init=digests[network])
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
        check_choice("--holdout: training site", name, able)
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
    config, data, reduced = dict(preset.config), dict(preset.data), list[str]()
    arguments = {name: preset.arguments_of(name, held_out=bool(site)) for name in _named(methods)}
    differing = _choose(chosen, config, data, arguments, find_benchmark(preset.benchmark).options)
    if planning := config.get("planning"):  # planning keeps the varied settings
        asked = PlanningConfig.from_dict(planning)
        config["planning"] = PlanningConfig.keeping((*asked.given, *chosen), asked.memory).to_dict()
    # The preset's arguments are of its own network.
    other = "network" in chosen and chosen["network"] != preset.config["network"]
    own = {} if other else preset.config.get("network_args", {})
    config["network_args"] = {**own, **chosen.get("network_args", {})}
    if scale < 1 and isinstance(config["rounds"], int):  # `RunConfig` refuses others
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
            "methods": parse_methods(methods, arguments),
            "seed": seed,
            "limit": limit,
            "holdout": [site] if site else [],
        }
    )
    # Sorted: the folder must not depend on the order in which settings were given.
    return PlannedRun(methods, tuple(sorted(differing)), run, data, ",".join(reduced), site, fold, folds)


def _choose(
    chosen: Mapping[str, Any],
    config: dict[str, Any],
    data: dict[str, Any],
    arguments: Mapping[str, dict[str, Any]],
    options: Mapping[str, Any],
) -> list[tuple[str, str]]:
    """Put settings into a run, its data and its methods; return those that differ from the preset."""
    differing = []
    for name, value in chosen.items():
        method, _, key = name.rpartition(".")
        text, place, usual = shown(value), data, options.get(key)
        if method:
            place = arguments[method]
        elif key in _SETTABLE:
            place, usual = config, getattr(RunConfig, key, None)
        elif key in PLAN_FIELDS:
            config["plan"] = place = dict(config.get("plan", {}))
            usual = Plan().to_dict()[key]
        elif key == "fraction":
            check_value("fraction", value, TypeAdapter(float))
            value *= data.get(key, usual)  # of the paper's training cases, which may be a share themselves
        if place.get(key, usual) != value:
            differing.append((name, text))
            place[key] = value
    return differing
