"""`Document`: sections of texts and tables, as Markdown and as a page."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, field

from medfedaug.analysis import page
from medfedaug.analysis.text_table import plain_markdown
from medfedaug.utils.printable import printable


@dataclass(frozen=True)
class Table:
    """A table of text.

    Args:
        header: headings of the columns.
        rows: the cells.
        words: whether the cells are words, and not numbers.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: bool = True


@dataclass(frozen=True)
class Code:
    """A command, or the like."""

    text: str


Block = str | Table | Code


@dataclass(frozen=True)
class Section:
    """A heading and what is under it."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Document:
    """A title, the first paragraph, and sections.

    Example:
        >>> print(Document("A model", "Of slices.", (Section("Use", ("Research only.",)),)).markdown())
        # A model
        <BLANKLINE>
        Of slices.
        <BLANKLINE>
        ## Use
        <BLANKLINE>
        Research only.
        <BLANKLINE>
    """

    title: str
    lead: str
    sections: Sequence[Section] = field(default=())

    def markdown(self) -> str:
        """The document as Markdown."""
        parts = [f"# {_escaped(self.title)}", _escaped(self.lead)]
        for section in self.sections:
            parts += [f"## {_escaped(section.title)}", *map(_markdown, section.blocks)]
        return "\n\n".join(parts) + "\n"

    def html(self) -> ET.Element:
        """The document as a page, for `medfedaug.analysis.page.write_page`."""
        html, body = page.start_page(self.title)
        page.add(body, "p", self.lead)
        for section in self.sections:
            part = page.add(body, "section")
            page.add(part, "h2", section.title)
            for block in section.blocks:
                if isinstance(block, Table):
                    page.table(part, block.header, block.rows, words=block.words)
                else:
                    text, tag = (block.text, "pre") if isinstance(block, Code) else (block, "p")
                    page.add(part, tag, text)
        return html


def _markdown(block: Block) -> str:
    if isinstance(block, Code):
        return f"```bash\n{printable(block.text)}\n```"
    if isinstance(block, str):
        return _escaped(block)
    rule = " | ".join(["---", *(["---" if block.words else "---:"] * (len(block.header) - 1))])
    header, *rows = (" | ".join(map(_escaped, cells)) for cells in (block.header, *block.rows))
    return "\n".join(f"| {line} |" for line in (header, rule, *rows))


def _escaped(text: str) -> str:
    """Names come from the sites: they are text, and neither a table's borders nor markup nor a link."""
    return plain_markdown(" ".join(text.split()), "\\|<>*_`[]~#&!")
