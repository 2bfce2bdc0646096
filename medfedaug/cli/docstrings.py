"""Read docstrings in Google's style: the first paragraph, the text, and the text of each argument."""

import inspect
import re
from dataclasses import dataclass, field
from textwrap import dedent

_HEADINGS = "Args|Attributes|Deviations|Examples?|Notes?|Raises|References|Returns|Shapes|Warnings?|Yields"
_HEADING = re.compile(rf"({_HEADINGS}):[ \t]*\n(?=[ \t])")
_BLOCK = re.compile(rf"\n[ \t]*\n(?=\S)|\n(?=(?:{_HEADINGS}):[ \t]*\n)")
_ENTRY = re.compile(r"^(?:``)?\*{0,2}(\w+)(?:``)?(?: *\([^)\n]*\))?:", re.MULTILINE)


@dataclass(frozen=True)
class Docstring:
    """A docstring in its parts, without markup.

    Args:
        summary: the first paragraph.
        paragraphs: the paragraphs of the text after it, and between its sections. Lines of an equation or of
            code stay lines, and are indented.
        arguments: the text of each argument.
        sections: the text of the other sections by name.
    """

    summary: str = ""
    paragraphs: tuple[str, ...] = ()
    arguments: dict[str, str] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)


def parse_docstring(*texts: str | None) -> Docstring:
    """Read docstrings that belong together, as those of a class and its constructor.

    Example:
        >>> docstring = parse_docstring('''Scale ``x``.
        ...
        ...     It becomes ::
        ...
        ...         y = a x
        ...
        ...     Args:
        ...         a: the factor,
        ...             above 0.
        ...     ''')
        >>> docstring.summary, docstring.paragraphs, docstring.arguments
        ('Scale x.', ('It becomes', '    y = a x'), {'a': 'the factor, above 0.'})
    """
    paragraphs: list[str] = []
    arguments: dict[str, str] = {}
    sections: dict[str, str] = {}
    for block in (block for text in texts for block in _BLOCK.split(inspect.cleandoc(text or ""))):
        if heading := _HEADING.match(block):
            body = dedent(block[heading.end() :])
            if heading[1] == "Args":
                _, *entries = _ENTRY.split(body)
                pairs = zip(entries[::2], entries[1::2], strict=True)
                arguments |= {name: plain(described) for name, described in pairs}
            else:
                sections[heading[1]] = plain(body)
        else:
            paragraphs += filter(None, map(_paragraph, re.split(r"\n[ \t]*\n", block)))
    return Docstring(paragraphs[0] if paragraphs else "", tuple(paragraphs[1:]), arguments, sections)


def _paragraph(text: str) -> str:
    if text.startswith((" ", "\t")):
        return "\n".join(f"    {line}" for line in dedent(text).splitlines())
    ended = re.fullmatch(r"(.*?)(\s*)::", text.strip(), re.DOTALL)
    return plain(text if ended is None else ended[1] + ("" if ended[2] or not ended[1] else ":"))


def plain(text: str) -> str:
    r"""Return a text without line ends and the markup of code and links.

    Example:
        >>> plain("As ``x`` in `this paper <https://arxiv.org>`_,\nand `medfedaug.config.run.RunConfig`.")
        'As x in this paper, and medfedaug.config.run.RunConfig.'
    """
    text = re.sub(r"(?::\w+)+:`([^`]*)`", r"\1", text)
    text = re.sub(r"\s*<https?://[^>]*>`?_{0,2}", "", text)
    return " ".join(text.replace("`", "").replace("\\*", "*").split())
