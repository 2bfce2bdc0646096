"""Check the built pages: every link within them has a target, and no public name is missing.

python docs/check_pages.py build/html

The script fetches nothing, and skips addresses of other sites.
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


def main() -> int:
    """Print the mistakes."""
    root = Path(sys.argv[1])
    wrong = [f"leads nowhere: {link}" for link in broken_links(root)]
    wrong += [f"not in the reference (docs/api): {name}" for name in missing_names(root)]
    print("\n".join(wrong) or "all links within the pages have a target, and every public name is described")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
