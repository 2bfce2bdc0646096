"""Settings: dataclasses whose fields define text, limits and option once.

`setting` makes a field, and `settings` a class of such fields, which pydantic checks. From the fields follow
the docstring, the options of commands (`medfedaug.cli.options.takes`), the variables of a site's environment
and its kit's file (`medfedaug.hospital.privacy.site_settings`), and the tables of the pages
(`settings_table`).
"""

import dataclasses
import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs, ErrorDetails
from typing_extensions import Self, dataclass_transform

from medfedaug.errors import ConfigError, config_errors
from medfedaug.utils.files import parse_json
from medfedaug.utils.printable import html_table
from medfedaug.utils.validation import check_choice, check_keys, check_plain

Class = TypeVar("Class", bound=type)

File = Annotated[Path, Strict(False)]  # a path, or text

_WIDTH = 106
_LONGEST = 200  # characters of a wrong value that a message repeats
_LARGEST_NUMBER, _LARGEST_COUNT = 1e15, 2**63 - 1

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
"""A text is not a number, ``true`` is not 1, and an unknown key is an error."""

# By the kinds of pydantic's errors; other errors keep pydantic's words.
_WORDS = {
    "bool_type": "must be true or false",
    "dict_type": "must be a JSON object",
    "finite_number": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "int_type": "must be a whole number",
    "less_than": "must be below {lt:g}",
    "literal_error": "must be {expected}",
    "less_than_equal": "must be at most {le:g}",
    "mapping_type": "must be a JSON object",
    "path_type": "must be a path",
    "sequence_str": "must be a list",
    "string_too_long": "must be text of at most {max_length} characters",
    "string_too_short": "must be text of at least {min_length} characters",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "value_error": "{error}",
}
_ABOVE_ZERO = {"greater_than": "must be positive", "greater_than_equal": "cannot be negative"}
"""Words for a limit of 0."""


def setting(
    default: Any,
    text: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Sequence[str] = (),
    flags: Sequence[str] | None = (),
    follows: bool = False,
    rare: bool = False,
    secret: bool = False,
) -> Any:
    """Make a field of a class of settings.

    Args:
        default: the default value, or a type that makes it, such as ``dict``; ``MISSING`` for none.
        text: plain text for the documentation and the command's help.
        above: lower limit that is not a value itself.
        at_least: smallest value.
        at_most: largest value; by default 1e15, and for a whole number the largest of 64 bits.
        below: upper limit that is not a value itself.
        choices: the allowed values.
        flags: names of the command's option; by default the field's. ``None`` for no option and no variable.
        follows: whether the default follows from the data or other settings; the option then has none.
        rare: whether a command shows the option only with ``--help-all``.
        secret: whether ``repr`` hides the value.
    """
    limits = {"gt": above, "ge": at_least, "le": at_most, "lt": below}
    metadata = {
        "description": text,
        "choices": tuple(choices),
        "flags": flags,
        "follows": follows,
        "rare": rare,
        **{name: limit for name, limit in limits.items() if limit is not None},
    }
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=metadata, repr=not secret)
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


@dataclass_transform(frozen_default=True)
def settings(cls: Class) -> Class:
    """Turn a class of `Settings` into a frozen dataclass that pydantic checks.

    The fields' texts become the ``Args`` of its docstring, before ``Raises``.

    Example:
        >>> @settings
        ... class Room(Settings):
        ...     '''The size of a room.'''
        ...     width: float = setting(1.0, "Width in metres.", above=0)
        >>> print(Room.__doc__)
        The size of a room.
        <BLANKLINE>
        Args:
            width: Width in metres.
        >>> Room(width=-1.0)
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: width must be positive, got -1.0
    """
    checked: Any = dataclass(cls, frozen=True, config=_STRICT)
    texts = [
        textwrap.fill(f"{entry.name}: {entry.metadata['description']}", _WIDTH, subsequent_indent="    ")
        for entry in dataclasses.fields(checked)
    ]
    docstring = inspect.cleandoc(cls.__doc__ or "")
    parts = (docstring.partition(f"\n\n{word}:") for word in ("Raises", "Example"))
    head, mark, tail = min(parts, key=lambda part: len(part[0]))
    checked.__doc__ = f"{head}\n\nArgs:\n{textwrap.indent(chr(10).join(texts), '    ')}{mark}{tail}"
    return checked


class Settings:
    """Base of settings: a mistake makes one line, and values go in and out as plain JSON types.

    Attributes:
        TITLE: the beginning of a message, such as ``"privacy: "``.
        PANEL: the title of the options in a command's help.
        OPEN: the source of a value without an option, in words; empty where the default counts.
        VARIABLES: the prefix of the environment variables that count without an option; empty for none.
    """

    TITLE: ClassVar[str] = ""
    PANEL: ClassVar[str] = "Options"
    OPEN: ClassVar[str] = ""
    VARIABLES: ClassVar[str] = ""

    @model_validator(mode="wrap")
    @classmethod
    def _check(cls, values: Any, handler: Callable[[Any], Any]) -> Any:
        if isinstance(values, ArgsKwargs):
            names = [entry.name for entry in dataclasses.fields(cls)]  # type: ignore[arg-type]
            arguments = {**dict(zip(names, values.args, strict=False)), **(values.kwargs or {})}
            arguments = {name: _prepared(cls, name, value) for name, value in arguments.items()}
            values = ArgsKwargs(values.args[len(names) :], arguments)
        try:
            return handler(values)
        except ValidationError as error:
            raise ConfigError(f"{cls.TITLE}{_line(cls, error)}") from error

    def _repr_html_(self) -> str:
        """Return the settings other than their defaults as a table, for a notebook; without secrets."""
        usual, shown = defaults(type(self)), [e.name for e in dataclasses.fields(self) if e.repr]  # type: ignore[arg-type]
        rows = [[name, str(value)] for name in shown if (value := getattr(self, name)) != usual.get(name)]
        return html_table([type(self).__name__, "value"], rows or [["every setting", "its default"]])

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON types."""
        return {entry.name: to_json(getattr(self, entry.name)) for entry in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Invert `to_dict`; a missing key keeps its default.

        Raises:
            ConfigError: for unknown keys, which would silently do nothing, and impossible values.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.TITLE}expected an object of settings, got {type(values).__name__}")
        check_keys(f"{cls.TITLE}unknown keys", values, _fields(cls))  # type: ignore[arg-type]
        return cls(**dict(values))


@cache
def _fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    return {entry.name: entry for entry in dataclasses.fields(cls)}


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Return the types of the fields, without annotations."""
    return get_type_hints(cls)


