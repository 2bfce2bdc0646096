"""The tables of the papers, read from their text: labels of rows and the numbers in them, as printed."""

from __future__ import annotations

import re
from pathlib import Path

PAPERS = Path(__file__).resolve().parents[3] / "shared" / "papers"
FILES = {
    "FedFA": "fedfa_iclr2023.txt",
    "FedFA+": "fedfa_plus.txt",
    "FedRDN": "fedrdn.txt",
    "FedFD-A": "fedfd_a.txt",
    "FRAug": "fraug.txt",
}

Row = tuple[str, list[str]]
"""A label and its numbers: ``"90.40 ± 0.97"`` with a spread, ``""`` for an empty cell."""


def printed(paper: str, table: str) -> list[Row]:
    """The rows of a table, in the order in which they are printed."""
    text = (PAPERS / FILES[paper]).read_text(encoding="utf-8")
    return _READERS[paper](text, table)


def _clean(label: str) -> str:
    """A label without markup, references and the year of a conference."""
    label = re.sub(r"<sup>(.)</sup>", r"^\1", label)
    label = re.sub(r"</?b>|\*\*|\\textbf", "", label)
    return re.sub(r"\s+", " ", re.sub(r"\[[^\]]*\]", "", label)).replace(" ^", "^").strip()


def _number(cell: str) -> str:
    """``"**82.17 (1.15**)"``, ``"52.42 \\pm 0.4"`` or ``") 77.08 (0.59)"`` as one number with its spread."""
    numbers = re.findall(r"\d+\.\d+", cell)
    assert len(numbers) <= 2, cell
    return " ± ".join(numbers)


# --- FedFA+: cells between tabulators ---------------------------------------------------------------------


def _fedfa_plus(text: str, table: str) -> list[Row]:
    if table == "Section 6.2":  # a sentence
        (few,) = re.findall(r"scores of ([\d.%/]+) for standard variances of ([\d./]+), respectively", text)
        (last,) = re.findall(r"the score decreases to ([\d.]+)% at standard variance ([\d.]+)", text)
        pairs = zip(few[1].split("/"), few[0].split("/"), strict=True)
        return [(noise, [score.rstrip("%")]) for noise, score in (*pairs, (last[1].rstrip("."), last[0]))]
    block = re.split(rf"\nTABLE {table}\s*\n", text)[1]
    lines = [line for line in re.split(r"\nTABLE \d", block)[0].splitlines() if "\t" in line]
    rows = [(_clean(label), cells) for label, *cells in (line.split("\t") for line in lines)]
    return [
        (label, numbers)
        for label, cells in rows
        if label and (numbers := list(filter(None, map(_number, cells))))
    ]


# --- FedFA: one line of text ------------------------------------------------------------------------------

_FEDFA_LABEL = r"(?:FEDFA[-+][A-Z-]+|FED[A-Z]+|M-MIXUP|MIXUP|MIXSTYLE|MOEX|Direct Fusion|\{[\d, ]+\})"


def _fedfa(text: str, table: str) -> list[Row]:
    block = re.split(rf" Table {table}: ", text)[1]
    if table != "16":
        return _labelled(block)
    rows = []
    groups = re.split(r"fraction of training samples over the whole training set: (\S+)", block)[1:]
    for fraction, group in zip(groups[::2], groups[1::2], strict=True):
        rows += [(f"{label}, {fraction}", numbers) for label, numbers in _labelled(group)]
    return rows


def _labelled(block: str) -> list[Row]:
    """Labels with a citation or none, each followed by numbers of one decimal; up to the first gap."""
    row = re.compile(rf"({_FEDFA_LABEL})(?: \([A-Z][^)]*\))?((?: \d\d\.\d)+)(?= |$)")
    rows: list[Row] = []
    end = None
    for match in row.finditer(block):
        if end is not None and match.start() > end + 1:
            break  # the table is over, and another speaks of the same methods
        rows.append((match[1], match[2].split()))
        end = match.end()
    return rows


# --- FedRDN: words, with the source of formulas between them ----------------------------------------------


def _fedrdn(text: str, table: str) -> list[Row]:
    text = re.sub(r"\(\d+\.\d+\)\{\}.*?[↓↑]", " ", text)  # the gain below an average
    text = re.sub(r"\\pm|plus-or-minus|±", "±", text)
    text = re.sub(r"±+", " ± ", text)
    text = re.sub(r"(\d+\.\d\d)\1\1\1", r"\1", text)  # printed, and three times as a formula
    block = re.split(rf"\nTable {table}: ", text)[1]
    lines = re.split(r"\n\n|\nRefer to|\nTable ", block)[0].splitlines()
    rows, group = [], ""
    for line in lines:
        label, numbers = _words(line)
        if not numbers:
            continue
        if table in ("1", "2", "4", "7", "8"):
            group = group if label.startswith("+") else label
            label = label if label == group else f"{group} {label}"
        rows.append((label, numbers))
    if table == "3":
        return _sources(rows)
    if table == "5":
        methods = ("FedAvg", "+ norm", "+ FedMix", "+ FedRDN")
        return [
            (f"{label}, {method}", [number])
            for label, numbers in rows
            for method, number in zip(methods, numbers, strict=True)
        ]
    return rows


