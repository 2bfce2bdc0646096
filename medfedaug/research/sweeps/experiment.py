"""`Experiment`: a comparison on a user's own data or in the protocol of a paper.

A user writes a YAML file, or the options of ``medfedaug benchmark``, which take precedence over the file::

    data: hospitals            # relative to the file
    methods: [fedavg, "fedrdn,fedfa"]
    seeds: 5
    folds: 5
    settings: {rounds: 50, network: dynunet, fedfa.prob: 0.3}
    vary: {learning_rate: [0.001, 0.01]}
    out: runs
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from pydantic import BeforeValidator

from medfedaug._version import __version__
from medfedaug.config.options import File, Settings, setting, settings
from medfedaug.config.plan import PLAN_FIELDS, Plan, PlanningConfig, load_plan
from medfedaug.config.run import RunConfig, task_defaults
from medfedaug.data.base import is_own_data
from medfedaug.data.sites import federation_settings, is_federation
from medfedaug.errors import ConfigError, warn
from medfedaug.methods.registry import parse_methods
from medfedaug.research.datasets.benchmarks import OWN_DATA, find_benchmark, open_benchmark, read_federation
from medfedaug.research.papers.axes import Axis, Comparison, axis_value, parse_axis
from medfedaug.research.papers.papers import find_entry
from medfedaug.research.papers.presets import Preset, find_preset
from medfedaug.research.sweeps.run_list import PlannedRun, check_axes, parse_methods_list, plan
from medfedaug.utils.files import read_mapping, write_atomic
from medfedaug.utils.validation import check_keys

EXPERIMENT = "experiment.yml"
_PATHS = ("data", "out", "init")
_PLAN, _AUTO = "plan", "auto"
# Defaults that an experiment's file states, so that defaults of a later release change nothing.
_STATED = ("rounds", "local_epochs", "intensity", "augmentation")


def _several(value: Any) -> tuple[str, ...]:
    names = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(name, str | int | float) and not isinstance(name, bool) for name in names):
        raise ValueError("must be a name or a list of names")
    return tuple(map(str, names))  # YAML has sites 1 and 2 as numbers


Several = Annotated[tuple[str, ...], BeforeValidator(_several)]

# `workers: 4` in YAML
Where = Annotated[str, BeforeValidator(lambda value: str(value) if type(value) is int else value)]


@settings
class Experiment(Settings):
    """Methods x seeds x folds x settings."""

    TITLE: ClassVar[str] = "experiment: "

    data: File = setting(
        MISSING, "Folder with one folder per site, or with the files of the protocol's data set."
    )
    methods: Several = setting(MISSING, "Combinations of methods.")
    out: File = setting(MISSING, "Folder for runs, tables and page.")
    protocol: str = setting(
        "", "Protocol of a paper (`medfedaug.research.papers.presets.PRESETS`); empty for own data."
    )
    entry: str = setting(
        "",
        "Table or figure of a paper (`medfedaug.research.papers.papers.entries`), whose methods and settings "
        "are compared in the protocol; ``methods`` selects some of them.",
    )
    settings: Mapping[str, Any] = setting(
        dict,
        "Settings of all runs: ``METHOD.ARG``, a field of `RunConfig` or of `medfedaug.config.plan.Plan`, an "
        "option of the data, or ``plan``, a plan's file or ``auto``.",
    )
    vary: Mapping[str, Any] = setting(dict, "Settings that take several values in turn.")
    seeds: int = setting(5, "Number of seeds, which are 0, 1, ...", at_least=1)
    folds: int = setting(0, "Number of folds by patient; 0 for the sites' own splits.", at_least=0)
    holdout: Several = setting((), "Sites to leave out in turn, or ``all``.")
    limit: int | None = setting(None, "Largest number of cases per split and site.")
    scale: float = setting(1.0, "Share of the rounds to run.", above=0, at_most=1)
    init: File | None = setting(None, "File with initial weights.")
    workers: Where = setting(
        "1", "Workers of the runs (`medfedaug.research.sweeps.workers.find_workers`), which change no result."
    )
    each: Several = setting((), "Requests of each run to the cluster, as ``NAME=VALUE``.")

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(parse_methods_list(self.methods)))
        settings = {name: axis_value(value) for name, value in self.settings.items()}
        vary = {
            name: tuple(map(axis_value, values if isinstance(values, list | tuple) else [values]))
            for name, values in self.vary.items()
        }
        twice = sorted(set(settings) & set(vary))
        if twice:
            raise ConfigError(f"experiment: {twice[0]} is in settings and in vary; leave it out of one")
        object.__setattr__(self, "settings", settings)
        object.__setattr__(self, "vary", vary)

    @property
    def own(self) -> bool:
        """Return whether the experiment is on the user's own data, without a paper's protocol."""
        return not self.protocol

    def preset(self) -> Preset:
        """Return the paper's protocol, or the common settings of all runs on own data."""
        if not self.own:
            return find_preset(self.protocol)
        name, root = OWN_DATA, self.data
        options: dict[str, Any] = {}
        if is_federation(self.data):  # a published data set under another name
            name, root, options = read_federation(self.data)
        check_axes([Axis(key, (value,)) for key, value in self._plain().items()], self.methods, name)
        known = find_benchmark(name).options
        data = {**options, **{key: value for key, value in self._plain().items() if key in known}}
        sites = open_benchmark(name, root, limit=self.limit, **data)
        if self.folds and not any(
            c.patient for site in sites for split in site.cases.values() for c in split
        ):
            warn("no case names its patient: in folds, every case counts as a patient of its own")
        task = federation_settings(sites)["task"]
        config = self._config(task, known, is_own_data(sites))
        return Preset(
            name="experiment",
            benchmark=name,
            source="",
            config=config,
            data=data,
            arguments=self._arguments(),
            holdout_arguments={},
            protocol="own experiment",
        )

    @property
    def root(self) -> Path:
        """Return the folder of the data set's files."""
        return read_federation(self.data)[1] if self.own and is_federation(self.data) else self.data

    def axes(self) -> list[Axis]:
        """Return the settings that differ from the protocol; on own data only those that vary."""
        own = {} if self.own else {name: (value,) for name, value in self._plain().items()}
        return [Axis(name, tuple(values)) for name, values in {**own, **self.vary}.items()]

    def comparisons(self) -> list[Comparison]:
        """Return the comparisons: methods x axes, or the comparisons of the entry, each with the axes."""
        axes = self.axes()
        if not self.entry:
            return [Comparison(self.methods, tuple(axes))]
        check_axes(axes, self.methods, find_preset(self.protocol).benchmark)
        comparisons = []
        for comparison in find_entry(self.entry).comparisons(self.protocol):
            methods = tuple(text for text in parse_methods_list(comparison.methods) if text in self.methods)
            parts = {spec["name"] for text in methods for spec in parse_methods(text)}
            chosen = {axis.name: axis for axis in (*comparison.axes, *axes) if axis.method in ("", *parts)}
            if methods:
                comparisons.append(Comparison(methods, tuple(chosen.values())))
        if not comparisons:
            raise ConfigError(f"{self.entry} does not compare {', '.join(self.methods)}")
        return comparisons

    def runs(self, preset: Preset) -> list[PlannedRun]:
        """List the runs of the experiment, for its `preset`."""
        first, *also = self.comparisons()
        return plan(
            preset,
            self.root,
            first.methods,
            seeds=self.seeds,
            axes=first.axes,
            also=also,
            holdout=self.holdout,
            folds=self.folds,
            scale=self.scale,
            limit=self.limit,
            init=self.init,
        )

    def described(self, preset: Preset) -> dict[str, Any]:
        """Return the entries of the experiment's file, with all common settings of its runs."""
        entries: dict[str, Any] = {}
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if (value and value != entry.default) or entry.name in ("seeds", "folds"):
                entries[entry.name] = list(value) if isinstance(value, tuple) else value
        if self.own:
            common = {key: value for key, value in preset.config.items() if key not in (_PLAN, "planning")}
            if self.settings.get(_PLAN) == _AUTO:  # the plan decides the rest
                common = {name: common[name] for name in _STATED}
            plan = Plan.from_dict(preset.config.get(_PLAN, {})).to_dict()
            common |= {key: value for key, value in plan.items() if value != Plan().to_dict()[key]}
            entries["settings"] = {**common, **self.settings}
            if self.settings.get(_PLAN) not in (None, _AUTO):
                del entries["settings"][_PLAN]  # the file has its single values
            for name in self.vary:  # a reader of the file would keep them fixed
                entries["settings"].pop(name, None)
        return entries

    def _plain(self) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if name != _PLAN}

    def _arguments(self) -> dict[str, dict[str, Any]]:
        arguments: dict[str, dict[str, Any]] = {}
        for name, value in self._plain().items():
            method, _, argument = name.rpartition(".")
            if method:
                arguments.setdefault(method, {})[argument] = value
        return arguments

    def _config(self, task: str, options: Mapping[str, Any], own_data: bool) -> dict[str, Any]:
        fields = {
            name: value for name, value in self._plain().items() if "." not in name and name not in options
        }
        file = self.settings.get(_PLAN)
        plan = load_plan(file).to_dict() if file not in (None, _AUTO) else {}
        plan |= {name: fields.pop(name) for name in PLAN_FIELDS if name in fields}
        defaults = {name: getattr(RunConfig(), name) for name in _STATED}
        config = {**defaults, **task_defaults(task, Plan.from_dict(plan), own_data=own_data), **fields}
        if plan:
            config[_PLAN] = plan
        if file == _AUTO:
            config["planning"] = PlanningConfig.keeping((*plan, *fields)).to_dict()
        RunConfig.from_dict(config)  # checks the values
        return config


