"""A package of somebody else, as an installer leaves it: one module, and what its metadata say."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def outside_package(tmp_path, monkeypatch) -> Iterator[Callable[..., Path]]:
    """Install a module: ``outside_package("quiet", source, {"medfedaug.methods": {"quiet": "Quiet"}})``."""
    modules: list[str] = []

    def install(module: str, source: str, entry_points: dict[str, dict[str, str]]) -> Path:
        site = tmp_path / f"site-{module}"
        metadata = site / f"{module}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        lines = []
        for group, names in entry_points.items():
            lines += [f"[{group}]", *(f"{name} = {module}:{plugin}" for name, plugin in names.items())]
        (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(site))
        modules.append(module)
        return site

    yield install
    for module in modules:
        sys.modules.pop(module, None)