def _words(line: str) -> tuple[str, list[str]]:
    line = re.sub(r"\[\d+\]", "", line)
    match = re.search(r"(?<![\d-])\d+\.\d", line)
    if match is None:
        return line, []
    rest = line[match.start() :]
    rest = re.sub(r"\s0\.0\d{3}\b", "", rest)  # p-values
    numbers = re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", rest)
    return _clean(line[: match.start()]).replace(" (Ours)", ""), numbers


def _sources(rows: list[Row]) -> list[Row]:
    """Rows of a source, a target and a number a method, as rows of a source and a method."""
    rows_by_method: dict[str, list[str]] = {}
    source = ""
    for label, numbers in rows:
        *new, _target = label.split()
        source = new[0] if new else source
        for method, number in zip(("FedAvg", "+ norm", "+ FedMix", "+ FedRDN"), numbers, strict=True):
            rows_by_method.setdefault(f"{source}, {method}", []).append(number)
    return list(rows_by_method.items())


# --- FedFD-A: Markdown, parts of which were one cell ------------------------------------------------------


def _fedfd_a(text: str, table: str) -> list[Row]:
    lines = text.splitlines()
    (caption,) = (i for i, line in enumerate(lines) if re.match(rf"(\*\*)?Table {table}:", line))
    if table == "6":  # its first lines are captions of its own
        caption = next(i for i in range(caption, len(lines)) if lines[i].startswith("####"))
    block = _block(lines, caption, -1 if table in _CAPTION_BELOW else 1)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in block]
    cells = [row for row in cells if any(re.search(r"\d+\.\d", cell) for cell in row)]
    if table == "1":  # a method below the framework that it is put on
        frames, ours = ([_clean(cell) for cell in row if cell] for row in cells)
        names = [re.sub(r" [\d.]+$", "", frame) for frame in frames]
        numbers = re.findall(r"\d+\.\d+", " ".join(ours))
        return [(f"{name} + FedFD-A", [n]) for name, n in zip(names, numbers, strict=False)]
    if table == "3":
        return [row for part in cells for row in _merged(part)]
    return [row for line in cells for row in _side_by_side(line)]


_CAPTION_BELOW = ("1", "3", "4", "5", "10")


def _block(lines: list[str], caption: int, step: int) -> list[str]:
    """The lines of a table, which begins above or below its caption."""
    start = caption + step
    while not lines[start].startswith("|"):
        start += step
    end = start
    while lines[end].startswith("|"):
        end += step
    return lines[start:end] if step == 1 else lines[end + 1 : start + 1]


def _side_by_side(cells: list[str]) -> list[Row]:
    """The rows in a line of a table, or of two that are printed side by side: text begins a row."""
    label, rows = "", []
    begins = True
    for cell in cells:
        words = _clean(cell.replace("<br>", " "))
        if re.search(r"[A-Za-z]{2}|L2D|U\(", words):
            label = label if rows else words  # those of the table on the right are cut into pieces
            begins = True
        elif begins and (re.search(r"\d\.\d", words) or (label and not rows)):
            rows.append((label, []))
            begins = False
        if not begins:
            rows[-1][1].append(_number(cell))
    for _, numbers in rows:
        while numbers and not numbers[-1]:
            numbers.pop()
    return [row for row in rows if row[1]]


def _merged(cells: list[str]) -> list[Row]:
    """Table 3: the rows of each part lie one below the other in every cell."""
    part, augmentation, loss, inference, *values = (cell.split("<br>") for cell in cells)
    name = part[0].split()[0] if part[0] else ""
    count = len(values[0])
    (labels,) = [column for column in (inference, loss, augmentation) if len(column) == count][:1]
    return [
        (f"{name} {_clean(label)}", [_number(value[index]) for value in values])
        for index, label in enumerate(labels)
        if any(_number(value[index]) for value in values)
    ]


# --- FRAug: methods are columns ---------------------------------------------------------------------------


def _fraug(text: str, table: str) -> list[Row]:
    block = re.split(rf"\nTable {table}: ", text)[1]
    header, *lines = [line.split("\t") for line in block.split("\n\n")[1].splitlines()]
    rows: dict[str, list[str]] = {}
    data = ""
    for line in lines:
        data, site, *numbers = (line[0] or data, *line[1:])
        assert site, line
        methods = [name for name in header[1:] if name]
        for method, number in zip(methods, numbers, strict=True):
            rows.setdefault(f"{data}, {method}", []).append(_number(number))
    return list(rows.items())


_READERS = {"FedFA": _fedfa, "FedFA+": _fedfa_plus, "FedRDN": _fedrdn, "FedFD-A": _fedfd_a, "FRAug": _fraug}
