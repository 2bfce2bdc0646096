"""The command `compare`: short trainings of several methods within a budget."""

from pathlib import Path
from typing import Annotated, Any

import typer

from medfedaug.cli.catalogue import check_methods
from medfedaug.cli.console import err_console, out_console, say
from medfedaug.cli.options import Data, Device, JsonFile, Limit, Threads
from medfedaug.cli.progress import resumable
from medfedaug.config.comparison import parse_budget


def compare(
    data: Data,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help="Methods to try besides single and fedavg: fedrdn fedrdn,fedfa ... By default one for each "
            "cause of differences: fedrdn fedbn ditto fedfa."
        ),
    ] = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time for all trainings: 90s, 10min, 2h.")
    ] = "10min",
    out: Annotated[Path, typer.Option(help="Folder for compare.json and compare.html.")] = Path("compare"),
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Settings of all trainings, as in benchmark."),
    ] = None,
    device: Device = "auto",
    threads: Threads = 0,
    limit: Limit = None,
    json_: JsonFile = None,
) -> None:
    """Measure what training together and a few methods bring on your data, by short trainings.

    Each site by itself, all sites by plain averaging, and each method are trained with two seeds, for as many
    rounds as the budget allows, and compared on validation patients. A method that is clearly worse stops
    early. The same command continues an interrupted comparison.
    """
    seconds = parse_budget(budget)
    for text in methods or ():
        check_methods(text)
    with err_console.status(f"reading {data}"):
        from medfedaug.analysis.gain_page import gain_table
        from medfedaug.config.run import Execution
        from medfedaug.research.sweeps.short_trainings import PAGE, Request, compare_methods
        from medfedaug.simulate import check_device
        from medfedaug.utils.files import write_json

        check_device(device)
    request = Request(
        data=data,
        out=out,
        methods=tuple(methods or ()),
        budget=seconds,
        settings=tuple(set_ or ()),
        limit=limit,
    )

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "stage":
            say(event["text"])

    with resumable():
        results = compare_methods(
            request, device=device, execution=Execution(threads=threads), say=show, on_event=show
        )
    if results["gains"]:
        out_console.print(gain_table(results))
    for sentence in results["conclusions"]:
        say(sentence)
    if json_ is not None:
        write_json(json_, results)
    say(f"{out / PAGE}, {out / 'compare.json'}")
