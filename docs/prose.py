"""Check the English of pages, docstrings, help texts and errors, and the length of pages.

python docs/prose.py                # every file that has more than its budget
python docs/prose.py --show FILE    # what is found in one file
python docs/prose.py --lower        # budgets down to today's numbers, and rows for new files

``prose.csv`` has the budget of each file: words and long sentences of a page, and findings. A finding is a
phrase of `PHRASES` or a first word of `OPENINGS`. A long sentence has more than `LONG` words; tables do not
count. A file without a row has no budget.
"""

import ast
import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "docs/prose.csv"
COLUMNS = ("words", "long sentences", "findings")
LONG = 30
_STEP = 100  # words, to which budgets are rounded up: a page may change
CODE = ("medfedaug", "models", "nvflare_jobs", "transforms")

# What slows a reader, and what a technical writer would write.
PHRASES = {
    r"\balone(?=[.,;:)]|$)": "only, before what it limits",
    r"\bof (?:it|these|them|those)(?=[.,;:)]|$)": "name the thing",
    r"\b(?:what is|what was) there\b": "name the thing",
    r"\bgoes? on\b": "continues",
    r"\bin (?:the )?place of\b": "instead of",
    r"\b(?:is|are|was|were|be|been) told\b": "receives, is informed, or an active sentence",
    r"\bedges of (?:a|the|its|their) voxels?\b": "voxel size",
    r"\bexchanged labels\b": "swapped labels",
    r"\bno more of (?:it|them)\b": "nothing else",
    r"\bwants? to be\b": "must be, or requires",
    r"\bhas not annotated\b": "without annotation",
    r"\bas it is named\b": "its name",
    r"\b(?:a|and|its|mean|small|the|their) deviations?\b": "standard deviation",
    r"\bedges of (?:(?:all|training) )*voxels\b": "voxel sizes",
    r"\b(?:are|is|keeps?|kept|tells?(?: \w+){1,3}|told) apart\b": "separate, or distinguish",
    r", (?:and )?(?:an?|one)\b[\w ]* was expected\b": "expected, and the thing",
    r"\bsomething else than\b": "something other than",
    r"\bcomes? about\b": "happens",
    r"\b(?:data|images?|numbers?) of (?:ours|yours)\b": "our, or your",
    r"\b(?:it|that|which) (?:is|are) no (?!longer|more|less|other|such|better|larger|smaller|wider)": "not a",
    r"\bnothing else of\b": "only, and name the thing",
    r"\bRefused are\b": "are refused, after the subject",
}
_PHRASE = re.compile("|".join(f"({pattern})" for pattern in PHRASES), re.IGNORECASE | re.MULTILINE)
# A docstring, help text or setting begins with a verb or a standard noun.
OPENINGS = {"What", "Whatever", "Whether", "That", "Those", "How", "Which", "Who", "Whoever", "Whom", "Whose"}
OPENINGS |= {"Where", "When", "Why", "Of", "Something"}


def pages() -> Iterator[Path]:
    """Yield the pages that users and developers read; results are records."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md"))
    for path in sorted((ROOT / "docs").rglob("*.md")):
        if "results" not in path.parts and not {"tutorials", "gallery"} & {path.parent.name}:
            yield path


def sources() -> Iterator[Path]:
    """Yield the files of the package."""
    for folder in CODE:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if not path.is_symlink())


def prose(page: str) -> str:
    """Return a page without code, comments and the addresses of links."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"<!--.*?-->|`[^`]*`", " ", page, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", page)


def long_sentences(page: str) -> list[str]:
    """Return the sentences of a page's paragraphs and lists with more than `LONG` words; code is one word."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    page = prose(re.sub(r"`[^`]+`", "Code", page))
    lines = (line for line in page.splitlines() if not line.lstrip().startswith(("|", "#", "!", ":::")))
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*>]|\d+\.)\s)", "\n".join(lines))
    found = []
    for block in blocks:
        parts = re.split(r"(?<=[.!?:;])\**\s+", " ".join(block.split()))
        found += [part for part in parts if len(part.split()) > LONG and "·" not in part]
    return found


def texts(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the docstrings and the longer texts of a module, each with a flag for those with a first word."""
    tree = ast.parse(source)
    documented = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    for node in documented:
        yield re.sub(r"`[^`]*`", " ", ast.get_docstring(node) or ""), True
    docstrings = {id(n.body[0].value) for n in documented if n.body and isinstance(n.body[0], ast.Expr)}
    opening = {
        id(value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        for value in (
            *(keyword.value for keyword in call.keywords if keyword.arg == "help"),
            *(call.args[1:2] if isinstance(call.func, ast.Name) and call.func.id == "setting" else ()),
        )
    }
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
        if isinstance(text, str) and (text.count(" ") > 2 or id(node) in opening):
            yield text, id(node) in opening


def findings(path: Path) -> list[str]:
    """List the phrases and openings in a file, with what to write instead."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return [_told(match) for match in _PHRASE.finditer(prose(content))]
    found = []
    for text, begins in texts(content):
        first = (text.split() or [""])[0].rstrip(",.:;")
        if begins and first in OPENINGS:
            found.append(f"{' '.join(text.split())[:60]!r} begins with {first}: begin with a verb or a noun")
        found += map(_told, _PHRASE.finditer(text))
    return found


def _told(match: re.Match[str]) -> str:
    around = " ".join(match.string[max(0, match.start() - 40) : match.end()].split())
    return f"...{around!r}: {[*PHRASES.values()][(match.lastindex or 1) - 1]}"


def measured() -> dict[str, tuple[int, int, int]]:
    """Return the words, the long sentences and the findings of every file; sources have only findings."""
    numbers = {}
    for path in (*pages(), *sources()):
        words = long = 0
        if path.suffix == ".md":
            content = path.read_text(encoding="utf-8")
            words, long = len(prose(content).split()), len(long_sentences(content))
        numbers[path.relative_to(ROOT).as_posix()] = words, long, len(findings(path))
    return numbers


def budgets() -> dict[str, list[int]]:
    """Return the budget of each file; a column that the file lacks limits nothing."""
    if not BUDGET.exists():
        return {}
    with BUDGET.open(newline="", encoding="utf-8") as file:
        return {
            row["file"]: [int(row.get(column, sys.maxsize)) for column in COLUMNS]
            for row in csv.DictReader(file)
        }


def main() -> int:
    """Compare with the budget."""
    if sys.argv[1:2] == ["--show"]:
        path = Path(sys.argv[2]).resolve()
        long = long_sentences(path.read_text(encoding="utf-8")) if path.suffix == ".md" else []
        print("\n".join([*findings(path), *(f"{len(part.split())} words: {part}" for part in long)]))
        return 0
    numbers, budget = measured(), budgets()
    if "--lower" in sys.argv:
        with BUDGET.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("file", *COLUMNS))
            for name, now in sorted(numbers.items()):
                rounded = -(-now[0] // _STEP) * _STEP, *now[1:]
                row = [min(pair) for pair in zip(rounded, budget.get(name, rounded), strict=True)]
                if any(row):
                    writer.writerow((name, *row))
        return 0
    wrong = []
    for name, now in numbers.items():
        for column, number, most in zip(COLUMNS, now, budget.get(name, [0] * len(COLUMNS)), strict=True):
            if number > most:
                wrong.append(f"{name}: {number} {column}, budget {most}: python docs/prose.py --show {name}")
    print("\n".join(wrong) or f"{len(numbers)} files within their budgets")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
