"""Reads docstrings in Google's style: the first paragraph, the text, and what is said of each argument."""

from __future__ import annotations

import inspect
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

from medfedaug.utils.docstring_math import formula_text

__all__ = ["Docstring", "plain", "read_docstring"]

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Deviations|Examples?|Note):\s*$")
_FORMULA = ".. math::"
_ARGUMENT = re.compile(r"\*{0,2}(\w+)(?: \([^)]*\))?:\s*(.*)")


@dataclass(frozen=True)
class Docstring:
    """A docstring in its parts, without markup.

    Args:
        summary: the first paragraph.
        paragraphs: the paragraphs of the text after it, and between its sections.
        arguments: what is said of each argument.
        sections: the text of the other sections by name.
    """

    summary: str
    paragraphs: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)


def read_docstring(of: Any) -> Docstring:
    """The docstring of a class, with that of its constructor, or of a function; empty where there is none.

    Formulas are text (`medfedaug.utils.docstring_math.formula_text`); one that stands alone is an indented
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
        >>> found = read_docstring(scale)
        >>> found.summary, found.paragraphs, found.arguments
        ('Scale x.', ('It is not changed.',), {'by': 'the factor, above 0.'})
    """
    texts = [of.__doc__ or ""]
    if inspect.isclass(of) and "__init__" in vars(of):
        texts.append(of.__init__.__doc__ or "")
    blocks = [block for text in texts for block in _blocks(inspect.cleandoc(text))]
    text = [_paragraph(lines) for name, lines in blocks if not name]
    arguments: dict[str, str] = {}
    sections: dict[str, str] = {}
    for name, lines in blocks:
        if name == "Args":
            arguments.update(_arguments(lines))
        elif name:
            sections[name] = plain(lines)
    return Docstring(text[0] if text else "", tuple(text[1:]), arguments, sections)


def _paragraph(lines: str) -> str:
    formula = lines.removeprefix(_FORMULA)
    return plain(lines) if formula == lines else f"    {formula_text(formula)}"


def plain(text: str) -> str:
    r"""A text without line ends and the markup of code, links and formulas.

    Example:
        >>> plain("As ``x`` in `this paper <https://arxiv.org>`_,\nand `medfedaug.config.run.RunConfig`.")
        'As x in this paper, and medfedaug.config.run.RunConfig.'
    """
    text = re.sub(r":math:`([^`]*)`", lambda found: formula_text(found[1]), text)
    text = re.sub(r"(?::\w+)+:`([^`]*)`", r"\1", text)
    text = re.sub(r"\s*<https?://[^>]*>`?_{0,2}", "", text)
    return " ".join(text.replace("`", "").replace("\\*", "*").split())


def _blocks(text: str) -> list[tuple[str, str]]:
    """The paragraphs and sections in their order, each with the section's name."""
    found: list[tuple[str, str]] = []
    lines: list[str] = []
    name = ""

    def end() -> None:
        if any(line.strip() for line in lines):
            found.append((name, "\n".join(lines)))

    for line in [*text.splitlines(), ""]:
        if match := _SECTION.match(line):
            end()
            name, lines = match[1], []
        elif name and line.strip() and not line.startswith(" "):  # the text goes on after a section
            end()
            name, lines = "", [line]
        elif not name and not line.strip():
            end()
            lines = []
        else:
            lines = [*lines, line]
    end()
    return found


def _arguments(lines: str) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(lines).splitlines():
        if (match := _ARGUMENT.match(line)) and not line.startswith(" "):
            name = match[1]
            found[name] = match[2]
        elif name:
            found[name] += f"\n{line}"
    return {name: plain(text) for name, text in found.items()}
