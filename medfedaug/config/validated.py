"""Settings from files, checked by pydantic: errors of one line, and a JSON Schema that editors show.

Importing this takes a tenth of a second, which the modules of light commands do without.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from pydantic import ConfigDict, ModelWrapValidatorHandler, TypeAdapter, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema

from medfedaug.errors import ConfigError
from medfedaug.utils.docstrings import read_docstring

__all__ = ["STRICT", "OneLineErrors", "json_schema"]

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
"""A text is no number, ``true`` is no 1, and an unknown key is an error."""

# By the kinds of pydantic's errors; what is not here keeps its words.
_WORDS = {
    "bool_type": "must be true or false",
    "dict_type": "must be a mapping",
    "finite_number": "must be a number",
    "float_type": "must be a number",
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "int_type": "must be a whole number",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "is {expected}",
    "mapping_type": "must be a mapping",
    "path_type": "must be a path",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "value_error": "{error}",
}


class OneLineErrors:
    """A base of pydantic's dataclasses whose mistakes are a `ConfigError` of one line.

    Attributes:
        SETTINGS: the beginning of the line, such as ``"privacy: "``.
        UNITS: units by the names of fields.
    """

    SETTINGS: ClassVar[str] = ""
    UNITS: ClassVar[dict[str, str]] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _in_one_line(cls, values: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        try:
            return handler(values)
        except ValidationError as error:
            raise ConfigError(f"{cls.SETTINGS}{_line(error, cls.UNITS)}") from error


def json_schema(cls: type, *nested: type) -> dict[str, Any]:
    """The JSON Schema of a dataclass of settings, with the descriptions of its docstring.

    Args:
        cls: the dataclass.
        *nested: the dataclasses of its fields.
    """
    schema: dict[str, Any] = TypeAdapter(cls).json_schema(schema_generator=_WithoutTitles)
    for one in (cls, *nested):
        found = schema if one is cls else schema["$defs"][one.__name__]
        found["description"] = read_docstring(one).summary
        described = read_docstring(one).arguments
        for entry in dataclasses.fields(one):
            values = found["properties"][entry.name]
            values["description"] = described.get(entry.name, "")
            values |= _limits(entry.metadata)
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema}


class _WithoutTitles(GenerateJsonSchema):
    """Names of fields say what their titles would say again."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _limits(metadata: Any) -> dict[str, Any]:
    """The limits of a field that `medfedaug.config.options.setting` made."""
    names = {"above": "exclusiveMinimum", "at_least": "minimum", "at_most": "maximum", "choices": "enum"}
    return {names[key]: metadata[key] for key in names if metadata.get(key) not in (None, ())}


def _line(error: ValidationError, units: dict[str, str]) -> str:
    """The first mistake in one line: the field, the words and the value."""
    first = error.errors(include_url=False)[0]
    words = _WORDS.get(first["type"])
    if words is None:
        words = first["msg"][:1].lower() + first["msg"][1:]
    else:
        words = words.format_map(first.get("ctx", {})).replace("'", "") if "{" in words else words
    path = [str(part) for part in first["loc"]]
    unit = f" of {units[path[0]]}" if path and path[0] in units and words.endswith("number") else ""
    return f"{'.'.join(path)} {words}{unit}, got {first['input']!r}"
