"""The command `evaluate` scores the model of a finished run."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from medfedaug.cli.console import err_console, out_console, print_scores, say
from medfedaug.cli.options import Device, Limit, SiteOrSites, State, existing_run
from medfedaug.errors import ConfigError

if TYPE_CHECKING:
    from medfedaug.analysis.text_table import TextTable


class Split(str, Enum):
    """Cases that are scored."""

    test = "test"
    validation = "validation"


def evaluate(
    model: Annotated[Path, Option(callback=existing_run, help="Folder of a run, or its model.")],
    data: SiteOrSites,
    split: Annotated[Split, Option(help="Cases to score.")] = Split.test,
    out: Annotated[Path | None, Option(help="JSON file to write, with the score of each case.")] = None,
    limit: Limit = None,
    device: Device = "auto",
    state: State = None,
    local: Annotated[Path | None, Option(metavar="RUN", help="Run of the sites' own models.")] = None,
) -> None:
    """Score a trained model on the images of one site or of several, or compare it with local models."""
    from medfedaug.runs.evaluate import evaluate_model
    from medfedaug.runs.folder import is_json_with
    from medfedaug.utils.files import write_json

    if out is not None and out.exists() and not is_json_with(out, "sites"):
        raise ConfigError(f"{out} exists and is not an evaluation; choose another file")
    if local is not None:
        if split is not Split.test or limit is not None:
            raise ConfigError("--local tests all test cases: leave out --split and --limit")
        _compare(out, model, data, local=local, device=device, state=state)
        return
    with err_console.status("evaluating"):
        scores = evaluate_model(
            model,
            data,
            split=split.value,
            limit=limit,
            device=device,
            state=state,
        )
    print_scores(scores, split.value, scores["scored"])
    if out is not None:
        write_json(out, scores)


def _compare(out: Path | None, model: Path, data: Path, **options: Any) -> None:
    from medfedaug.research.comparison.local_vs_global import worth_table
    from medfedaug.runs.evaluate import evaluate_sites
    from medfedaug.utils.files import write_json

    with err_console.status("evaluating"):
        result = evaluate_sites(model, data, **options)
    print_worth(worth_table(result))
    if out is not None:
        write_json(out, result)
        say(f"{out}; for a page: medfedaug report {quote(str(out))}")


def print_worth(worth: TextTable) -> None:
    out_console.print(worth)
    for row in worth.rows:
        say(row.sentence)
