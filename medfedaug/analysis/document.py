"""`Document`: sections of texts and tables, as Markdown and as a page."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

from medfedaug.analysis import page
from medfedaug.analysis.text_table import plain_markdown


@dataclass(frozen=True)
class Table:
    """A table of text.

    Args:
        header: headings of the columns.
        rows: the cells.
        words: aligns the cells as words, not as numbers.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: bool = True


Block = str | Table


@dataclass(frozen=True)
class Section:
    """A heading and its blocks."""

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
    sections: Sequence[Section] = ()

    def markdown(self) -> str:
        """Return the document as Markdown."""
        parts = [f"# {_escaped(self.title)}", _escaped(self.lead)]
        for section in self.sections:
            parts += [f"## {_escaped(section.title)}", *map(_markdown, section.blocks)]
        return "\n\n".join(parts) + "\n"

    def html(self) -> ET.Element:
        """Return the document as a page, for `medfedaug.analysis.page.write_page`."""
        html, body = page.start_page(self.title)
        page.add(body, "p", self.lead)
        for section in self.sections:
            part = page.start_section(body, section.title)
            for block in section.blocks:
                if isinstance(block, Table):
                    page.table(part, block.header, block.rows, words=block.words)
                else:
                    page.add(part, "p", block)
        return html


def _markdown(block: Block) -> str:
    if isinstance(block, str):
        return _escaped(block)
    rule = " | ".join(["---", *(["---" if block.words else "---:"] * (len(block.header) - 1))])
    header, *rows = (" | ".join(map(_escaped, cells)) for cells in (block.header, *block.rows))
    return "\n".join(f"| {line} |" for line in (header, rule, *rows))


def _escaped(text: str) -> str:
    """Escape text of the sites: it makes no border of a table, no markup and no link."""
    return plain_markdown(" ".join(text.split()), "\\|<>*_`[]~#&!")
