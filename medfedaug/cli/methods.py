"""Commands that list choices: `methods`, `networks` and `datasets`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Annotated

import typer

from medfedaug.cli.catalogue import (
    describe_data_set,
    describe_method,
    describe_network,
    known_data_sets,
    known_methods,
    known_networks,
)
from medfedaug.cli.console import Table, out_console
from medfedaug.cli.described import BESIDE_THE_MODEL, ONLY_FOR, Described


def methods(
    name: Annotated[str | None, typer.Argument(help="A method, to show its arguments and details.")] = None,
) -> None:
    """List the methods for --methods, or show one: effect, arguments, and data that leave a site."""
    if name is None:
        _print_list(known_methods(), BESIDE_THE_MODEL, ONLY_FOR)
        _line("less: some entries of the model stay at the site; once: before training")
        _line("Several go together, separated by commas: --methods fedrdn,fedfa")
        _line("Arguments and details of one: medfedaug methods NAME")
    else:
        described = describe_method(name)
        _print_one(described, f"--set {described.name}.{{name}}={{default}}")


def networks(
    name: Annotated[
        str | None, typer.Argument(help="A network, or MONAI's class path, to show in detail.")
    ] = None,
) -> None:
    """List the networks for --network, or show one: arguments, stages, sizes."""
    if name is None:
        _print_list(known_networks(), "for")
        _line("Any other network of MONAI has its class path: monai.networks.nets.HighResNet")
        _line("Arguments, stages and sizes of one: medfedaug networks NAME")
    else:
        _print_one(describe_network(name), "--network-args '{{\"{name}\": {default}}}'")


def datasets(
    name: Annotated[str | None, typer.Argument(help="A data set, to show address, layout, options.")] = None,
) -> None:
    """List published data sets, or show one: address, layout of its folder, options, protocols."""
    if name is None:
        _print_list(known_data_sets())
        _line("Address, layout, options and protocols of one: medfedaug datasets NAME")
        _line("Data of your own need no name: one folder per site, as docs/data.md shows")
    else:
        _print_one(describe_data_set(name), "--set {name}={default}")


def _print_list(choices: Sequence[Described], *headings: str) -> None:
    table = Table("name", "what", *headings, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[2:]:
        column.max_width = len("classification")  # leaves room for the column "what"
    for choice in choices:
        what = choice.what or f"Added by the package {choice.package}."
        table.add_row(choice.name, what, *(choice.listed.get(heading, "") for heading in headings))
    out_console.print(table)


def _print_one(choice: Described, example: str) -> None:
    _line(f"{choice.name}: {choice.what}")
    facts = {**choice.facts, **({"added by": f"the package {choice.package}"} if choice.package else {})}
    for heading, text in facts.items():
        if text:
            _line(f"{heading}: {text}")
    for paragraph in choice.text:
        _line("")
        _line(paragraph)
    if not choice.arguments:
        return
    first = choice.arguments[0]
    option = example.format(name=first.name, default=first.default or "...")
    _line(f"\nArguments, given as {option}:")
    table = Table("argument", "default", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for argument in choice.arguments:
        table.add_row(argument.name, argument.default or "needed", argument.text)
    out_console.print(table)


def _line(text: str) -> None:
    """Print a paragraph, wrapped between words; continued lines of a formula are indented."""
    if text.startswith(" "):
        text = textwrap.fill(text, out_console.width, subsequent_indent=" " * 6)
    out_console.print(text)
