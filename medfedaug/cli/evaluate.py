"""Commands about finished runs: `evaluate` and `report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medfedaug.cli.console import err_console, out_console, print_scores, say
from medfedaug.cli.loading import importing
from medfedaug.cli.options import Device, Limit, Local, SiteOrSites, State, existing_run
from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    from medfedaug.analysis.text_table import TextTable
    from medfedaug.research.comparison.local_vs_global import WorthTable
    from medfedaug.runs.run import Run


class Split(str, Enum):
    """Cases that are scored."""

    test = "test"
    validation = "validation"


def evaluate(
    model: Annotated[Path, typer.Option(callback=existing_run, help="The global_model.pt of a run.")],
    data: SiteOrSites,
    config: Annotated[
        Path | None, typer.Option(help="The run's results.json; by default next to the model.")
    ] = None,
    split: Annotated[Split, typer.Option(help="Cases to score.")] = Split.test,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, with the score of each case.")] = None,
    limit: Limit = None,
    device: Device = "auto",
    state: State = None,
    local: Local = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Each site by itself: inprocess, or nvflare with processes."),
    ] = None,
) -> None:
    """Score a trained model on the images of one site or of several, or compare it with local models."""
    with importing():
        from medfedaug.runs.evaluate import evaluate_model
        from medfedaug.runs.folder import is_json_with
        from medfedaug.utils.files import write_json

    if local or engine is not None:
        if split is not Split.test or limit is not None:
            raise ConfigError("--local and --engine have no --split or --limit")
        _evaluate_sites(
            out,
            model,
            data,
            local=local or [],
            engine=engine or "inprocess",
            device=device,
            config=config,
            state=state,
        )
        return
    if out is not None and out.exists() and not is_json_with(out, "split", "sites", "mean"):
        raise ConfigError(f"{out} exists and is not a file of scores; choose another file")
    with err_console.status("evaluating"):
        scores = evaluate_model(
            model,
            data,
            config=config,
            split=split.value,
            limit=limit,
            device=device,
            state=state,
        )
    print_scores(scores, split.value, scores["scored"])
    if out is not None:
        write_json(out, scores)


def _evaluate_sites(out: Path | None, model: Path, data: Path, **options: Any) -> None:
    from medfedaug.research.comparison.local_vs_global import worth_table
    from medfedaug.runs.folder import is_json_with
    from medfedaug.runs.site_evaluation import evaluate_sites
    from medfedaug.utils.files import write_json

    if out is not None and out.exists() and not is_json_with(out, "metric", "models", "sites"):
        raise ConfigError(f"{out} exists and is not a file of an evaluation; choose another file")
    with err_console.status("evaluating") as status:

        def show(event: dict[str, Any]) -> None:
            if event["event"] == "scoring":
                status.update(f"{event['model']} model")
            elif event["event"] == "not_scored":
                say(event["reason"], "yellow", err=True)

        result = evaluate_sites(model, data, on_event=show, **options)
    _print_worth(worth_table(result))
    if out is not None:
        write_json(out, result)
        say(f"{out}: medfedaug report {quote(str(out))} makes a page of it")


def _print_worth(worth: WorthTable) -> None:
    out_console.print(worth)
    for row in worth.rows:
        say(row.sentence(worth.metric))


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs or of a benchmark, and files evaluation.json.")
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
    data: Annotated[
        Path | None, typer.Option(help="Sites' folders or a benchmark's files, for intensities and cases.")
    ] = None,
    tables: Annotated[
        Path | None, typer.Option(help="Folder for the tables as Markdown, CSV and LaTeX.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric to compare: dice, hd95, ...; by default the validation's.")
    ] = None,
    reference: Annotated[
        str, typer.Option(help="Methods that all others are compared with, joined by commas.")
    ] = "fedavg",
    features: Annotated[
        bool, typer.Option("--features", help="With --data: features by t-SNE, also of sites' local models.")
    ] = False,
    device: Device = "auto",
) -> None:
    """Compare runs on one self-contained page."""
    from medfedaug.analysis import write_report
    from medfedaug.research.comparison.local_vs_global import find_evaluations
    from medfedaug.runs.load_results import find_runs, load_run
    from medfedaug.runs.run import BASELINE

    if reference != BASELINE:
        from medfedaug.methods.registry import parse_methods  # imports PyTorch

        reference = ",".join(spec["name"] for spec in parse_methods(reference))
    evaluated, others = find_evaluations(runs)
    loaded = [load_run(run, metric) for run in find_runs(others)]
    local = None
    if features:
        if data is None:
            raise ConfigError("--features needs the sites' images: --data")
        if find_spec("sklearn") is None:  # said before minutes of training
            raise ConfigError("--features needs scikit-learn for t-SNE; pip install 'medfedaug[tsne]'")
        from medfedaug.research.comparison.local_features import local_features

        with err_console.status("training local models"):
            local = local_features(loaded, data, device)
    with err_console.status("drawing"):
        write_report(
            loaded,
            out,
            data=data,
            device=device,
            evaluations=evaluated,
            reference=reference,
            local_features=local,
        )
    saved = _print_tables(loaded, evaluated, reference)
    if tables is not None:
        for name, table in saved.items():
            table.save(tables / name)
        say(", ".join(f"{tables}/{name}.*" for name in saved))
    say(str(out))


def _print_tables(
    runs: Sequence[Run], evaluations: Sequence[Mapping[str, Any]], reference: str
) -> dict[str, TextTable]:
    """Print the tables of evaluations and of runs, and return them by the names of their files."""
    from medfedaug.analysis import metric_table, summary_table
    from medfedaug.research.comparison import patient_table
    from medfedaug.research.comparison.class_table import class_table
    from medfedaug.research.comparison.local_vs_global import worth_table

    tables: dict[str, TextTable] = {}
    for index, content in enumerate(evaluations):
        worth = worth_table(content)
        _print_worth(worth)
        tables[f"worth_{index + 1}" if index else "worth"] = worth
    if runs:
        patients, classes = patient_table(runs, reference), class_table(runs, reference)
        tables |= {"scores": summary_table(runs, reference), "patients": patients}
        tables |= {"classes": classes} if classes.rows else {}
        tables["metrics"] = metric_table(runs)
        for table in (tables["scores"], tables["patients"], classes, tables["metrics"]):
            if table.body:
                out_console.print(table)
    return tables
