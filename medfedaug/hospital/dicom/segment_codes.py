"""Codes of classes for DICOM: category, type and anatomic region of each segment, from a file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medfedaug.errors import ConfigError
from medfedaug.utils.files import parse_json
from medfedaug.utils.structure import Check, entries, map_of, text


@dataclass(frozen=True)
class Code:
    """Coded concept: value such as ``"108369006"``, scheme such as ``"SCT"`` for SNOMED CT, and meaning."""

    value: str
    scheme: str
    meaning: str


@dataclass(frozen=True)
class SegmentCodes:
    """Codes of one class: category, such as morphologically abnormal structure; type, such as neoplasm."""

    category: Code
    type: Code
    anatomic_region: Code | None = None


def _word(longest: int) -> Check:
    """Make a check for a text that DICOM can store, of up to ``longest`` characters."""

    def check(value: Any, where: str) -> None:
        text(value, where)
        if not value:
            raise ValueError(f"{where} is empty")
        if "\\" in value or not value.isprintable():
            raise ValueError(f"{where} has a backslash or a control character, which DICOM does not take")
        if len(value) > longest:
            raise ValueError(f"{where} is too long: DICOM takes {longest} characters")

    return check


def _unknown(value: Any, where: str) -> None:
    raise ValueError(f"{where} is not known")


_WORDS = {"value": _word(16), "scheme": _word(16), "meaning": _word(64)}  # of SH, SH and LO
_CODE = entries(_WORDS, other=_unknown, needed=(*_WORDS,))
_PARTS = {"category": _CODE, "type": _CODE, "anatomic_region": _CODE}
_CODES = map_of(entries(_PARTS, other=_unknown, needed=("category", "type")))


def read_segment_codes(path: str | Path, classes: Sequence[str]) -> dict[str, SegmentCodes]:
    """Read the codes of a run's classes.

    Args:
        path: a JSON file, by class: ``category``, ``type`` and optionally ``anatomic_region``, each with
            ``value``, ``scheme`` and ``meaning``.
        classes: of the run, background first; all but the background must have codes.
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
    return {
        name: SegmentCodes(**{part: Code(**code) for part, code in content[name].items()})
        for name in classes[1:]
    }
