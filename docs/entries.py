"""Write the tables of `docs/papers.md` from the protocols and the papers' entries.

python docs/entries.py

A test compares the page with them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from medfedaug.research.papers.papers import entries
from medfedaug.research.papers.presets import PRESETS

PAGE = Path(__file__).with_name("papers.md")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |" if set(cells) != {"---"} else f"|{'|'.join(cells)}|"


def protocol_table() -> Iterator[str]:
    """Yield the rows of the protocols."""
    yield _row("NAME", "data set", "network", "rounds x local", "one run, one core")
    yield _row(*["---"] * 5)
    for preset in PRESETS.values():
        network = preset.config["network"]
        yield _row(f"`{preset.name}`", preset.benchmark, network, preset.schedule, preset.cost)


def entry_table() -> Iterator[str]:
    """Yield the entries that can run, with their protocols."""
    yield _row("entry", "subject", "protocols")
    yield _row(*["---"] * 3)
    for entry in entries().values():
        if not entry.reason:
            yield _row(f"`{entry.name}`", entry.title, ", ".join(f"`{name}`" for name in entry.protocols))


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
