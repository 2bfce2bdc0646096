"""`SiteDescription`: a site's images and patients in its own words, for the model card."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any

import yaml
from annotated_types import Ge, Le, MaxLen
from pydantic import AfterValidator, BeforeValidator, Strict, WithJsonSchema
from pydantic.dataclasses import dataclass

from medfedaug.config.scanners import SCANNERS_SCHEMA, Scanners, check_scanners
from medfedaug.config.validated import STRICT, OneLineErrors
from medfedaug.errors import ConfigError, first_line
from medfedaug.utils.printable import is_printable
from medfedaug.utils.validation import check_keys

__all__ = ["DESCRIPTION", "SiteDescription"]

DESCRIPTION = "description"
"""The name under which a description leaves a site."""

_LARGEST_FILE = 100_000  # bytes
_MOST = 999_999


def _visible(value: str) -> str:
    text = " ".join(value.split())  # a paragraph of YAML is one line
    if not is_printable(text):
        raise ValueError("holds a control character or one that cannot be seen")
    return text


def _ordered(value: tuple[int, ...]) -> tuple[int, ...]:
    if value and (len(value) != 2 or value[0] > value[1]):
        raise ValueError("must be the first and the last year")
    return value


Short = Annotated[str, MaxLen(100), AfterValidator(_visible)]
Long = Annotated[str, MaxLen(1000), AfterValidator(_visible)]
Count = Annotated[int, Ge(1), Le(_MOST)]
Year = Annotated[int, Ge(1895), Le(2200)]


@dataclass(frozen=True, config=STRICT)
class SiteDescription(OneLineErrors):
    """A site's images and patients in its own words; whatever it leaves out is not said.

    Args:
        patients: the number of patients whose images the site trains with; by default it is counted.
        studies: the number of their studies; by default the cases are counted.
        modality: of the images, such as ``MR, FLAIR``.
        body_part: the part of the body, such as ``brain``.
        scanners: manufacturers of the scanners, each with its models.
        years: the first and the last year in which the images were taken.
        inclusion: which patients are included, and which are not.
        annotators: who drew the outlines, how, and who checked them.
        contact: a person or an office that answers questions; the card has it with the names of sites only.

    Raises:
        ConfigError: for values that make no sense.

    Example:
        >>> SiteDescription.from_dict({"modality": "MR", "years": [2019, 2024]}).to_dict()
        {'modality': 'MR', 'years': [2019, 2024]}
    """

    patients: Count | None = None
    studies: Count | None = None
    modality: Short = ""
    body_part: Short = ""
    scanners: Annotated[Scanners, BeforeValidator(check_scanners), WithJsonSchema(SCANNERS_SCHEMA)] = field(
        default_factory=dict
    )
    years: Annotated[tuple[Year, ...], Strict(False), AfterValidator(_ordered)] = ()
    inclusion: Long = ""
    annotators: Long = ""
    contact: Long = ""

    def to_dict(self) -> dict[str, Any]:
        """Return what is said, as plain JSON types."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        values |= {"scanners": dict(self.scanners), "years": list(self.years)}
        return {name: value for name, value in values.items() if value}

    @classmethod
    def from_dict(cls, values: Any) -> SiteDescription:
        """Build from `to_dict`.

        Raises:
            ConfigError: for unknown keys, which would silently say nothing, and impossible values.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{DESCRIPTION}: expected an object, got {type(values).__name__}")
        check_keys(f"{DESCRIPTION}: unknown keys", values, [entry.name for entry in dataclasses.fields(cls)])
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{DESCRIPTION}: {error}") from error

    @classmethod
    def of_file(cls, path: Path) -> SiteDescription:
        """Read a YAML or JSON file.

        Raises:
            ConfigError: naming the file and its first mistake.
        """
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(_LARGEST_FILE + 1)
            if len(text) > _LARGEST_FILE:
                raise ValueError(f"has more than {_LARGEST_FILE} characters")
            content = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
            raise ConfigError(f"{path}: not readable as YAML or JSON ({first_line(error)})") from error
        try:
            return cls.from_dict(content)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
