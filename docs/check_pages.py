"""Checks the pages that Sphinx built: every link within them leads somewhere, and no public name is missing.

python docs/check_pages.py build/html

Nothing is fetched: addresses of other sites are left alone.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import medfedaug

# Modules at the top of the package that only serve earlier names.
INTERNAL = {"finished"}
# Packages whose names are commands, or the means of others.
INTERNAL_PACKAGES = {"cli", "experiments", "data", "utils"}


class _Page(HTMLParser):
    """The anchors of a page, and where it leads to."""

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
    """Links, pictures and other files that the pages below ``root`` name and that are not there."""
    pages = {path.resolve(): _Page(path) for path in sorted(root.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            anchor = unquote(parts.fragment)
            lost = anchor and there in pages and anchor not in pages[there].anchors
            if not there.exists() or lost:
                found.append(f"{path.relative_to(root.resolve())}: {target}")
    return found


def public_names() -> set[str]:
    """What a user may import: the names in ``__all__`` of the packages and of the modules beside them."""
    names = set()
    beside = {found.name for found in pkgutil.iter_modules(medfedaug.__path__)}
    for part in beside - INTERNAL - INTERNAL_PACKAGES:
        if not part.startswith("_"):
            module = importlib.import_module(f"medfedaug.{part}")
            names |= {f"{module.__name__}.{name}" for name in getattr(module, "__all__", ())}
    return names


def documented_names(root: Path) -> set[str]:
    """The names in Sphinx's inventory of what the pages describe."""
    from sphinx.util.inventory import InventoryFile

    content = (root / "objects.inv").read_bytes()
    inventory = InventoryFile.loads(content, uri="").data
    return {name for domain, entries in inventory.items() if domain.startswith("py:") for name in entries}


def missing_names(root: Path) -> list[str]:
    """Public names that no page describes, neither where they are exported nor where they are defined."""
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
    """What a dotted name stands for; of an attribute of a class, the name itself."""
    module, _, own = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), own)
    except (ImportError, AttributeError):
        return name


def main() -> int:
    """Print what is wrong."""
    root = Path(sys.argv[1])
    wrong = [f"leads nowhere: {link}" for link in broken_links(root)]
    wrong += [f"not in the reference (docs/api): {name}" for name in missing_names(root)]
    print("\n".join(wrong) or "all links within the pages lead somewhere, and every public name is described")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
