"""Options that several commands share, and options that are made from the fields of settings."""

import dataclasses
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from typer import Option

from medfedaug.config.options import Settings, default_of, hints_of, kinds_of, read_text
from medfedaug.config.plan import Plan, PlanningConfig
from medfedaug.data.dataset_json import find_layout
from medfedaug.errors import ConfigError, DataError
from medfedaug.federation.job_folder import GLOBAL_MODEL, RESULTS
from medfedaug.utils.files import read_mapping
from medfedaug.utils.printable import plain
from medfedaug.utils.validation import check_keys

_CONTEXT = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
_LONGEST_LIST = 16  # characters

Given = Mapping[type, dict[str, Any]]


def existing_folder(path: Path | None) -> Path | None:
    """Check that a folder exists, before large imports."""
    if path is not None and not path.is_dir():
        raise DataError("no such folder", path=path)
    return path


def folder_of_sites(path: Path | None) -> Path | None:
    """Check that a folder exists and is not a site itself, before large imports."""
    if path is not None and _is_lone_site(existing_folder(path) or path):
        parent = path.resolve().parent
        raise DataError("is a site itself", path=path, hint=f"Name the folder that holds it: {parent}")
    return path


def _is_lone_site(folder: Path) -> bool:
    """Return whether a folder lists or holds the cases of one site, and holds no folder that does."""

    def lists(path: Path) -> bool:
        return (path / "dataset.json").is_file() or find_layout(path) is not None

    if (folder / "federation.json").exists():  # of a published data set
        return False
    return lists(folder) and not any(path.is_dir() and lists(path) for path in folder.iterdir())


def existing_file(path: Path | None) -> Path | None:
    """Check that a file exists, before large imports."""
    if path is not None and not path.exists():
        raise ConfigError(f"{path}: no such file")
    return path


def existing_run(path: Path | None) -> Path | None:
    """Check that the model or folder of a run exists, before large imports."""
    if path is not None:
        model = path / GLOBAL_MODEL if path.is_dir() else path
        if not model.exists() and not (model.parent / RESULTS).exists():
            raise ConfigError(f"{path}: no finished run; name a folder with {GLOBAL_MODEL} and {RESULTS}")
    return path


Data = Annotated[Path, Option("--data", callback=folder_of_sites, help="Folder of sites' folders.")]
SiteOrSites = Annotated[
    Path, Option("--data", callback=existing_folder, help="A site's folder, or a folder of sites' folders.")
]
Device = Annotated[str, Option(help="cpu, cuda, cuda:1, or auto: CUDA if available.")]
State = Annotated[
    Path | None,
    Option(help="Folder of a site's own layers; by default MEDFEDAUG_STATE, or state/ beside the model."),
]
Limit = Annotated[int | None, Option(min=1, help="At most this many cases per split and site.")]
Init = Annotated[Path | None, Option(callback=existing_file, help="Weights to start from.")]
Loop = Annotated[str | None, Option(metavar="FILE.py|NAME", help="Custom training loop: a script or a name.")]
Threads = Annotated[int, Option(min=0, help="CPU threads per site; 0 shares the cores among sites.")]
Workers = Annotated[
    str | None, Option(help="Number of processes, slurm, slurm:PARTITION, or dask://HOST:PORT. [default: 1]")
]
Each = Annotated[list[str] | None, Option(metavar="NAME=VALUE", help="Cluster request: gpus=1, mem=16G.")]
Pictures = Annotated[bool, Option("--pictures/--no-pictures", help="Show images on the page.", hidden=True)]
Report = Annotated[bool, Option("--report/--no-report", help="Write report.html now, or not.", hidden=True)]
Bundle = Annotated[
    str | None,
    Option(
        metavar="DIR|NAME",
        help="MONAI Bundle that defines the training: a folder, or a name in MEDFEDAUG_BUNDLES. Its code "
        "runs here.",
        rich_help_panel="The run",
    ),
]
Methods = Annotated[str | None, Option(help="Methods, separated by commas: fedrdn,fedfa.")]
_plan = partial(Option, rich_help_panel=Plan.PANEL)
PlanFile = Annotated[
    str | None,
    _plan("--plan", metavar="FILE|auto", help="File of medfedaug plan; or auto: from the sites' summaries."),
]
PlanMemory = Annotated[
    float | None,
    _plan(
        min=0.01,
        help=f"GiB of a training step, for --plan auto [default: {PlanningConfig.memory:g}].",
        hidden=True,
    ),
]
Assignments = Annotated[
    list[str] | None,
    Option("--set", metavar="NAME=VALUE", help="METHOD.ARG=VALUE, or a setting; repeatable."),
]
SiteNames = Annotated[bool, Option("--site-names", help="Name the sites in the model card.")]
JsonFile = Annotated[Path | None, Option("--json", metavar="FILE", help="Also write JSON.")]
Config = Annotated[Path | None, Option(metavar="FILE", help="YAML with settings, or a run's results.json.")]