def defaults(cls: type) -> dict[str, Any]:
    """Return the default of each field that has one."""
    values = {entry.name: default_of(entry) for entry in dataclasses.fields(cls)}
    return {name: value for name, value in values.items() if value is not dataclasses.MISSING}


def default_of(entry: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, or `dataclasses.MISSING`."""
    return entry.default_factory() if callable(entry.default_factory) else entry.default


def _prepared(cls: type[Settings], name: str, value: Any) -> Any:
    """Turn JSON into the types of pydantic, and refuse what pydantic lets through."""
    entry, kind = _fields(cls).get(name), hints_of(cls).get(name)  # type: ignore[arg-type]
    if Path not in kinds_of(kind):  # a folder may have any name
        check_plain(f"{cls.TITLE}{name}", value)  # first: later messages repeat it
    if entry is None or kind is None:  # pydantic names it
        return value
    inner = next((one for one in kinds_of(kind) if inspect.isclass(one) and issubclass(one, Settings)), None)
    if inner and value is not None and not isinstance(value, inner):
        return inner.from_dict(value)
    if entry.metadata.get("choices"):
        check_choice(f"{cls.TITLE}{name}", value, entry.metadata["choices"])
    most = _LARGEST_NUMBER if isinstance(value, float) else _LARGEST_COUNT
    if isinstance(value, int | float) and "le" not in entry.metadata and most < value < math.inf:
        raise ConfigError(f"{cls.TITLE}{name} must be at most {most:g}, got {_short(value)}")
    return tuple(value) if isinstance(value, list) else value


def to_json(value: Any) -> Any:
    """Return the value of a setting in plain JSON types."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {key: to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def _line(cls: type, error: ValidationError) -> str:
    """Describe the first mistake in one line: the field, the requirement and the value."""
    first = error.errors(include_url=False)[0]
    words, path = _requirement(first), [str(part) for part in first["loc"]]
    entry = _fields(cls).get(path[0]) if path else None
    got = "" if entry is not None and not entry.repr else f", got {_short(first['input'])}"
    return f"{'.'.join(path)} {words}{got}"


def check_value(what: str, value: Any, kind: TypeAdapter[Any]) -> None:
    """Check a value without a field.

    Example:
        >>> check_value("fedprox: mu", "small", TypeAdapter(float))
        Traceback (most recent call last):
        medfedaug.errors.ConfigError: fedprox: mu must be a number, got 'small'
    """
    try:
        kind.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{what} {_requirement(first)}, got {_short(first['input'])}") from error


def _requirement(first: ErrorDetails) -> str:
    kind, context = first["type"], first.get("ctx", {})
    if kind not in _WORDS:
        return first["msg"][:1].lower() + first["msg"][1:]
    if kind in _ABOVE_ZERO and not context.get("gt") and not context.get("ge"):
        return _ABOVE_ZERO[kind]
    return _WORDS[kind].format_map(context)


def _short(value: Any) -> str:
    """Format a value for a line, which hundreds of digits would fill."""
    if isinstance(value, int) and abs(value) > _LARGEST_COUNT:
        return f"{value:g}" if abs(value) <= sys.float_info.max else "more than any float"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def read_text(cls: type, name: str, text: str) -> Any:
    """Read the value of a setting from the text of an option, a variable or ``NAME=VALUE``.

    A text that is not a value of the setting's type stays text, which the check refuses.
    """
    kind = hints_of(cls)[name]
    return _of_text(kind, text, name.replace("_", "-"))


def _of_text(kind: Any, text: str, option: str) -> Any:
    kinds = kinds_of(kind)
    if rows := [one for one in kinds if get_origin(one) is tuple]:
        return tuple(_of_text(get_args(rows[0])[0], part.strip(), option) for part in text.split(","))
    if any((get_origin(one) or one) in (dict, Mapping) for one in kinds):
        if kind == dict[str, float] and not text.lstrip().startswith("{"):
            pairs = (part.rpartition("=") for part in text.split(","))
            return {name.strip(): _of_text(float, number.strip(), option) for name, _, number in pairs}
        with config_errors(f"--{option}: not JSON", ValueError):
            return parse_json(text)
    if any(one in (bool, int, float) for one in kinds):
        try:
            return parse_json(text)
        except ValueError:
            return text
    return text


def kinds_of(hint: Any) -> list[Any]:
    """Return the types that a value may have, without ``None``."""
    union = get_origin(hint) in (Union, UnionType)
    return [one for one in (get_args(hint) if union else (hint,)) if one is not type(None)]


def settings_table(cls: type) -> list[tuple[str, str, str]]:
    """Return the rows of a table of settings: name, default and text."""
    values = defaults(cls)
    return [
        (entry.name, str(to_json(values.get(entry.name, ""))), entry.metadata["description"])
        for entry in dataclasses.fields(cls)
    ]
