"""A release: changes in files of their own, one version everywhere, pages by version."""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import medfedaug

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("summary", "upgrade", "security", "added", "changed", "fixed", "deprecated", "removed")


def script(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RELEASE, PUBLISH = script("changes/release.py"), script("docs/publish.py")


@pytest.fixture
def repository(tmp_path) -> Path:
    """A copy of the files that a release changes."""
    for name in ("CHANGELOG.md", "CITATION.cff", "SECURITY.md", "pyproject.toml", "medfedaug/_version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "changes", tmp_path / "changes", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def fragments() -> list[Path]:
    others = {"README.md", "template.md", "release.py"}
    return [path for path in (ROOT / "changes").iterdir() if path.is_file() and path.name not in others]


def test_each_change_is_one_line_under_a_kind():
    for path in fragments():
        assert re.fullmatch(rf"[\w+-]+\.({'|'.join(KINDS)})\.md", path.name), path.name
        for line in path.read_text(encoding="utf-8").splitlines():
            assert re.match(r"(-|\d+\.) \S", line), f"{path.name}: {line[:60]}"
            assert len(line) <= 300, f"{path.name}: {line[:60]}"


def test_one_command_makes_the_next_version_and_loses_no_line(repository):
    expected = [line for path in fragments() for line in path.read_text(encoding="utf-8").splitlines()]
    before = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    collected = RELEASE.collect(repository)
    expected += [line for path in collected for line in path.read_text(encoding="utf-8").splitlines()]
    (repository / "changes/one.fixed.md").write_text("- A fault of this test is gone.\n")
    build = [
        sys.executable,
        "-m",
        "towncrier",
        "build",
        "--yes",
        "--version",
        "9.8.7",
        "--dir",
        str(repository),
    ]
    subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
    subprocess.run(build, cwd=repository, check=True, capture_output=True)
    RELEASE.set_version("9.8.7", repository, datetime.date(2030, 1, 2))

    after = (repository / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## Unreleased" not in after
    newest = re.split(r"(?m)^(?=## \d)", after)[1]
    assert newest.startswith("## 9.8.7 (")
    assert set(expected) | {"- A fault of this test is gone."} <= set(newest.splitlines())
    assert after.endswith(before[before.index("## 0.2.0") :]), "earlier versions are as they were"
    assert not list((repository / "changes").glob("*.*.md"))
    assert '"9.8.7"' in (repository / "medfedaug/_version.py").read_text()
    assert "version: 9.8.7\n" in (repository / "CITATION.cff").read_text()
    assert "(9.8 today)" in (repository / "SECURITY.md").read_text()
    RELEASE.notes(repository / "notes.md", repository)
    assert (repository / "notes.md").read_text(encoding="utf-8").strip() == newest.strip()


def test_entries_under_unreleased_become_a_file_for_each_kind(repository):
    head = "# Changes\n\n<!-- versions -->\n\n"
    entries = "## Unreleased\n\n### Fixed\n\n- One\n  fault.\n\n### Fixed\n- Two.\n"
    (repository / "CHANGELOG.md").write_text(f"{head}{entries}\n## 0.2.0 (2026)\n\n- Old.\n")
    (path,) = RELEASE.collect(repository)
    assert path.name == "unreleased.fixed.md"
    assert path.read_text() == "- One fault.\n- Two.\n"
    assert (repository / "CHANGELOG.md").read_text() == f"{head}## 0.2.0 (2026)\n\n- Old.\n"
    assert RELEASE.collect(repository) == []


def test_files_say_the_version_of_the_package():
    assert f"version: {medfedaug.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"({'.'.join(medfedaug.__version__.split('.')[:2])} today)" in (ROOT / "SECURITY.md").read_text()
    with pytest.raises(SystemExit, match="is not a version"):
        RELEASE.set_version("3")


def test_pages_of_all_versions_stay_and_the_newest_is_the_first(tmp_path):
    html, pages = tmp_path / "html", tmp_path / "pages"
    for folder in (html / "_static", pages):
        folder.mkdir(parents=True)
    (html / "index.html").write_text("pages")
    for version in ("dev", "0.9.0", "0.10.0"):
        found = PUBLISH.publish(html, pages, version)
    assert found == ["0.10.0", "0.9.0", "dev"] == json.loads((pages / "versions.json").read_text())
    assert "url=0.10.0/" in (pages / "index.html").read_text()
    assert (pages / "0.9.0/index.html").is_file()
    assert (pages / ".nojekyll").is_file()
