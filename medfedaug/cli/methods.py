"""Commands that list choices: `methods` and `networks`."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from typer import Argument, Option

from medfedaug.cli.catalogue import (
    BESIDE_THE_MODEL,
    ONLY_FOR,
    Described,
    describe_method,
    describe_network,
    known_methods,
    known_networks,
)
from medfedaug.cli.console import Table, out_console
from medfedaug.errors import first_line


def methods(
    name: Annotated[str | None, Argument(help="A method, to show its arguments and details.")] = None,
) -> None:
    """List the methods for --methods, or show one: effect, arguments, and data that leave a site."""
    if name is None:
        print_list(known_methods(), BESIDE_THE_MODEL, ONLY_FOR)
        print_paragraph("less: some entries of the model stay at the site; once: before training")
        print_paragraph("Several go together, separated by commas: --methods fedrdn,fedfa")
        print_paragraph("Arguments and details of one: medfedaug methods NAME")
    else:
        described = describe_method(name)
        print_one(described, f"--set {described.name}.{{name}}={{default}}")


def networks(
    name: Annotated[str | None, Argument(help="A network, or MONAI's class path, to show in detail.")] = None,
    stages: Annotated[bool, Option("--stages", help="Build the network, for its stages and size.")] = False,
) -> None:
    """List the networks for --network, or show one: arguments, stages, sizes."""
    if name is None:
        print_list(known_networks(), "for")
        print_paragraph("Any other network of MONAI has its class path: monai.networks.nets.HighResNet")
        print_paragraph("Arguments of one: medfedaug networks NAME; stages and sizes too: --stages")
    else:
        described = describe_network(name)
        if stages:
            described = replace(described, facts={**described.facts, **_sizes(name)})
        print_one(described, "--network-args '{{\"{name}\": {default}}}'")


def _sizes(name: str) -> dict[str, str]:
    """Describe the stages of a network, and its number of parameters in 2D and 3D."""
    import torch

    from medfedaug.models import build_network, networks
    from medfedaug.models.stages import known_stages

    facts = {}
    channels, classes = (3, 10) if networks.task_of(name) == "classification" else (1, 2)
    for dims in (2, 3):
        sizes: dict[str, Any] = {"spatial_dims": dims, "in_channels": channels, "out_channels": classes}
        try:
            try:
                with torch.device("meta"):  # without weights: AlexNet's in 3D take a gigabyte
                    net = build_network(name, **sizes)
            except (RuntimeError, NotImplementedError):  # Swin computes numbers with tensors
                net = build_network(name, **sizes)
        except Exception as error:  # any error of a network about arguments or sizes
            facts[f"in {dims}D"] = f"not with its defaults: {first_line(error)}"
            continue
        count = sum(parameter.numel() for parameter in net.parameters()) / 1e6
        facts[f"in {dims}D"] = f"{count:.2f} million parameters ({channels} channels, {classes} classes)"
        known = [f"{stage.name} ({stage.channels} channels)" for stage in known_stages(net) or ()]
        facts["stages"] = ", ".join(known) or "not known; name modules instead, as in --set fedfa.stages"
    return facts


def print_list(choices: Sequence[Described], *headings: str) -> None:
    """Print a table of choices."""
    table = Table("name", "what", *headings, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[2:]:
        column.max_width = len("classification")  # leaves room for the column "what"
    for choice in choices:
        what = choice.what or f"Added by the package {choice.package}."
        table.add_row(choice.name, what, *(choice.listed.get(heading, "") for heading in headings))
    out_console.print(table)


def print_one(choice: Described, example: str) -> None:
    """Print a choice with its arguments, and how to give one."""
    print_paragraph(f"{choice.name}: {choice.what}")
    facts = {**choice.facts, **({"added by": f"the package {choice.package}"} if choice.package else {})}
    for heading, text in facts.items():
        if text:
            print_paragraph(f"{heading}: {text}")
    for paragraph in choice.text:
        print_paragraph("")
        print_paragraph(paragraph)
    if not choice.arguments:
        return
    first = choice.arguments[0]
    option = example.format(name=first.name, default=first.default or "...")
    print_paragraph(f"\nArguments, given as {option}:")
    table = Table("argument", "default", "", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for argument in choice.arguments:
        table.add_row(argument.name, argument.default or "needed", argument.text)
    out_console.print(table)


def print_paragraph(text: str) -> None:
    """Print a paragraph, wrapped between words; continued lines of an equation are indented."""
    if text.startswith(" "):
        lines = text.splitlines()
        text = "\n".join(textwrap.fill(line, out_console.width, subsequent_indent=" " * 6) for line in lines)
    out_console.print(text)
