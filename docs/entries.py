"""Write the tables of `docs/papers.md` from the protocols and the papers' entries.

python docs/entries.py

A test compares the page with them.
"""

import re
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medfedaug.research.papers.papers import entries
from medfedaug.research.papers.presets import PRESETS

PAGE = Path(__file__).with_name("papers.md")
STEPS = runpy.run_path(str(PAGE.parents[1] / "benchmarks/step_times.py"))


def duration(runs: Sequence[Any], device: str, at_once: int = 1) -> str:
    """Return the duration of runs, so many at once."""
    hours = [STEPS["hours"](run, device) for run in runs]
    if None in hours:
        return "not measured"
    total = sum(hours) / at_once
    return f"{float(f'{total:.2g}'):,.10g} h" if total >= 1 else f"{60 * total:.0f} min"


def _row(*cells: str) -> str:
    """Return a row of a table; its last column, the H100, is left out until its steps are measured."""
    shown = cells if "cuda" in STEPS["_record"]() else cells[:-1]
    return f"| {' | '.join(shown)} |" if set(shown) != {"---"} else f"|{'|'.join(shown)}|"


def protocol_table() -> Iterator[str]:
    """Yield the rows of the protocols."""
    yield _row("NAME", "data set", "network", "rounds x local", "one run, one core", "H100")
    yield _row(*["---"] * 6)
    for preset in PRESETS.values():
        durations = [duration([STEPS["work"](preset)], device) for device in STEPS["DEVICES"]]
        yield _row(
            f"`{preset.name}`", preset.benchmark, preset.config["network"], preset.schedule, *durations
        )


def entry_table() -> Iterator[str]:
    """Yield the entries that can run, with the runs of one seed and their duration."""
    yield _row("entry", "subject", "runs", "two cores", "H100")
    yield _row(*["---"] * 5)
    for entry in entries().values():
        if not entry.reason:
            runs = [(name, one) for name in entry.protocols for one in STEPS["runs"](entry, name)]
            work = [STEPS["work"](PRESETS[name], one) for name, one in runs]
            cpu, gpu = duration(work, "cpu", at_once=2), duration(work, "cuda")
            yield _row(f"`{entry.name}`", entry.title, f"{len(runs)}", cpu, gpu)


def written(text: str) -> str:
    """Return the page with its present tables."""
    for mark, lines in (("protocols", protocol_table()), ("entries", entry_table())):
        content = "\n".join(lines).strip()
        text, number = re.subn(
            rf"(<!-- {mark}: .*? -->\n).*?(\n<!-- end -->)",
            lambda place, content=content: f"{place[1]}\n{content}\n{place[2]}",
            text,
            flags=re.DOTALL,
        )
        if number != 1:
            raise ValueError(f"{PAGE.name} has {number} places for {mark}")
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
