"""Names of sites in a simulation: any printable name, for which NVFlare gets an identifier."""

import json
import os
import re
import unicodedata
from collections.abc import Iterable, Mapping

VARIABLE = "MEDFEDAUG_SITE_NAMES"
"""Environment variable of a simulation's processes: the names by identifier, as JSON."""

_TAKEN = {"server"}  # NVFlare's own
# Letters that Unicode does not take apart.
_WHOLE = str.maketrans({"ł": "l", "Ł": "L", "ø": "o", "Ø": "O", "ß": "ss", "æ": "ae", "Æ": "Ae"})


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """Return an identifier for each name, which NVFlare takes.

    Example:
        >>> identifiers(["site_A", "Łódź Süd", "St. Anna", "東京"])
        {'site_A': 'site_A', 'Łódź Süd': 'Lodz_Sud', 'St. Anna': 'St_Anna', '東京': 'site'}
    """
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (_plain(name) != name, name)):  # what is one already stays
        plain, number = _plain(name), 1
        while (candidate := plain if number == 1 else f"{plain}_{number}") in _TAKEN | {*found.values()}:
            number += 1
        found[name] = candidate
    return {name: found[name] for name in names}


def _plain(name: str) -> str:
    ascii_text = unicodedata.normalize("NFKD", name.translate(_WHOLE)).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_-]+", "_", ascii_text).strip("_-") or "site"


class SiteNames:
    """The names and identifiers of this process's simulation; elsewhere both are the same."""

    def __init__(self) -> None:
        names: Mapping[str, str] = json.loads(os.environ.get(VARIABLE, "{}"))
        self._names, self._identifiers = dict(names), {name: known for known, name in names.items()}

    def name(self, identifier: str) -> str:
        """Return the name of the site that NVFlare knows by an identifier."""
        return self._names.get(identifier, identifier)

    def identifier(self, name: str) -> str:
        """Return NVFlare's identifier of a site."""
        return self._identifiers.get(name, name)
