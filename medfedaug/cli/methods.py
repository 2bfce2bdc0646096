"""Commands that list choices: `methods`, `networks` and `datasets`."""

from collections.abc import Iterable
from typing import Annotated

from typer import Argument

from medfedaug.cli import catalogue
from medfedaug.cli.console import Table, out_console, say


def methods(
    name: Annotated[str | None, Argument(help="A method, to show its arguments and details.")] = None,
) -> None:
    """List the methods for --methods, or show one: effect, arguments, and data that leave a site."""
    if name is None:
        _print_list(catalogue.known_methods())
        say("Several go together, separated by commas: --methods fedrdn,fedfa")
        say("Arguments and details of one: medfedaug methods NAME")
    else:
        described = catalogue.describe_method(name)
        _print_one(described, f"--set {described.name}.ARGUMENT=VALUE")


def networks(
    name: Annotated[str | None, Argument(help="A network, or MONAI's class path, to show in detail.")] = None,
) -> None:
    """List the networks for --network, or show the arguments of one."""
    if name is None:
        _print_list(catalogue.known_networks())
        say("Any other network of MONAI has its class path: monai.networks.nets.HighResNet")
        say("Arguments of one: medfedaug networks NAME")
    else:
        _print_one(catalogue.describe_network(name), "--network-args '{\"ARGUMENT\": VALUE}'")


def datasets(
    name: Annotated[str | None, Argument(help="A data set, to show address, layout, options.")] = None,
) -> None:
    """List published data sets, or show one: address, layout of its folder, options, protocols."""
    from medfedaug.research.datasets.benchmarks import BENCHMARKS
    from medfedaug.research.datasets.published import COMMON_OPTIONS, FOLDS, OPTION_TEXTS
    from medfedaug.research.papers.presets import PRESETS

    if name is None:
        _print_list(catalogue.Described(name, known.description) for name, known in BENCHMARKS.items())
        say("Address, layout, options and protocols of one: medfedaug datasets NAME")
        say("Data of your own need no name: one folder per site, as docs/data.md shows")
        return
    catalogue.check_name("data set", name, BENCHMARKS)
    known = BENCHMARKS[name]
    protocols = ", ".join(preset.name for preset in PRESETS.values() if preset.benchmark == name)
    lines = [f"get it from: {known.source}", f"layout: {known.layout}", f"protocols: {protocols}", ""]
    lines += [*catalogue.without_markup(known.open.__doc__ or ""), ""]
    options = {**COMMON_OPTIONS, **(FOLDS if known.in_folds else {})}
    lines += [f"{key}={value!r}: {OPTION_TEXTS[key]}" for key, value in options.items()]
    _print_one(catalogue.Described(name, known.description, tuple(lines)), "--set OPTION=VALUE")


def _print_list(choices: Iterable[catalogue.Described]) -> None:
    table = Table("name", "what", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for choice in choices:
        table.add_row(choice.name, choice.what)
    out_console.print(table)


def _print_one(choice: catalogue.Described, example: str) -> None:
    say(f"{choice.name}: {choice.what}")
    for line in (f"Arguments are given as {example}", "", *choice.text) if choice.text else ():
        say(line)