def make_experiment(
    file: str | Path | None, options: Mapping[str, Any], settings: Sequence[str] = ()
) -> Experiment:
    """Make an experiment from a file and options.

    Args:
        options: fields of `Experiment`, which take precedence over the file's; ``None`` for the file's value.
        settings: ``NAME=VALUE`` or ``NAME=VALUE,VALUE,...``; these take precedence over the file's, too. One
            value on own data is a setting of all runs.
    """
    content = read_experiment(file) if file is not None else {}
    content |= {name: value for name, value in options.items() if value is not None}
    if isinstance(entry := content.get("entry"), str) and entry:
        content = {**find_entry(entry).experiment(content.get("protocol", "")), **content}
    missing = [f"--{name}" for name in ("data", "methods", "out") if not content.get(name)]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} missing: a benchmark needs --data, --methods and --out, or these in "
            "the file of --experiment; --list names the papers' protocols"
        )
    fixed, vary = (content.get(name) or {} for name in ("settings", "vary"))
    if not (isinstance(fixed, dict) and isinstance(vary, dict)):
        raise ConfigError("experiment: settings and vary are names with values")
    fixed, vary = dict(fixed), dict(vary)
    axes = [parse_axis(text) for text in settings]
    for axis in axes:
        if [other.name for other in axes].count(axis.name) > 1:
            raise ConfigError(f"{axis.name} is set twice; give its values together, separated by commas")
        fixed.pop(axis.name, None)
        vary.pop(axis.name, None)
        if len(axis.values) == 1 and not content.get("protocol"):
            fixed[axis.name] = axis.values[0]
        else:
            vary[axis.name] = axis.values
    return Experiment(**{**content, "settings": fixed, "vary": vary})


