"""Generate files from the code; ``make catalogue`` runs it, and ``make lint`` with --check.

They are the lists of methods, the ready jobs, the tables of methods on three pages, and the picture of the
packages. Existing rows of `privacy/methods.md` stay; a new method gets its row
from its declarations.
"""

import ast
import re
import runpy
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METHODS = ("methods", "research/methods")
JOBS = "nvflare_jobs/jobs"
TABLE, SENT, WORDS = (ROOT / "docs" / page for page in ("catalogue.md", "privacy/methods.md", "methods.md"))
HEAD = '"""The methods that are built in; ``make catalogue`` writes this list from the files beside it."""'


def method_list(folder: Path) -> str:
    """Return the content of a folder's `catalogue.py`: an import of each class that declares a name."""
    package, lines = ".".join(folder.relative_to(ROOT).parts), []
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and any(map(_is_name, node.body)):
                lines.append(f"from {package}.{path.stem} import {node.name} as {node.name}")
    return "\n".join([HEAD, "", *lines, ""])


def _is_name(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "name" for target in targets)


def pages() -> dict[Path, str]:
    """Return the pages with tables of methods."""
    from medfedaug.cli.catalogue import describe_method
    from medfedaug.methods import base, registry

    texts = {path: path.read_text(encoding="utf-8") for path in (TABLE, SENT, WORDS)}
    rows = ["| name | effect | leaves a site besides the model |", "|---|---|---|"]
    for name in registry.BUILT_IN_NAMES:
        cls = registry.built_in_methods().get(name)
        times = "the same" if cls is None else _besides_the_model(cls)
        rows.append(f"| `{name}` | {describe_method(name).what.rstrip('.')} | {times} |")
        if not _has_row(texts[SENT], name):
            texts[SENT] = _with_rows(texts[SENT], [f"| `{name}` | what leaves | | {times} | |"])
    table = "\n".join(rows)
    texts[TABLE] = re.sub(
        r"(<!-- methods: .*? -->\n).*?(?=<!-- end -->)",
        lambda place: f"{place[1]}\n{table}\n\n",
        texts[TABLE],
        flags=re.DOTALL,
    )
    methods = [build() for build in registry.built_in_methods().values()]
    for word, meaning in base.WORDS.items():
        columns = [
            ", ".join(f"`{method.name}`" for method in methods if word in getattr(method, attribute))
            for attribute in ("requires", "provides", "excludes")
        ]
        row = f"| `{word}` | {meaning} | {' | '.join(columns)} |"
        if _has_row(texts[WORDS], word):
            (old,) = re.findall(rf"^\| `{word}` \|.*$", texts[WORDS], re.MULTILINE)
            texts[WORDS] = texts[WORDS].replace(old, row)
        else:
            texts[WORDS] = _with_rows(texts[WORDS], [row])
    return texts


def _besides_the_model(cls: Any) -> str:
    """Say when a method sends what besides the model."""
    from medfedaug.methods.base import Method

    if "separate_sites" in cls.excludes:
        return "the images themselves"
    hooks = {"local_entries": "less", "before_training": "once", "every_round": "every round"}
    sent = [word for hook, word in hooks.items() if getattr(cls, hook) is not getattr(Method, hook)]
    return "; ".join(sent) or "nothing"


def _has_row(page: str, name: str) -> bool:
    cells = re.findall(r"^\| (`[^|]*) \|", page, re.MULTILINE)
    return any(f"`{name}`" in cell for cell in cells)


def _with_rows(page: str, rows: Iterable[str]) -> str:
    """Add rows below the first table of a page whose rows begin with a name."""
    table = re.search(r"(?:^\| [^\n]*\n)*^\| `[^\n]*\n(?:^\| [^\n]*\n)*", page, re.MULTILINE)
    assert table is not None
    return page[: table.end()] + "".join(f"{row}\n" for row in rows) + page[table.end() :]


def main() -> int:
    """Write all files; with --check only list those that are out of date."""
    checked = "--check" in sys.argv
    folders = [ROOT / "medfedaug" / folder for folder in METHODS]
    stale = _write(
        {folder / "catalogue.py": method_list(folder) for folder in folders}, checked
    )  # others read it
    from ready_jobs import write_ready_jobs  # of this folder

    house: dict[str, Any] = runpy.run_path(str(ROOT / "docs/pictures/house.py"))
    picture = house["draw"](house["imports"](house["modules"]()))
    with tempfile.TemporaryDirectory() as folder:
        write_ready_jobs(Path(folder))
        jobs = {ROOT / JOBS / file.relative_to(folder): file.read_text() for file in files_in(Path(folder))}
    stale += _write({**pages(), **jobs, ROOT / "docs/pictures/house.svg": picture}, checked)
    print("\n".join(str(path.relative_to(ROOT)) for path in stale) or "all files are up to date")
    return bool(stale) and checked


def _write(texts: Mapping[Path, str], checked: bool) -> list[Path]:
    """Write the files that are out of date, or only return them."""
    texts = {
        path: text for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text
    }
    for path, text in () if checked else texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [*texts]


def files_in(folder: Path) -> list[Path]:
    """Return the files below a folder."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


if __name__ == "__main__":
    sys.exit(main())