def takes(
    *groups: type[Settings], without: tuple[str, ...] = (), **texts: str
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each field of classes of settings.

    The command receives ``given``: for each class, given values and defaults by field, without defaults that
    follow from other settings. If the command has a parameter ``config``, values that are not on the command
    line come from that file.

    Args:
        *groups: the classes; a field of the first one may hold one of the others.
    """
    options = {
        entry.name: (cls, _parameter(cls, entry, texts.get(entry.name, entry.metadata["description"])))
        for cls in groups
        for entry in dataclasses.fields(cls)  # type: ignore[arg-type]
        if entry.metadata["flags"] is not None and entry.name not in without
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def call(context: typer.Context, **values: Any) -> None:
            file = values.get("config")
            given = read_groups(file, groups) if file is not None else {cls: {} for cls in groups}
            for name, (cls, _) in options.items():
                value = values.pop(name)
                if value is not None and (file is None or name not in given[cls] or is_given(context, name)):
                    if isinstance(value, str):
                        value = read_text(cls, name, value)
                    elif isinstance(value, list):
                        value = tuple(value)
                    given[cls][name] = value
            if "context" in parameters:
                values["context"] = context
            command(**values, given=given)

        parameters = inspect.signature(command, eval_str=True).parameters
        rest = [parameter for name, parameter in parameters.items() if name not in ("context", "given")]
        first = [parameter for parameter in rest if parameter.default is parameter.empty]
        last = [parameter for parameter in rest if parameter.default is not parameter.empty]
        order = [_CONTEXT, *first, *(parameter for _, parameter in options.values()), *last]
        call.__signature__ = inspect.Signature(order)  # type: ignore[attr-defined]
        call.__annotations__ = {parameter.name: parameter.annotation for parameter in order}
        return call

    return decorate


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether a parameter was given on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def read_groups(file: Path, groups: Sequence[type[Settings]]) -> dict[type, dict[str, Any]]:
    """Read the settings of a YAML or JSON file, such as a run's ``results.json``, by their classes.

    Args:
        file: an object with fields of all classes; or a record that holds it under ``config``.
        groups: the classes; a field of the first one may hold one of the others.
    """
    content = read_mapping(file, "rounds: 50")
    if isinstance(content.get("config"), dict):
        content = {**content["config"], **content.get("execution", {})}
    settings: dict[type, dict[str, Any]] = {}
    names = {cls: [entry.name for entry in dataclasses.fields(cls)] for cls in groups}  # type: ignore[arg-type]
    nested = {kind: name for name, kind in hints_of(groups[0]).items() if kind in groups}  # type: ignore[arg-type]
    for cls in groups:
        inner = content.pop(nested[cls], {}) if cls in nested else {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{file}: {nested[cls]} must be an object of settings")
        check_keys(f"{file}: unknown keys", inner, names[cls])
        outer = {*names[cls]} & content.keys() - set(nested.values())
        settings[cls] = {**inner, **{name: content.pop(name) for name in outer}}
    check_keys(f"{file}: unknown keys", content, [name for cls in groups for name in names[cls]])
    return settings


def _parameter(cls: type[Settings], entry: dataclasses.Field[Any], text: str) -> inspect.Parameter:
    # The first sentence; the rest is on the pages.
    rules, text = entry.metadata, plain(text).partition(". ")[0].rstrip(".") + "."
    hint = hints_of(cls)[entry.name]  # type: ignore[arg-type]
    default = default_of(entry)
    kinds = kinds_of(hint)
    least = rules.get("ge")
    kind: Any = hint
    if any((get_origin(type_) or type_) in (dict, Mapping) for type_ in kinds):
        kind, default = str, json.dumps(default)
    elif default == ():
        kind, default = list[str] | None, None
    elif any(get_origin(type_) is tuple for type_ in kinds):
        kind, default = (str | None, None) if default is None else (str, ",".join(default))
    elif least is None and "gt" in rules and int in kinds:
        least = int(rules["gt"]) + 1
    if rules["follows"]:
        kind, default = kind | None, None
    if default not in (None, False, "", "{}") and "default" not in text:
        value = f"{default:g}" if isinstance(default, float) else "true" if default is True else default
        text = f"{text} By default {value}{f', or {cls.OPEN}' if cls.OPEN else ''}."
    if cls.OPEN:
        kind, default = kind | None, None
    option = Option(
        *rules["flags"],
        help=text,
        min=least if kind is not str else None,
        metavar=_metavar(kinds, rules["choices"]),
        show_default=False,
        rich_help_panel=cls.PANEL,
        hidden=rules["rare"],
        envvar=f"{cls.VARIABLES}{entry.name.upper()}" if cls.VARIABLES else None,
    )
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _metavar(kinds: Sequence[Any], choices: Sequence[str]) -> str | None:
    """Return a short word for the values of an option, which leaves room for its text."""
    if choices:
        listed = "|".join(choices)
        return listed if len(listed) <= _LONGEST_LIST else "NAME"
    words = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
    known = (words.get(get_args(kind)[0] if get_origin(kind) is tuple else kind) for kind in kinds)
    return next(filter(None, known), None)
