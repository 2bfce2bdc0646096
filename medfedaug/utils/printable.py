r"""Make text from outside safe to show: control and invisible characters become escapes.

Names of sites, classes, files and cases, settings of jobs and texts of errors come from other people. All
output of them goes through `printable`: the console and its tables (`medfedaug.cli.console`), errors
(`medfedaug.errors`), lines about events (`medfedaug.utils.event_text`), pages and tables in files
(`medfedaug.analysis`) and the event log (`medfedaug.nvflare_jobs.job.messages`).
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

__all__ = ["printable", "printable_lines", "printable_values"]

# Letters and marks without a glyph: Unicode's default ignorable code points.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> counted(1, "round"), counted(2, "entry", "entries")
    ('1 round', '2 entries')
    """
    return f"{number} {noun if number == 1 else plural or f'{noun}s'}"


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table for a notebook.

    >>> html_table(["site"], [["A & B"]])
    '<table><tr><th>site</th></tr><tr><td>A &amp; B</td></tr></table>'
    """
    lines = (("th", header), *(("td", cells) for cells in rows))
    rows_ = ("".join(f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells) for tag, cells in lines)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows_)}</table>"


def plain(text: str) -> str:
    r"""Return a text without line ends and the markup of code and links.

    Example:
        >>> plain("As ``x`` in `this paper <https://arxiv.org>`_,\nand `medfedaug.config.run.RunConfig`.")
        'As x in this paper, and medfedaug.config.run.RunConfig.'
    """
    text = re.sub(r"\s*<https?://[^>]*>`?_{0,2}", "", re.sub(r"(?::\w+)+:`([^`]*)`", r"\1", text))
    return " ".join(text.replace("`", "").split())


def printable(text: object) -> str:
    r"""Return a text as one line in which every character can be seen.

    Control characters (C0, C1, ESC, DEL), line and paragraph separators, marks of direction, characters of no
    width, private and unassigned characters and lone surrogates become escapes as in Python. Letters of all
    scripts and spaces stay.

    Example:
        >>> printable("lesion\x1b[2J, \u202egnul\u202c\nM\u00fcller")
        'lesion\\x1b[2J, \\u202egnul\\u202c\\nMüller'
    """
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _seen(char) else char.encode("unicode_escape").decode() for char in text)


def printable_lines(text: object, indent: str = "") -> str:
    r"""Do as `printable`, but keep line breaks.

    Args:
        text: the text.
        indent: the beginning of all lines but the first, so that none looks like another entry.
    """
    return f"\n{indent}".join(printable(line) for line in str(text).split("\n"))


def printable_values(value: Any) -> Any:
    """Return a JSON value with all its texts, keys too, made printable."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable_values(key): printable_values(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [printable_values(entry) for entry in value]
    return value


def _seen(char: str) -> bool:
    if char.isprintable():
        return char.isascii() or not _BLANK.match(char)
    return unicodedata.category(char) == "Zs"
