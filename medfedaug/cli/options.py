"""Options: those that several commands share, and those that are made from the fields of settings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from medfedaug.config.plan import PLAN_MEMORY
from medfedaug.config.run import TASK_DEFAULTS
from medfedaug.errors import ConfigError, DataError
from medfedaug.federation.job_folder import GLOBAL_MODEL, RESULTS
from medfedaug.utils.files import parse_json

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
    "SiteOrSites",
    "Threads",
    "Tracking",
    "existing_folder",
    "existing_run",
    "named_pairs",
    "split_pairs",
    "takes",
]


Given = Mapping[type, dict[str, Any]]


def existing_folder(path: Path | None) -> Path | None:
    """Check that a folder is there, before anything large is imported.

    Raises:
        DataError: naming it.
    """
    if path is not None and not path.is_dir():
        raise DataError("no such folder", path=path)
    return path


def existing_run(path: Path | None) -> Path | None:
    """Check that the folder or model of a run is there, before anything large is imported.

    Raises:
        ConfigError: naming it.
    """
    if path is not None and not path.exists() and not (path.parent / RESULTS).exists():
        raise ConfigError(
            f"{path}: no finished run; name the folder of one, in which are {GLOBAL_MODEL} and {RESULTS}"
        )
    return path


Data = Annotated[
    Path,
    typer.Option("--data", callback=existing_folder, help="Folder that holds one folder per site."),
]
SiteOrSites = Annotated[
    Path,
    typer.Option(
        "--data", callback=existing_folder, help="A site's folder, or one that holds several sites' folders."
    ),
]
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
    str | None,
    typer.Option(help="tensorboard, mlflow or wandb: write the sites' metrics of each round there, too."),
]

# What is not given is left to a file, which is an option of its own.
_OPEN = {"Plan": "what the plan says", "JobRules": "what the kit says"}
# Settings whose default follows from the data as well as from the task, or from where the run takes place.
_OF_THE_RUN = ("augmentation", "max_step")
_PANELS = {
    "RunConfig": "The run",
    "Plan": "The plan of volumes",
    "Execution": "How the run is carried out",
    "JobRules": "Which jobs the site takes part in",
}


def takes(
    *settings: type, without: tuple[str, ...] = (), **texts: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of dataclasses of settings.

    The command receives ``given``: for each dataclass, what was given or has a default, by field. Defaults
    that follow from the task are left out of it.

    Args:
        *settings: dataclasses whose fields are `medfedaug.config.options.setting`.
        without: fields that are no options of this command.
        **texts: help texts in the place of the fields' own.
    """
    options: dict[str, tuple[type, inspect.Parameter]] = {}
    for cls in settings:
        hints = get_type_hints(cls)
        for entry in dataclasses.fields(cls):
            if entry.metadata["flags"] is not None and entry.name not in without:
                text = texts.get(entry.name, entry.metadata["text"])
                options[entry.name] = cls, _parameter(cls, entry, hints[entry.name], text)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(**values: Any) -> None:
            given: dict[type, dict[str, Any]] = {cls: {} for cls in settings}
            for name, (cls, parameter) in options.items():
                value = values.pop(name)
                if value is not None:
                    given[cls][name] = _value(value, cls, name, parameter)
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


def _parameter(cls: type, entry: dataclasses.Field[Any], hint: Any, text: str) -> inspect.Parameter:
    rules = entry.metadata
    least, default = rules["at_least"], entry.default
    if callable(entry.default_factory):
        default = entry.default_factory()
    kind: Any
    if isinstance(default, dict):
        kind, default = str, json.dumps(default)
    elif _is_list(hint) and default is None:
        kind = str | None
    elif isinstance(default, tuple):
        kind, default = (list[str] | None, None) if not default else (str, ",".join(default))
    else:
        kind = hint
        if least is None and rules["above"] is not None and int in (hint, *get_args(hint)):
            least = int(rules["above"]) + 1
    by_task = {task: values[entry.name] for task, values in TASK_DEFAULTS.items() if entry.name in values}
    if by_task or entry.name in _OF_THE_RUN:
        kind, default = kind | None, None
    if by_task:
        text += f" By default {', '.join(f'{value} for {task}' for task, value in by_task.items())}."
    if cls.__name__ in _OPEN and default is not None:
        shown = str(default).lower() if isinstance(default, bool) else default
        kind, default, text = kind | None, None, f"{text} [default: {shown}, or {_OPEN[cls.__name__]}]"
    option = typer.Option(
        *rules["flags"],
        help=text,
        min=least if kind is not str else None,
        metavar="|".join(rules["choices"]) or None,
        rich_help_panel=_PANELS.get(cls.__name__, cls.__name__),
    )
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _value(value: Any, cls: type, name: str, parameter: inspect.Parameter) -> Any:
    """The value of a field from that of its option: text may stand for an object or a list."""
    hint = get_type_hints(cls)[name]
    if get_origin(hint) is dict:
        return _json_object(value, f"--{name.replace('_', '-')}")
    if _is_list(hint) and isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return tuple(value) if isinstance(value, list) else value


def _is_list(hint: Any) -> bool:
    return any(get_origin(kind) is tuple for kind in (hint, *get_args(hint)))


def _json_object(text: str, option: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{option}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{option}: a JSON object is needed, got {text}")
    return value


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
