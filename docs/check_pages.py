"""Check the pages: links have targets, named files and options exist, and no public name is missing.

python docs/check_pages.py               # the sources of the pages
python docs/check_pages.py build/html    # and the built pages

The script fetches nothing, and skips addresses of other sites.
"""

import ast
import importlib
import json
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import yaml
from typer.main import get_command

import medfedaug
from medfedaug.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
MADE = {"tutorials", "gallery"}  # by `make docs`, from the scripts in `examples`
_NAMED = re.compile(
    r"`((?:medfedaug|models|transforms|nvflare_jobs|tests|docs|benchmarks|deploy|examples)/[\w/.-]*?)(?::([\w.]+))?`"
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

# Modules at the top of the package that only serve earlier names.
INTERNAL = {"finished"}
# Packages of commands, and of parts for other packages.
INTERNAL_PACKAGES = {"cli", "experiments", "data", "utils"}


class _Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value:
                self.targets.append(value)


def broken_links(root: Path) -> list[str]:
    """List the links, pictures and other files of the pages below ``root`` that do not exist."""
    pages = {path.resolve(): _Page(path) for path in sorted(root.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            anchor = unquote(parts.fragment)
            lost = anchor and file in pages and anchor not in pages[file].anchors
            if not file.exists() or lost:
                broken.append(f"{path.relative_to(root.resolve())}: {target}")
    return broken


def public_names() -> set[str]:
    """Return the names in ``__all__`` of the packages and modules for users."""
    names = set()
    parts = {module.name for module in pkgutil.iter_modules(medfedaug.__path__)}
    for part in parts - INTERNAL - INTERNAL_PACKAGES:
        if not part.startswith("_"):
            module = importlib.import_module(f"medfedaug.{part}")
            names |= {f"{module.__name__}.{name}" for name in getattr(module, "__all__", ())}
    return names


def documented_names(root: Path) -> set[str]:
    """Return the names in Sphinx's inventory of the pages."""
    from sphinx.util.inventory import InventoryFile

    content = (root / "objects.inv").read_bytes()
    inventory = InventoryFile.loads(content, uri="").data
    return {name for domain, entries in inventory.items() if domain.startswith("py:") for name in entries}


def missing_names(root: Path) -> list[str]:
    """Return the public names that no page describes, under their public or their defining module."""
    documented = documented_names(root)
    lacking = public_names() - documented
    return sorted(
        name
        for name in lacking
        if not any(
            _named(other) is _named(name)
            for other in documented
            if other.rpartition(".")[2] == name.rpartition(".")[2]
        )
    )


def _named(name: str) -> object:
    """Return the object of a dotted name; for an attribute of a class, the name itself."""
    module, _, own = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), own)
    except (ImportError, AttributeError):
        return name


def source_mistakes() -> Iterator[str]:
    """Yield the files, functions and options that pages name and nobody has, and data that cannot be read."""
    for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "examples/README.md"]):
        name, text = page.relative_to(ROOT), page.read_text(encoding="utf-8")
        if MADE & {page.parent.name} or page.name == "CHANGELOG.md":
            continue
        plain = _FENCE.sub("", text)
        for target in _LINK.findall(plain):
            file = target.partition("#")[0]
            made = MADE & {Path(file).parent.name}
            if file and not re.match(r"[a-z]+:", file) and not made and not (page.parent / file).exists():
                yield f"{name}: leads nowhere: {target}"
        for path, own in _NAMED.findall(plain):
            if Path(path).suffix in (".json", ".pt", ".ts"):  # of a run or a Bundle
                continue
            if not (ROOT / path).exists():
                yield f"{name}: no file {path}"
            elif own and not _defined(ast.parse((ROOT / path).read_text(encoding="utf-8")), own):
                yield f"{name}: {path} has no {own}"
        yield from (f"{name}: asks an index, where no medfedaug is ours: {line}" for line in _asking(text))
        for language, block in _FENCE.findall(text):
            yield from (f"{name}: {mistake}" for mistake in _block_mistakes(language, block))


def _asking(text: str) -> list[str]:
    lines = re.findall(r"pip install [^\n`]*(?<= )'?medfedaug(?=[ =<>~'`\"\n])[^\n]*", text)
    return [line for line in lines if "--no-index" not in line and " @ http" not in line]


def _defined(tree: ast.AST, name: str) -> bool:
    first, _, rest = name.partition(".")
    nodes = [n for n in getattr(tree, "body", ()) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return any(node.name == first and (not rest or _defined(node, rest)) for node in nodes)


def _block_mistakes(language: str, block: str) -> Iterator[str]:
    if language in ("json", "yaml"):
        try:
            (json.loads if language == "json" else yaml.safe_load)(block)
        except (ValueError, yaml.YAMLError) as error:
            yield f"{language} that cannot be read: {error}"
    elif language in ("bash", "console"):
        if language == "console":  # commands with their output
            block = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.M))
        for line in re.sub(r"<<.*?^END$", "", block, flags=re.M | re.S).replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            command = get_command(app)
            rest = words[words.index("medfedaug") + 1 :] if "medfedaug" in words else []
            while rest and rest[0] in getattr(command, "commands", {}):
                command = command.commands[rest.pop(0)]
            if rest and hasattr(command, "commands") and re.fullmatch("[a-z][a-z-]*", rest[0]):
                yield f"{command.name} has no command {rest[0]}"
            known = {
                text for parameter in command.params for text in (*parameter.opts, *parameter.secondary_opts)
            }
            for word in rest if rest and command.name != "medfedaug" else ():
                option = word.partition("=")[0]
                if option.startswith("--") and option not in known | {"--help", "--"}:
                    yield f"medfedaug {command.name} has no option {option}"


def main() -> int:
    """Print the mistakes."""
    wrong = [*source_mistakes()]
    for root in map(Path, sys.argv[1:]):
        wrong += [f"leads nowhere: {link}" for link in broken_links(root)]
        wrong += [f"not in the reference (docs/api): {name}" for name in missing_names(root)]
    print("\n".join(wrong) or "all links have a target, and all files, options and public names are right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
