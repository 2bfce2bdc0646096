"""Options: those that several commands share, and those that are made from the fields of settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
import typer
import yaml

from medfedaug.config.options import Settings, defaults, read_text
from medfedaug.config.plan import PLAN_MEMORY
from medfedaug.errors import ConfigError, first_line
from medfedaug.utils.docstrings import plain
from medfedaug.utils.validation import check_keys

__all__ = [
    "Arguments",
    "Bundle",
    "CrossSite",
    "Data",
    "Device",
    "Given",
    "Init",
    "Limit",
    "Local",
    "Loop",
    "Methods",
    "Pictures",
    "PlanFile",
    "PlanMemory",
    "Threads",
    "Tracking",
    "is_given",
    "named_pairs",
    "read_groups",
    "split_pairs",
    "takes",
]


Given = Mapping[type, dict[str, Any]]

Data = Annotated[Path, typer.Option("--data", help="Folder that holds one folder per site.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ..., or auto: CUDA where there is one.")]
State = Annotated[
    Path | None,
    typer.Option(
        help="Folder of a site's own layers: its kit, or a folder of states. By default the folder state "
        "beside the model, or MEDFEDAUG_STATE."
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, help="At most this many cases per split and site.")]
Init = Annotated[
    Path | None,
    typer.Option(
        help="Start from the weights in this file: a state dict, as torch.save writes it or as safetensors. "
        "All entries are used that fit the network by name and shape; the others are listed."
    ),
]
Loop = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py|NAME",
        help="A training loop of your own, which sites run in the place of medfedaug's: a script that calls "
        "medfedaug.client.join, or the name of one that an installed package adds.",
    ),
]
Local = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RUN|SITE=RUN",
        help="The models that the sites trained alone, with which the run is compared: a run with --methods "
        "single; or, repeatable, the run that a site made by itself.",
    ),
]
CrossSite = Annotated[
    bool,
    typer.Option(
        "--cross-site",
        help="Score each site's own models at all other sites too: its local one, and its personal one.",
    ),
]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads per site; 0 shares the cores among sites.")]
Pictures = Annotated[
    bool, typer.Option("--pictures/--no-pictures", help="Show images of the sites in report.html, or not.")
]
Report = Annotated[
    bool,
    typer.Option("--report/--no-report", help="Write report.html, or leave it to `medfedaug report` later."),
]
Bundle = Annotated[
    str | None,
    typer.Option(
        metavar="DIR|NAME",
        help="A MONAI Bundle that defines the training, in the place of network, loss, optimiser, plan and "
        "augmentation: its folder, or its name in the folder that MEDFEDAUG_BUNDLES names. Its expressions "
        "are run here: it is code.",
        rich_help_panel="The run",
    ),
]
Methods = Annotated[str, typer.Option(help="Methods, separated by commas, for instance fedrdn,fedfa.")]
PlanFile = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="FILE|auto",
        help="A plan of volumes: a JSON file that `medfedaug plan` wrote; or auto: before training the sites "
        "send summaries of their volumes, of which the plan is made. The options below settle single values.",
        rich_help_panel="The plan of volumes",
    ),
]
PlanMemory = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        help=f"GiB that a training step may take at a site, for --plan auto. [default: {PLAN_MEMORY:g}]",
        rich_help_panel="The plan of volumes",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="METHOD.ARG=VALUE", help="An argument of a method; repeatable."),
]
Tracking = Annotated[
    str | None, typer.Option(help="tensorboard or mlflow: write the sites' metrics of each round there, too.")
]


def takes(
    *groups: type[Settings], without: tuple[str, ...] = (), **texts: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of classes of settings.

    The command receives ``given``: for each class, what was given or has a default, by field. Defaults that
    follow from other settings are left out of it. Where the command has a parameter ``config``, what is not
    given on the command line is taken from that file.

    Args:
        *groups: the classes; a field of the first one may hold one of the others.
        without: fields that are no options of this command.
        **texts: help texts in the place of the fields' own.
    """
    options = {
        entry.name: (cls, _parameter(cls, entry, texts.get(entry.name, entry.metadata["description"])))
        for cls in groups
        for entry in dataclasses.fields(cls)  # type: ignore[arg-type]
        if entry.metadata["flags"] is not None and entry.name not in without
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**values: Any) -> None:
            file = values.get("config")
            given = read_groups(file, groups) if file is not None else {cls: {} for cls in groups}
            for name, (cls, _) in options.items():
                value = values.pop(name)
                if value is not None and (file is None or name not in given[cls] or is_given(name)):
                    kept = tuple(value) if isinstance(value, list) else value
                    given[cls][name] = read_text(cls, name, value) if isinstance(value, str) else kept
            command(**values, given=given)

        own = inspect.signature(command, eval_str=True).parameters.values()
        first = [parameter for parameter in own if parameter.default is parameter.empty]
        last = [parameter for parameter in own if parameter.default is not parameter.empty]
        order = [*first, *(parameter for _, parameter in options.values()), *last]
        order = [parameter for parameter in order if parameter.name != "given"]
        call.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in order}
        return call

    return decorate


