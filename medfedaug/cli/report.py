"""The command `report`: the page of runs, and the model card of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from medfedaug.cli.console import err_console, out_console, say
from medfedaug.cli.evaluate import print_worth
from medfedaug.cli.options import Device, SiteNames, existing_run
from medfedaug.cli.registry import has_layer
from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    from medfedaug.analysis.text_table import TextTable
    from medfedaug.runs.run import Run


def report(
    runs: Annotated[list[Path], Argument(help="Folders of runs, and files evaluation.json.")],
    out: Annotated[
        Path | None,
        Option(help="The page, by default report.html; with --card a folder, by default the run's."),
    ] = None,
    data: Annotated[Path | None, Option(help="Sites' images, for pictures of cases.")] = None,
    tables: Annotated[Path | None, Option(help="Folder for the tables as Markdown and CSV.")] = None,
    metric: Annotated[str | None, Option(help="Metric to compare, such as dice or hd95.")] = None,
    reference: Annotated[str, Option(help="Methods to compare the others with.")] = "fedavg",
    device: Device = "auto",
    card: Annotated[bool, Option("--card", help="Write the model card of one run.")] = False,
    site_names: SiteNames = False,
) -> None:
    """Show a run or compare several on one self-contained page.

    With --card, write a run's model card: training data, scores, and known gaps of the model.
    """
    if card:
        _write_card(runs, out, site_names=site_names)
        return
    page = out or Path("report.html")
    from medfedaug.analysis import write_report
    from medfedaug.runs.load_results import find_runs, load_run
    from medfedaug.runs.run import BASELINE

    if reference != BASELINE:
        from medfedaug.methods.registry import parse_methods  # imports PyTorch

        reference = ",".join(spec["name"] for spec in parse_methods(reference))
    evaluated: list[dict[str, Any]] = []
    others = runs
    if has_layer("research"):
        from medfedaug.research.comparison.local_vs_global import find_evaluations

        evaluated, others = find_evaluations(runs)
    loaded = [load_run(run, metric) for run in find_runs(others)]
    with err_console.status("drawing"):
        write_report(
            loaded,
            page,
            data=data,
            device=device,
            evaluations=evaluated,
            reference=reference,
        )
    saved = _print_tables(loaded, evaluated, reference)
    if tables is not None:
        for name, table in saved.items():
            table.save(tables / name)
        say(", ".join(f"{tables}/{name}.*" for name in saved))
    say(str(page))


def _write_card(runs: Sequence[Path], out: Path | None, *, site_names: bool) -> None:
    if len(runs) > 1:
        raise ConfigError("--card takes one run: name one folder")
    existing_run(runs[0])
    from medfedaug.analysis.model_card import write_model_card
    from medfedaug.runs.recorded_run import RecordedRun

    opened = RecordedRun.open(runs[0])
    files = write_model_card(opened, out or opened.model.parent, site_names=site_names)
    say(", ".join(map(str, files)))


def _print_tables(
    runs: Sequence[Run], evaluations: Sequence[Mapping[str, Any]], reference: str
) -> dict[str, TextTable]:
    """Print the tables of evaluations and of runs, and return them by the names of their files."""
    from medfedaug.analysis import metric_table, summary_table

    tables: dict[str, TextTable] = {}
    for index, content in enumerate(evaluations):
        from medfedaug.research.comparison.local_vs_global import worth_table

        worth = worth_table(content)
        print_worth(worth)
        tables[f"worth_{index + 1}" if index else "worth"] = worth
    if runs:
        tables["scores"] = summary_table(runs, reference)
        if has_layer("research"):
            from medfedaug.research.comparison import patient_table

            tables["patients"] = patient_table(runs, reference)
        tables["metrics"] = metric_table(runs)
        for name, table in tables.items():
            if table.body and not name.startswith("worth"):
                out_console.print(table)
    return tables
