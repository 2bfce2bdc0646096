"""Codes of classes for DICOM: category, type and anatomic region of each segment, from a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfedaug.errors import ConfigError
from medfedaug.utils.files import parse_json
from medfedaug.utils.structure import entries, map_of, text

_LONGEST_VALUE, _LONGEST_MEANING = 16, 64  # of the value representations SH and LO


@dataclass(frozen=True)
class Code:
    """Coded concept: value such as ``"108369006"``, scheme such as ``"SCT"`` for SNOMED CT, and meaning."""

    value: str
    scheme: str
    meaning: str


@dataclass(frozen=True)
class SegmentCodes:
    """Codes of one class.

    Args:
        category: of the property, such as morphologically abnormal structure.
        type: of the property, such as neoplasm.
    """

    category: Code
    type: Code
    anatomic_region: Code | None = None


_CODE = entries(
    {"value": text, "scheme": text, "meaning": text},
    other=lambda value, where: _unknown(where),
    needed=("value", "scheme", "meaning"),
)
_CODES = map_of(
    entries(
        {"category": _CODE, "type": _CODE, "anatomic_region": _CODE},
        other=lambda value, where: _unknown(where),
        needed=("category", "type"),
    )
)


def read_segment_codes(path: str | Path, classes: Sequence[str]) -> dict[str, SegmentCodes]:
    """Read the codes of a run's classes.

    Args:
        path: a JSON file, by class: ``category``, ``type`` and, where wanted, ``anatomic_region``, each with
            ``value``, ``scheme`` and ``meaning``.
        classes: of the run, background first; each but the background has codes, and no other.

    Raises:
        ConfigError: naming the file and the first entry that is missing, unknown or too long.
    """
    try:
        content = parse_json(Path(path).read_text(encoding="utf-8"))
        _CODES(content, "")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no codes of classes ({error})") from error
    for name in classes[1:]:
        if name not in content:
            raise ConfigError(f"{path}: has no codes of the class {name!r}; add it")
    for name in content:
        if name not in classes[1:]:
            raise ConfigError(
                f"{path}: {name!r} is no class of the run, whose classes are {', '.join(classes[1:])}"
            )
    return {name: _codes(path, name, content[name]) for name in classes[1:]}


def _codes(path: str | Path, name: str, entry: Mapping[str, Any]) -> SegmentCodes:
    found = {}
    for part, told in entry.items():
        code = Code(**told)
        where = f"{path}: {name}.{part}"
        if not all((code.value, code.scheme, code.meaning)):
            raise ConfigError(f"{where} has an empty value, scheme or meaning")
        if any("\\" in text or not text.isprintable() for text in told.values()):
            raise ConfigError(f"{where} has a backslash or a control character, which DICOM does not take")
        if max(len(code.value), len(code.scheme)) > _LONGEST_VALUE or len(code.meaning) > _LONGEST_MEANING:
            raise ConfigError(
                f"{where} is too long: DICOM takes {_LONGEST_VALUE} characters of a value and a scheme, and "
                f"{_LONGEST_MEANING} of a meaning"
            )
        found[part] = code
    return SegmentCodes(**found)


def _unknown(where: str) -> None:
    raise ValueError(f"{where} is not known")