def is_given(name: str) -> bool:
    """Return whether a parameter of the running command was given on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def read_groups(file: Path, groups: Sequence[type[Settings]]) -> dict[type, dict[str, Any]]:
    """Read the settings of a YAML or JSON file, such as a run's ``results.json``, by their classes.

    Args:
        file: an object with fields of all classes; or a record that holds it under ``config``.
        groups: the classes; a field of the first one may hold one of the others.

    Raises:
        ConfigError: for a file that cannot be read, and unknown settings.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: not readable as YAML or JSON ({first_line(error)})") from error
    if isinstance(content, dict) and isinstance(content.get("config"), dict):
        content = {**content["config"], **content.get("execution", {})}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: names and values are needed, such as rounds: 50")
    found: dict[type, dict[str, Any]] = {}
    nested = {kind: name for name, kind in get_type_hints(groups[0]).items() if kind in groups}
    for cls in groups:
        known = {entry.name for entry in dataclasses.fields(cls)}  # type: ignore[arg-type]
        own = content.pop(nested[cls], {}) if cls in nested else {}
        if not isinstance(own, dict):
            raise ConfigError(f"{file}: {nested[cls]} must be an object of settings")
        check_keys(f"{file}: unknown keys", own, known)
        found[cls] = {**own, **{name: content.pop(name) for name in known & content.keys() - nested.keys()}}
    everything = [entry.name for cls in groups for entry in dataclasses.fields(cls)]  # type: ignore[arg-type]
    check_keys(f"{file}: unknown keys", content, everything)
    return found


def _parameter(cls: type[Settings], entry: dataclasses.Field[Any], text: str) -> inspect.Parameter:
    rules, hint = entry.metadata, get_type_hints(cls)[entry.name]
    default = defaults(cls)[entry.name]
    kinds = (hint, *get_args(hint))
    least = rules.get("ge")
    kind: Any = hint
    if any((get_origin(one) or one) in (dict, Mapping) for one in kinds):
        kind, default = str, json.dumps(default)
    elif default == ():
        kind, default = list[str] | None, None
    elif any(get_origin(one) is tuple for one in kinds):
        kind, default = (str | None, None) if default is None else (str, ",".join(default))
    elif least is None and "gt" in rules and int in kinds:
        least = int(rules["gt"]) + 1
    if rules["follows"]:
        kind, default = kind | None, None
    if cls.OPEN and default is not None:
        shown = str(default).lower() if isinstance(default, bool) else default
        kind, default, text = kind | None, None, f"{text} [default: {shown}, or {cls.OPEN}]"
    option = typer.Option(
        *rules["flags"],
        help=plain(text),
        min=least if kind is not str else None,
        metavar="|".join(rules["choices"]) or None,
        rich_help_panel=cls.PANEL,
        hidden=rules["rare"],
    )
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def split_pairs(
    option: str, example: str, given: Sequence[str] | None, *, form: str = "NAME=VALUE", first: bool = False
) -> list[tuple[str, str]]:
    """Read values such as ``NAME=VALUE``, without the spaces around either.

    Args:
        option: the option that they were given to, for messages.
        example: a value of it, for messages.
        given: the values.
        form: of a value, for messages.
        first: whether they are split at the first sign, since a value may have some; else at the last one.

    Raises:
        ConfigError: for what is no pair.
    """
    split = [one.partition("=") if first else one.rpartition("=") for one in given or ()]
    pairs = [(name.strip(), value.strip()) for name, _, value in split]
    if not all(name and value for name, value in pairs):
        raise ConfigError(f"{option} takes {form}, such as {example}")
    return pairs


def named_pairs(
    option: str, example: str, given: Sequence[str] | None, *, first: bool = False
) -> dict[str, str]:
    """Read values ``NAME=VALUE``, each of another name; arguments as of `split_pairs`.

    Raises:
        ConfigError: for what is no pair, and for a name that is given twice.
    """
    pairs = split_pairs(option, example, given, first=first)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ConfigError(f"{option} names one thing twice")
    return found
