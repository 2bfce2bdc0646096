"""`Document`: sections of texts and tables, as Markdown and as a page."""

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass

from medfedaug.analysis import page
from medfedaug.analysis.text_table import plain_markdown


@dataclass(frozen=True)
class Table:
    """A table of text."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = str | Table


@dataclass(frozen=True)
class Document:
    """A title, the first paragraph, and sections: each a heading with its blocks.

    Example:
        >>> print(Document("A model", "Of slices.", [("Use", ("Research only.",))]).markdown())
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
    sections: Sequence[tuple[str, tuple[Block, ...]]] = ()

    def markdown(self) -> str:
        """Return the document as Markdown."""
        parts = [f"# {_escaped(self.title)}", _escaped(self.lead)]
        for heading, blocks in self.sections:
            parts += [f"## {_escaped(heading)}", *map(_markdown, blocks)]
        return "\n\n".join(parts) + "\n"

    def html(self) -> ET.Element:
        """Return the document as a page, for `medfedaug.analysis.page.write_page`."""
        html, body = page.start_page(self.title)
        page.add(body, "p", self.lead)
        for heading, blocks in self.sections:
            part = page.start_section(body, heading)
            for block in blocks:
                if isinstance(block, Table):
                    page.table(part, block.header, block.rows, words=True)
                else:
                    page.add(part, "p", block)
        return html


def _markdown(block: Block) -> str:
    if isinstance(block, str):
        return _escaped(block)
    rule = " | ".join(["---"] * len(block.header))
    header, *rows = (" | ".join(map(_escaped, cells)) for cells in (block.header, *block.rows))
    return "\n".join(f"| {line} |" for line in (header, rule, *rows))


def _escaped(text: str) -> str:
    """Escape text of the sites: it makes no border of a table, no markup and no link."""
    return plain_markdown(" ".join(text.split()), "\\|<>*_`[]~#&!")
