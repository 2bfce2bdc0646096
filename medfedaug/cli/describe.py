"""Descriptions of methods, networks and data sets from the code, for the catalogue of the command.

Texts are docstrings; arguments and defaults are signatures. Reading them needs PyTorch and MONAI, so that
``make catalogue`` writes them to a file (`medfedaug.cli.catalogue`). A test compares file and classes.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from importlib import metadata
from typing import Any

import torch
from torch import nn

from medfedaug.cli.described import BESIDE_THE_MODEL, FILE, ONLY_FOR, Argument, Described
from medfedaug.cli.schema import File
from medfedaug.config.options import json_schema
from medfedaug.config.plan import Plan
from medfedaug.config.run import Execution, RunConfig
from medfedaug.config.site_description import SiteDescription
from medfedaug.data.benchmarks import BENCHMARKS
from medfedaug.data.published import OPTION_TEXTS
from medfedaug.errors import ConfigError, first_line
from medfedaug.experiments.experiment import Experiment
from medfedaug.experiments.presets import PRESETS
from medfedaug.methods import registry
from medfedaug.methods.base import Method
from medfedaug.methods.compatibility import included_methods
from medfedaug.models import build_network, networks
from medfedaug.models.stages import known_stages
from medfedaug.privacy.site_settings import SiteSettings
from medfedaug.utils import plugins
from medfedaug.utils.class_paths import constructor_parameters
from medfedaug.utils.docstrings import plain, read_docstring
from medfedaug.utils.files import write_text

# Arguments of a network that follow from the data, or are never used.
_SETTLED = ("spatial_dims", "in_channels", "n_input_channels", "out_channels", "num_classes", "pretrained")
_SIZES = {"segmentation": (1, 2), "classification": (3, 10)}
"""Channels and classes of described networks, by task."""


def catalogue() -> dict[str, Any]:
    """Return descriptions of all built-in choices as JSON types."""
    return {
        "monai": metadata.version("monai"),
        "methods": _plain(map(describe_method, registry.BUILT_IN_NAMES)),
        "networks": _plain(map(describe_network, networks.built_in_networks())),
        "data_sets": _plain(map(describe_data_set, BENCHMARKS)),
    }


def schemas() -> dict[File, dict[str, Any]]:
    """Return the JSON Schemas of the files that users write."""
    experiment = json_schema(Experiment)
    del experiment["required"]  # options of the command may give the rest
    known = [*fields(RunConfig), *fields(Plan)]
    texts = {f.name: {"description": plain(f.metadata["description"])} for f in known if f.metadata}
    for name in ("settings", "vary"):
        experiment["properties"][name]["properties"] = texts
    run = json_schema(RunConfig)
    run["properties"] |= json_schema(Execution)["properties"]
    return {
        File.experiment: experiment,
        File.run: run,
        File.site_settings: json_schema(SiteSettings),
        File.site_description: json_schema(SiteDescription),
    }


def write_catalogue() -> None:
    """Write catalogue and schemas next to the modules that read them."""
    files = {FILE: catalogue(), **{file.path: content for file, content in schemas().items()}}
    for path, content in files.items():
        write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def describe_method(name: str) -> Described:
    """Describe a method, its arguments, and the data that leave a site."""
    if name in registry.COMBINATIONS:
        return _combination(name)
    cls = registry.find_class(name)
    line, doc = _method(name, cls), read_docstring(cls)
    facts = dict(line.facts)
    exchanged = [text for text in doc.paragraphs if text.startswith("Exchange")]
    if exchanged:
        facts[BESIDE_THE_MODEL] = f"{line.facts[BESIDE_THE_MODEL]}. {' '.join(exchanged)}"
    if included := included_methods(cls):
        facts["includes"] = ", ".join(included)
    text = [doc.summary, *(text for text in doc.paragraphs if text not in exchanged)]
    if differs := doc.sections.get("Deviations"):
        text.append(f"Deviations: {differs}")
    parameters = {} if cls.__init__ is object.__init__ else inspect.signature(cls).parameters
    arguments = _arguments(parameters, doc.arguments)
    package = _package(plugins.METHODS, name)
    return Described(name, line.what, line.facts, facts, tuple(text), arguments, package)


def describe_network(name: str) -> Described:
    """Describe a network, its arguments, and its stages and size in 2D and 3D."""
    try:
        builder, _ = networks.find_builder(name)
    except ValueError as error:
        raise ConfigError(f"network {name!r}: {error}") from error
    line = _network(name)
    network_class, chosen = getattr(builder, "cls", builder), getattr(builder, "defaults", {})
    facts = {**line.facts, **_sizes(name)}
    parameters = {
        key: parameter.replace(default=chosen.get(key, parameter.default))
        for key, parameter in constructor_parameters(network_class).items()
        if key not in _SETTLED
    }
    if isinstance(builder, networks.ClassifierBuilder):  # fills in arguments without a default
        parameters = {key: p for key, p in parameters.items() if p.default is not p.empty}
    texts = {key: _sentence(text) for key, text in read_docstring(network_class).arguments.items()}
    arguments = _arguments(parameters, texts)
    return Described(name, line.what, line.facts, facts, (), arguments, _package(plugins.NETWORKS, name))


def describe_data_set(name: str) -> Described:
    """Describe a published data set: address, layout of its folder, options, and protocols."""
    benchmark = BENCHMARKS[name]
    protocols = [preset.name for preset in PRESETS.values() if preset.benchmark == name]
    facts = {"get it from": benchmark.source, "layout": benchmark.layout, "protocols": ", ".join(protocols)}
    texts = {**OPTION_TEXTS, **read_docstring(benchmark.open).arguments}
    options = [Argument(key, _json(value), texts.get(key, "")) for key, value in benchmark.options.items()]
    return Described(name, benchmark.description, facts=facts, arguments=tuple(options))


def _method(name: str, cls: type[Method]) -> Described:
    def has(hook: str) -> bool:
        return getattr(cls, hook) is not getattr(Method, hook)

    times = ["less"] if has("local_entries") else []
    times += ["once"] if has("before_training") else []
    times += ["every round"] if has("every_round") else []
    limits = [] if set(cls.tasks) == set(Method.tasks) else list(cls.tasks)
    limits += [] if set(cls.dimensions) == set(Method.dimensions) else [f"{n}D" for n in cls.dimensions]
    sent = "; ".join(times) or "nothing"
    facts = {BESIDE_THE_MODEL: "the images themselves" if "separate_sites" in cls.excludes else sent}
    facts |= {ONLY_FOR: ", ".join(limits)} if limits else {}
    module = sys.modules[cls.__module__].__doc__ or ""
    what = read_docstring(cls).summary
    if cls.__module__.startswith("medfedaug."):  # a file is a method; its first line describes it
        title, _, does = module.partition("\n")[0].partition(": ")
        what = does or title or what
    return Described(name, what[:1].upper() + what[1:], facts, facts)


def _combination(name: str) -> Described:
    parts = []
    for part in registry.COMBINATIONS[name]:
        arguments = "".join(f" with {key}={_json(value)}" for key, value in part.get("args", {}).items())
        parts.append(part["name"] + arguments)
    facts = {BESIDE_THE_MODEL: "as there"}
    return Described(name, f"The same as {' and '.join(parts)}.", facts, facts)


def _network(name: str) -> Described:
    builder, _ = networks.find_builder(name)
    network_class, task = getattr(builder, "cls", builder), networks.task_of(name)
    summary = _sentence(read_docstring(network_class).summary)
    monai = network_class.__module__.startswith("monai.")
    what = f"MONAI's {network_class.__name__}: {summary}" if monai else summary
    facts = {"for": task} if task else {}
    return Described(name, what, facts, facts)


def _sizes(name: str) -> dict[str, str]:
    facts = {}
    channels, classes = _SIZES[networks.task_of(name) or "segmentation"]
    for dims in (2, 3):
        sizes = {"spatial_dims": dims, "in_channels": channels, "out_channels": classes}
        try:
            net = _empty(name, **sizes)
        except Exception as error:  # any error of a network about arguments or sizes
            facts[f"in {dims}D"] = f"not with its defaults: {first_line(error)}"
            continue
        count = sum(parameter.numel() for parameter in net.parameters()) / 1e6
        facts[f"in {dims}D"] = f"{count:.2f} million parameters ({channels} channels, {classes} classes)"
        facts["stages"] = _stages(net)
    return facts


def _empty(name: str, **sizes: Any) -> nn.Module:
    """Build a network without weights: AlexNet's in 3D take a gigabyte, and seconds to draw."""
    try:
        with torch.device("meta"):
            return build_network(name, **sizes)
    except (RuntimeError, NotImplementedError):  # Swin computes numbers with tensors
        with torch.random.fork_rng(devices=[]):
            return build_network(name, **sizes)


def _stages(net: nn.Module) -> str:
    stages = known_stages(net)
    if not stages:
        return "not known; methods that act on features take modules by name, as fedfa's stages"
    return ", ".join(f"{stage.name} ({stage.channels} channels)" for stage in stages)


def _plain(items: Iterable[Described]) -> list[dict[str, Any]]:
    # Without empty entries, for readable differences between versions.
    return [{key: value for key, value in asdict(item).items() if value} for item in items]


def _package(group: str, name: str) -> str:
    return next((plugin.package for plugin in plugins.installed(group) if plugin.name == name), "")


def _arguments(parameters: Mapping[str, inspect.Parameter], texts: Mapping[str, str]) -> tuple[Argument, ...]:
    return tuple(
        Argument(name, "" if p.default is p.empty else _json(p.default), texts.get(name, ""))
        for name, p in parameters.items()
        if p.kind is not p.VAR_KEYWORD
    )


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _sentence(text: str) -> str:
    """Return the first sentence of a text, or the whole text."""
    return text.partition(". ")[0].rstrip(".:") + "." if text else ""


if __name__ == "__main__":
    write_catalogue()
