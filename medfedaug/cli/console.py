"""What the commands print to, and the tables that several of them print."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["err_console", "number", "out_console", "print_scores"]

out_console, err_console = Console(), Console(stderr=True)


def print_scores(scores: dict[str, Any], title: str) -> None:
    metric = next(iter(scores["mean"]))
    table = Table("site", metric, "cases", title=title)
    for group, mark in (("sites", ""), ("unseen", " (unseen)")):
        for site, entry in sorted(scores.get(group, {}).items()):
            table.add_row(site + mark, number(entry[metric]), str(len(entry.get("cases", {}))))
    table.add_row("mean", number(scores["mean"][metric]), "")
    out_console.print(table)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
