"""The command `datasets`: published data sets, described from their source files without imports."""

import ast
import json
from functools import cache
from pathlib import Path
from typing import Annotated

from typer import Argument

import medfedaug
from medfedaug.cli.catalogue import Described, check_name, definition, source_of
from medfedaug.cli.methods import print_list, print_one, print_paragraph
from medfedaug.cli.source import Parameter, Source
from medfedaug.research.datasets.published import COMMON_OPTIONS, FOLDS, OPTION_TEXTS
from medfedaug.research.papers.presets import PRESETS


def datasets(
    name: Annotated[str | None, Argument(help="A data set, to show address, layout, options.")] = None,
) -> None:
    """List published data sets, or show one: address, layout of its folder, options, protocols."""
    if name is None:
        print_list(known_data_sets())
        print_paragraph("Address, layout, options and protocols of one: medfedaug datasets NAME")
        print_paragraph("Data of your own need no name: one folder per site, as docs/data.md shows")
    else:
        print_one(describe_data_set(name), "--set {name}={default}")


def known_data_sets() -> list[Described]:
    """List all published data sets that have a name."""
    return [_data_set(name) for name in _data_sets()]


def describe_data_set(name: str) -> Described:
    """Describe a published data set: address, layout of its folder, options, and protocols."""
    check_name("data set", name, _data_sets())
    return _data_set(name)


@cache
def _data_sets() -> dict[str, tuple[Source, ast.Call]]:
    """Find the entries of data sets in the files of their folder."""
    found = {}
    for file in sorted(Path(medfedaug.__file__).parent.glob("research/datasets/*.py")):
        source = source_of(f"medfedaug.research.datasets.{file.stem}")
        table = source.assigned("BENCHMARKS")
        if isinstance(table, ast.Dict):
            for name, entry in zip(table.keys, table.values, strict=True):
                assert isinstance(name, ast.Constant)
                assert isinstance(entry, ast.Call)
                found[str(name.value)] = source, entry
    return found


def _data_set(name: str) -> Described:
    source, entry = _data_sets()[name]
    description, address, layout = map(source.value, entry.args[1:])
    _, *options = definition(source.dotted(entry.args[0])).parameters()
    common = {**COMMON_OPTIONS, **(FOLDS if entry.keywords else {})}
    known = {key: Parameter(key, json.dumps(value), OPTION_TEXTS[key]) for key, value in common.items()}
    for option in options:
        text = option.text or OPTION_TEXTS.get(option.name, "")
        known[option.name] = Parameter(option.name, option.default, text)
    protocols = [preset.name for preset in PRESETS.values() if preset.benchmark == name]
    facts = {"get it from": address, "layout": layout, "protocols": ", ".join(protocols)}
    return Described(name, description, facts=facts, arguments=tuple(known.values()))
