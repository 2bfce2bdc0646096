"""What the commands print to, and the tables that several of them print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from medfedaug.scores import METRICS

__all__ = ["err_console", "number", "out_console", "print_scores", "say"]

# Names of sites, files and classes may have brackets, which Rich would read as markup.
out_console, err_console = (Console(stderr=err, markup=False, highlight=False) for err in (False, True))


def say(text: str, style: str | None = None, *, err: bool = False) -> None:
    """Print a text as it is, without line breaks of ours: paths and commands can be copied.

    Args:
        text: the text.
        style: its colour.
        err: whether it is for the standard error.
    """
    # A file name may have bytes that are no text.
    text = text.encode("utf-8", "backslashreplace").decode()
    (err_console if err else out_console).print(text, style=style, soft_wrap=True)


def print_scores(scores: dict[str, Any], title: str, scored: Mapping[str, str]) -> None:
    """Print a table of the sites' test scores.

    Args:
        scores: such as ``test`` in ``results.json``.
        title: of the table.
        scored: whose model the scores are of: by site, or ``"test"`` and ``"unseen"`` for these groups.
    """
    metrics = list(scores["mean"])
    units = {entry.get("unit") for entry in scores["sites"].values()} - {None}
    heads = [
        f"{name} ({', '.join(sorted(units))})" if METRICS[name].has_unit and units else name
        for name in metrics
    ]
    table = Table("site", "model", *heads, "cases", title=title)
    for group, mark in (("sites", ""), ("unseen", " (unseen)")):
        for site, entry in sorted(scores.get(group, {}).items()):
            model = scored.get(site) or scored.get("unseen" if mark else "test", "")
            count = entry.get("scored_cases", len(entry.get("cases", {})))
            table.add_row(site + mark, model, *(number(entry.get(name)) for name in metrics), str(count))
    for site in scores.get("missing", {}):
        table.add_row(site, "", "not tested")
    table.add_row("mean", "", *(number(scores["mean"][name]) for name in metrics), "")
    worst = scores.get("worst", {})
    if len(scores["sites"]) > 1 and any(worst.values()):
        table.add_row("worst", "", *(number((worst.get(name) or {}).get("value")) for name in metrics), "")
    out_console.print(table)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
