"""Elements of an HTML page that needs no other files and no network connection."""

from __future__ import annotations

import base64
import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medfedaug._version import __version__
from medfedaug.analysis.text_table import TextTable
from medfedaug.errors import ConfigError
from medfedaug.utils.files import write_text
from medfedaug.utils.printable import printable, printable_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark;
  --ink: #1b1b1f; --soft: #5c5c66; --line: #d5d5dc; --page: #fff; --band: #f5f5f8 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6ea; --soft: #a3a3ad; --line: #3a3a42; --page: #17171a; --band: #212126 }
  /* Black lines become white, the colours keep their hue. */
  figure:not(.photo) img { filter: invert(.9) hue-rotate(180deg) }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1rem 1rem 3rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0 }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
.warning { border-left: .3rem solid #c0392b; padding-left: .6rem; font-weight: 600 }
p { margin: .5rem 0 } .soft, figcaption { color: var(--soft); font-size: .875rem }
/* A shadow at the right edge where a table continues. */
.wide { overflow-x: auto; margin: .6rem 0;
  background: linear-gradient(to left, var(--page) 40%, transparent) right / 2rem 100% no-repeat local,
    linear-gradient(to left, rgb(128 128 128 / .45), transparent) right / .7rem 100% no-repeat scroll }
/* Whole pixels: a column that stays in place is rounded apart from the others. */
table { border-collapse: separate; border-spacing: 0; font-size: .875rem; line-height: 20px;
  font-variant-numeric: tabular-nums }
th, td { padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line);
  overflow-wrap: normal }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: var(--page);
  overflow-wrap: break-word }
th.word, td.word { text-align: left } td.long:not(:first-child) { min-width: 12rem }
thead th { background: var(--band); vertical-align: bottom; font-weight: 600 }
thead th:first-child { background: var(--band) }
table.words td { text-align: left } table.words th { text-align: left }
table.words td:last-child { min-width: 12rem; overflow-wrap: anywhere }
figure { margin: 1rem 0 }
details { margin: .4rem 0; font-size: .875rem } summary { cursor: pointer; color: var(--soft) }
details.section { font-size: inherit; margin: .8rem 0 } details.section > summary { color: inherit }
details.section > summary h2 { display: inline; border: none; font-size: 1.05rem }
dt { font-weight: 600 } dd { margin: 0 0 .4rem; color: var(--soft) }
.answer { font-size: 1.15rem }
pre { overflow-x: auto; background: var(--band); padding: .6rem; font-size: .8rem; line-height: 1.35 }
.cases { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(19rem, 100%), 1fr)); gap: 0 1rem }
img { width: 100%; height: auto; display: block }
@media (max-width: 600px) {
  th, td { padding: 5px 7px } th:first-child, td:first-child { max-width: 7.5rem }
  table.words th:first-child, table.words td:first-child { max-width: 10rem }
}
/* On paper nothing can be scrolled: names of rows break where they must. */
@page { size: A4; margin: 14mm }
@media print {
  details.section::details-content { content-visibility: visible; block-size: auto }
  html, body { font-size: 13px } body { max-width: none; padding: 0 }
  .wide { overflow: visible } table { line-height: 1.4 } th, td { padding: 3px 7px }
  th:first-child, td:first-child { position: static; background: none }
  th:first-child, td:first-child { max-width: 14rem }
  td.long:not(:first-child), table.words td:last-child { min-width: 6rem }
  h1, h2, h3, tbody tr:first-child { break-after: avoid } tbody tr:last-child { break-before: avoid }
  tr, figure { break-inside: avoid }
}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def start_page(title: str) -> tuple[ET.Element, ET.Element]:
    """Start a page with its head and title; return the page and its body."""
    # An element tree escapes all texts and attributes. Names come from files of other people.
    html = ET.Element("html", lang="en")
    head = add(html, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "meta", **{"http-equiv": "Content-Security-Policy", "content": POLICY})
    add(head, "title", title)
    add(head, "style", STYLE)
    body = add(html, "body")
    add(body, "h1", title)
    return html, body


def check_page(out: Path) -> None:
    """Check that a new page replaces nothing but a page of medfedaug."""
    # Every page has this policy in its head; other pages hardly do.
    if out.exists() and (out.is_dir() or POLICY.encode() not in out.read_bytes()[:2000]):
        raise ConfigError(f"{out} exists and is not a page of medfedaug; choose another file")


def write_page(html: ET.Element, out: Path) -> None:
    """Write a page."""
    write_text(out, "<!DOCTYPE html>\n" + ET.tostring(html, encoding="unicode", method="html") + "\n")


