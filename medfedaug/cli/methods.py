"""Commands that show what there is to choose from: `methods`, `networks` and `datasets`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from medfedaug.cli.console import Table, out_console

if TYPE_CHECKING:
    from medfedaug.cli.described import Described


def methods(
    name: Annotated[str | None, typer.Argument(help="A method, to show its arguments and details.")] = None,
) -> None:
    """List the methods for --methods, or show one: what it does, its arguments, what leaves a site."""
    from medfedaug.analysis.recorded_gains import gains_of
    from medfedaug.cli.catalogue import describe_method, known_methods
    from medfedaug.cli.described import BESIDE_THE_MODEL, ONLY_FOR

    if name is None:
        _print_list(known_methods(), BESIDE_THE_MODEL, ONLY_FOR)
        _line("less: some entries of the model stay at the site; once: before training")
        _line("Several go together, separated by commas: --methods fedrdn,fedfa")
        _line("Arguments and details of one: medfedaug methods NAME")
    else:
        found = describe_method(name)
        _print_one(found, f"--set {found.name}.{{name}}={{default}}")
        if gains := gains_of(found.name):
            _line("\nMeasured here, as the difference from fedavg 95% interval, verdict (docs/results):")
            for gain in gains:
                _line(f"  {gain}")


def networks(
    name: Annotated[
        str | None,
        typer.Argument(help="A network, or MONAI's class path, to show arguments, stages and sizes."),
    ] = None,
) -> None:
    """List the networks for --network, or show one: arguments, stages, sizes."""
    from medfedaug.cli.catalogue import describe_network, known_networks

    if name is None:
        _print_list(known_networks(), "for")
        _line("Any other network of MONAI has its class path: monai.networks.nets.HighResNet")
        _line("Arguments, stages and sizes of one: medfedaug networks NAME")
    else:
        _print_one(describe_network(name), "--network-args '{{\"{name}\": {default}}}'")


def datasets(
    name: Annotated[str | None, typer.Argument(help="A data set, to show address, layout, options.")] = None,
) -> None:
    """Published data sets: where to get them, how their folder looks, options, protocols."""
    from medfedaug.cli.catalogue import describe_data_set, known_data_sets

    if name is None:
        _print_list(known_data_sets())
        _line("Address, layout, options and protocols of one: medfedaug datasets NAME")
        _line("Data of your own need no name: one folder per site, as docs/data.md shows")
    else:
        _print_one(describe_data_set(name), "--set {name}={default}")


def _print_list(found: Sequence[Described], *headings: str) -> None:
    table = Table("name", "what", *headings, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[2:]:
        column.max_width = len("classification")  # what a method does is the longest, and needs the room
    for one in found:
        what = one.what or f"Added by the package {one.package}."
        table.add_row(one.name, what, *(one.listed.get(heading, "") for heading in headings))
    out_console.print(table)


def _print_one(one: Described, example: str) -> None:
    _line(f"{one.name}: {one.what}")
    facts = {**one.facts, **({"added by": f"the package {one.package}"} if one.package else {})}
    for heading, text in facts.items():
        if text:
            _line(f"{heading}: {text}")
    for paragraph in one.text:
        _line("")
        _line(paragraph)
    if not one.arguments:
        return
    first = one.arguments[0]
    given = example.format(name=first.name, default=first.default or "...")
    _line(f"\nArguments, given as {given}:")
    table = Table("argument", "default", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for argument in one.arguments:
        table.add_row(argument.name, argument.default or "needed", argument.text)
    out_console.print(table)


def _line(text: str) -> None:
    """A paragraph, wrapped between words; a formula is indented, and so are the lines after its first."""
    if text.startswith(" "):
        text = textwrap.fill(text, out_console.width, subsequent_indent=" " * 6)
    out_console.print(text)
