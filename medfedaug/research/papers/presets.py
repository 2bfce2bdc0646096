"""The papers' protocols by name (``presets.yml``): data, network, rounds, optimiser, source.

>>> PRESETS["office_caltech_10"].config["rounds"], PRESETS["fedrdn_office_caltech_10"].config["rounds"]
(400, 100)
"""

import dataclasses
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from medfedaug.config.run import RunConfig
from medfedaug.errors import ConfigError, DataError, first_line
from medfedaug.research.papers.preset import Preset
from medfedaug.utils.validation import check_keys, not_known

_FILE = "presets.yml"
_KINDS = {
    "config": dict,
    "data": dict,
    "arguments": dict,
    "holdout": bool,
    "whole_site": bool,
    "hours": int | float,
    "readings": list,
}
_KEYS = ("benchmark", "source", "protocol", *_KINDS)
_SETTINGS = [entry.name for entry in dataclasses.fields(RunConfig)]


def parse_presets(text: str) -> dict[str, Preset]:
    """Read protocols from YAML.

    Args:
        text: an object with ``presets``, the fields of `Preset` by name. Their ``readings`` name entries of
            ``notes``. Keys that begin with ``_`` hold parts that several presets share.
    """
    try:
        content = yaml.safe_load(text)
        shared = [key for key in content if str(key).startswith("_")]
        check_keys("unknown keys", content, ["notes", "presets", *shared])
        return {name: _preset(name, entry, content["notes"]) for name, entry in content["presets"].items()}
    except (yaml.YAMLError, ConfigError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"cannot be read ({first_line(error)})", path=_FILE) from error


def _preset(name: str, entry: Mapping[str, Any], notes: Mapping[str, str]) -> Preset:
    check_keys(f"{name}: unknown keys", entry, _KEYS)
    for key, value in entry.items():
        if not isinstance(value, _KINDS.get(key, str)):
            raise ConfigError(f"{name}: {key} is {value!r}")
    for key in ("benchmark", "source", "config"):
        if not entry.get(key):
            raise ConfigError(f"{name}: {key} is missing")
    check_keys(f"{name}: unknown settings", entry["config"], _SETTINGS)
    named = entry.get("readings", [])
    check_keys(f"{name}: unknown readings", named, notes)
    return Preset(name=name, **{**entry, "readings": tuple(str(notes[note]) for note in named)})


PRESETS: dict[str, Preset] = parse_presets((resources.files(__package__) / _FILE).read_text(encoding="utf-8"))


def find_preset(name: str) -> Preset:
    """Return the preset of a name."""
    if name not in PRESETS:
        raise ConfigError(f"benchmark {name!r} {not_known(name, PRESETS)}")
    return PRESETS[name]
