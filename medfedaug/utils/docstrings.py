"""Read docstrings in Google's style: the first paragraph, the text, and the text of each argument."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from typing import Any

from docstring_parser import DocstringParam
from docstring_parser.google import DEFAULT_SECTIONS, GoogleParser, Section, SectionType

from medfedaug.utils.docstring_math import formula_text

_FORMULA = ".. math::"
_TEXTS = [Section(title, title.lower(), SectionType.SINGULAR) for title in ("Deviations", "Note")]
_PARSER = GoogleParser([*DEFAULT_SECTIONS, *_TEXTS])


@dataclass(frozen=True)
class Docstring:
    """A docstring in its parts, without markup.

    Args:
        summary: the first paragraph.
        paragraphs: the paragraphs of the text after it, and between its sections.
        arguments: the text of each argument.
        sections: the text of the other sections by name.
    """

    summary: str
    paragraphs: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)


def read_docstring(of: Any) -> Docstring:
    """Read the docstring of a function, or of a class and its constructor; empty where there is none.

    Formulas are text (`medfedaug.utils.docstring_math.formula_text`); a displayed formula is an indented
    paragraph.

    Example:
        >>> def scale(x, by=2.0):
        ...     '''Scale ``x``.
        ...
        ...     It is not changed.
        ...
        ...     Args:
        ...         by: the factor,
        ...             above 0.
        ...     '''
        >>> docstring = read_docstring(scale)
        >>> docstring.summary, docstring.paragraphs, docstring.arguments
        ('Scale x.', ('It is not changed.',), {'by': 'the factor, above 0.'})
    """
    init = [of.__init__] if inspect.isclass(of) and "__init__" in vars(of) else []
    # Text may go on after a section: each block that begins at the margin is parsed by itself, below a
    # summary, which the parser expects.
    blocks = [
        _PARSER.parse(f"Summary.\n\n{block}")
        for documented in (of, *init)
        for block in re.split(r"\n\s*\n(?=\S)", inspect.cleandoc(documented.__doc__ or ""))
    ]
    paragraphs = [
        _paragraph(text)
        for block in blocks
        for text in re.split(r"\n\s*\n", block.long_description or "")
        if text.strip()
    ]
    entries = [entry for block in blocks for entry in block.meta]
    arguments = {
        entry.arg_name.lstrip("*"): plain(entry.description or "")
        for entry in entries
        if isinstance(entry, DocstringParam) and entry.args[0] == "param"
    }
    sections = {
        entry.args[0].capitalize(): plain(entry.description or "")
        for entry in entries
        if not isinstance(entry, DocstringParam)
    }
    return Docstring(paragraphs[0] if paragraphs else "", tuple(paragraphs[1:]), arguments, sections)


def _paragraph(lines: str) -> str:
    formula = lines.removeprefix(_FORMULA)
    return plain(lines) if formula == lines else f"    {formula_text(formula)}"


def plain(text: str) -> str:
    r"""Return a text without line ends and the markup of code, links and formulas.

    Example:
        >>> plain("As ``x`` in `this paper <https://arxiv.org>`_,\nand `medfedaug.config.run.RunConfig`.")
        'As x in this paper, and medfedaug.config.run.RunConfig.'
    """
    text = re.sub(r":math:`([^`]*)`", lambda match: formula_text(match[1]), text)
    text = re.sub(r"(?::\w+)+:`([^`]*)`", r"\1", text)
    text = re.sub(r"\s*<https?://[^>]*>`?_{0,2}", "", text)
    return " ".join(text.replace("`", "").replace("\\*", "*").split())