def read_experiment(path: str | Path) -> dict[str, Any]:
    """Read an experiment's file; paths are relative to it."""
    path = Path(path)
    content = read_mapping(path, "methods: [fedavg, fedrdn]")
    known = [entry.name for entry in dataclasses.fields(Experiment)]
    check_keys(f"{path}: unknown keys", content, known)
    for name in _PATHS:
        if isinstance(content.get(name), str):
            content[name] = Path(os.path.normpath(path.parent / content[name]))
    settings = content.get("settings")
    if isinstance(settings, dict) and settings.get(_PLAN) not in (None, _AUTO):
        content["settings"] = {**settings, _PLAN: str(path.parent / str(settings[_PLAN]))}
    return content


def write_experiment(experiment: Experiment, preset: Preset) -> Path:
    """Write the file with which a user continues or repeats an experiment, to the folder of its results."""
    entries = experiment.described(preset)
    folder = experiment.out.resolve()
    for name in _PATHS:
        if name in entries:
            entries[name] = os.path.relpath(Path(entries[name]).resolve(), folder)
    text = yaml.safe_dump(_plain(entries), sort_keys=False, allow_unicode=True, width=100)
    target = experiment.out / EXPERIMENT
    head = f"# medfedaug {__version__}; continue it with: medfedaug benchmark --experiment {EXPERIMENT}\n"
    experiment.out.mkdir(parents=True, exist_ok=True)
    write_atomic(target, lambda file: file.write((head + text).encode()))
    return target


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value