def add(parent: ET.Element, tag: str, text: str | None = None, **attributes: str) -> ET.Element:
    """Append an element, with printable and escaped text and attributes."""
    child = ET.SubElement(parent, tag, {name: printable(value) for name, value in attributes.items()})
    if text is not None:
        child.text = printable_lines(text) if tag in ("pre", "style") else printable(text)
    return child


def start_section(body: ET.Element, title: str, *, folded: bool = False) -> ET.Element:
    """Append a section with its heading; a folded one shows its heading until a reader opens it."""
    section = add(body, "section")
    if not folded:
        add(section, "h2", title)
        return section
    content = add(section, "details", **{"class": "section"})
    add(add(content, "summary"), "h2", title)
    return content


def remark(parent: ET.Element, text: str) -> None:
    """Append a paragraph in small print."""
    add(parent, "p", text, **{"class": "soft"})


def end_page(body: ET.Element) -> None:
    """Append the version that wrote the page, and remove remarks that stand further up already."""
    said: set[str] = set()
    for parent in [*body.iter()]:
        for child in [*parent]:
            if child.tag == "p" and child.get("class") == "soft" and child.text:
                if child.text in said:
                    parent.remove(child)
                said.add(child.text)
    remark(body, f"medfedaug {__version__}")


def table(
    parent: ET.Element, header: Sequence[str], body: Iterable[Sequence[str]], *, words: bool = False
) -> None:
    """Append a table, which can be scrolled if it is wider than the page."""
    wide = add(parent, "div", **{"class": "wide"})
    grid = add(wide, "table", **({"class": "words"} if words else {}))
    line = add(add(grid, "thead"), "tr")
    cells = [list(row) for row in body]
    kinds = [_kind([row[column] for row in cells]) for column in range(len(header))]
    for heading, kind in zip(header, kinds, strict=True):
        add(line, "th", heading, scope="col", **_classes(kind[:1]))
    rows = add(grid, "tbody")
    for row in cells:
        line = add(rows, "tr")
        for cell, kind in zip(row, kinds, strict=True):
            add(line, "td", cell, **_classes(kind))


def _kind(column: Sequence[str]) -> list[str]:
    """Classes of a column: words are aligned to the left, and long ones are not squeezed on a phone."""
    if not any(column) or any(re.match(r"[-+−–±<]?\d", cell) for cell in column):
        return []
    return ["word", "long"] if max(map(len, column)) > 24 else ["word"]


def _classes(names: Sequence[str]) -> dict[str, str]:
    return {"class": " ".join(names)} if names else {}


def text_table(section: ET.Element, content: TextTable) -> None:
    """Append a table with its notes, and its folded numbers as CSV."""
    # No line break within "± 0.012" or an interval; narrow columns break before them.
    body = [
        [line[0], *(cell.replace("± ", "±\u00a0").replace(", ", ",\u00a0") for cell in line[1:])]
        for line in content.cells()[1:]
    ]
    table(section, content.cells()[0], body)
    for note in content.notes:
        remark(section, note)
    details(section, "As CSV", (content.csv(),))


def figure(parent: ET.Element, drawing: Figure, alt: str, caption: str = "", *, photo: bool = False) -> None:
    """Append a figure.

    Args:
        alt: description for readers who cannot see the figure.
        photo: draws pixels, which stay dark in every theme.
    """
    frame = add(parent, "figure", **({"class": "photo"} if photo else {}))
    add(frame, "img", src=(_jpeg if photo else _svg)(drawing), alt=alt)
    if caption:
        add(frame, "figcaption", caption)


def details(parent: ET.Element, summary: str, texts: Iterable[str]) -> None:
    """Append folded texts, which a reader can unfold and copy."""
    folded = add(parent, "details")
    add(folded, "summary", summary)
    for text in texts:
        add(folded, "pre", text)


def definitions(parent: ET.Element, summary: str, entries: Mapping[str, str]) -> None:
    """Append a folded list of words, each with its meaning."""
    folded = add(parent, "details")
    add(folded, "summary", summary)
    items = add(folded, "dl")
    for word, meaning in entries.items():
        add(items, "dt", word)
        add(items, "dd", meaning)


def _svg(drawing: Figure) -> str:
    import matplotlib  # not for a page without figures

    stream = io.BytesIO()
    # The same runs give the same page: without a date, and with names from a fixed salt.
    with matplotlib.rc_context({"svg.hashsalt": "medfedaug"}):
        metadata = {"Date": None, "Creator": None}
        drawing.savefig(stream, format="svg", transparent=True, metadata=metadata)
    return "data:image/svg+xml;base64," + base64.b64encode(stream.getvalue()).decode()


def _jpeg(drawing: Figure) -> str:
    stream = io.BytesIO()
    # About 1000 pixels wide. Without subsampling, outlines keep their colour.
    drawing.savefig(stream, format="jpeg", dpi=110, pil_kwargs={"quality": 80, "subsampling": 0})
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode()
