"""A release: one version everywhere, its wheel by address, pages by version."""

import datetime
import importlib.util
import json
import shutil
from pathlib import Path

import pytest

import medfedaug

ROOT = Path(__file__).resolve().parents[2]


def script(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RELEASE, PUBLISH = script("deploy/release.py"), script("docs/publish.py")


@pytest.fixture
def repository(tmp_path) -> Path:
    """A copy of the files that a release changes."""
    for name in ("CHANGELOG.md", "CITATION.cff", "SECURITY.md", "medfedaug/_version.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_the_next_version_is_written_at_each_of_its_places(repository):
    newest = "## Unreleased\n\n- A fault of this test is gone.\n"
    (repository / "CHANGELOG.md").write_text(f"# Changes\n\n{newest}\n## 9.8.6 (2029-01-01)\n\n- Old.\n")
    RELEASE.set_version("9.8.7", repository, datetime.date(2030, 1, 2))
    assert "## 9.8.7 (2030-01-02)\n\n- A" in (repository / "CHANGELOG.md").read_text()
    assert '"9.8.7"' in (repository / "medfedaug/_version.py").read_text()
    assert "version: 9.8.7\ndate-released: 2030-01-02\n" in (repository / "CITATION.cff").read_text()
    assert "(9.8 today)" in (repository / "SECURITY.md").read_text()
    RELEASE.notes(repository / "notes.md", repository)
    assert (repository / "notes.md").read_text().strip() == newest.replace(
        "Unreleased", "9.8.7 (2030-01-02)"
    ).strip()


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
        versions = PUBLISH.publish(html, pages, version)
    assert versions == ["0.10.0", "0.9.0", "dev"] == json.loads((pages / "versions.json").read_text())
    assert "url=0.10.0/" in (pages / "index.html").read_text()
    assert (pages / "0.9.0/index.html").is_file()
    assert (pages / ".nojekyll").is_file()
