"""`check_scanners`: a site's scanners by manufacturer."""

from collections.abc import Mapping, Sequence
from typing import Any

from medfedaug.utils.printable import is_printable

Scanners = Mapping[str, Sequence[str]]
"""Models by manufacturer."""

_MOST = 20  # models
_LONGEST = 64  # characters of Manufacturer and Manufacturer's Model Name in DICOM (PS3.5, 6.2: LO)


def check_scanners(value: Any) -> dict[str, list[str]]:
    """Return scanners as `Scanners`, of JSON types.

    Example:
        >>> check_scanners({"Siemens": ["Prisma", "Skyra"]})
        {'Siemens': ['Prisma', 'Skyra']}
    """
    if not isinstance(value, Mapping) or not all(isinstance(row, (list, tuple)) for row in value.values()):
        raise ValueError('must be lists of models by manufacturer, such as {"Siemens": ["Prisma"]}')
    texts = [text for maker, models in value.items() for text in (maker, *models)]
    if not all(isinstance(text, str) and text.strip() and len(text) <= _LONGEST for text in texts):
        raise ValueError(f"names each manufacturer and model with 1 to {_LONGEST} characters")
    if not all(map(is_printable, texts)):
        raise ValueError("holds a control character or one that cannot be seen")
    if not all(value.values()) or sum(map(len, value.values())) > _MOST:
        raise ValueError(f"names one model or more of each manufacturer, and {_MOST} at most")
    return {maker: [*models] for maker, models in value.items()}


def scanners_text(scanners: Scanners) -> str:
    """Return scanners in words; empty for none.

    Example:
        >>> scanners_text({"Siemens": ["Prisma", "Skyra"], "Philips": ["Ingenia"]})
        'Siemens Prisma, Skyra; Philips Ingenia'
    """
    return "; ".join(f"{maker} {', '.join(models)}" for maker, models in scanners.items())
