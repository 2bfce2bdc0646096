"""`SiteDescription`: a site's images and patients in its own words, for the model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import yaml
from annotated_types import Ge, Le, MaxLen
from pydantic import AfterValidator, BeforeValidator
from typing_extensions import Self

from medfedaug.config.options import Settings, setting, settings
from medfedaug.config.scanners import Scanners, check_scanners
from medfedaug.errors import ConfigError, first_line

DESCRIPTION = "description"
"""Key of a description in messages between sites and server."""

_LARGEST_FILE = 100_000  # bytes


def _ordered(value: tuple[int, ...]) -> tuple[int, ...]:
    if value and (len(value) != 2 or value[0] > value[1]):
        raise ValueError("must be the first and the last year")
    return value


Short = Annotated[str, MaxLen(100)]
Long = Annotated[str, MaxLen(1000)]
Count = Annotated[int, Ge(1), Le(999_999)]
Year = Annotated[int, Ge(1895), Le(2200)]


@settings
class SiteDescription(Settings):
    """A site's images and patients in its own words; every field is optional.

    Example:
        >>> SiteDescription.from_dict({"modality": "MR", "years": [2019, 2024]}).to_dict()
        {'modality': 'MR', 'years': [2019, 2024]}
    """

    TITLE: ClassVar[str] = f"{DESCRIPTION}: "

    patients: Count | None = setting(
        None, "Number of patients whose images the site trains with; by default it is counted."
    )
    studies: Count | None = setting(None, "Number of their studies; by default the cases are counted.")
    modality: Short = setting("", "Modality of the images, such as ``MR, FLAIR``.")
    body_part: Short = setting("", "Part of the body, such as ``brain``.")
    scanners: Annotated[Scanners, BeforeValidator(check_scanners)] = setting(
        dict, "Manufacturers of the scanners, each with its models."
    )
    years: Annotated[tuple[Year, ...], AfterValidator(_ordered)] = setting(
        (), "First and last year in which the images were taken."
    )
    inclusion: Long = setting("", "Patients who are included, and those who are not.")
    annotators: Long = setting("", "Persons who drew the outlines, how, and who checked them.")
    contact: Long = setting(
        "", "A person or an office that answers questions; the card has it with the names of sites only."
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that have a value, as plain JSON types."""
        return {name: value for name, value in super().to_dict().items() if value}

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """Invert `to_dict`; a paragraph of YAML becomes one line."""
        if isinstance(values, Mapping):
            values = {k: " ".join(v.split()) if isinstance(v, str) else v for k, v in values.items()}
        return super().from_dict(values)

    @classmethod
    def of_file(cls, path: Path) -> SiteDescription:
        """Read a YAML or JSON file."""
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
