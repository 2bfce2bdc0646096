"""Blocks of code on the pages: all run, but for those whose page says why not."""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from subprocess import CalledProcessError

import pytest
import yaml
from page_blocks import ROOT, blocks, carry_out, commands, run_python, run_shell, shell
from typer.main import get_command

import medfedaug
from medfedaug.cli.app import app
from medfedaug.data.datasets.phantom import make_phantom

# Results are records of commands that took hours, on data that are elsewhere.
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(
        str(page.relative_to(ROOT))
        for page in (ROOT / "docs").rglob("*.md")
        if "results" not in page.parts and page.name != "benchmarks.md"
    ),
]
CODE = ("bash", "python")
KNOWN = get_command(app).commands
ELSEWHERE = {"docs/pipelines.md", "docs/plans.md", "docs/use.md"}
"""Pages whose blocks run in a test of their own, which looks at the files too."""
RUN = [
    page for page in PAGES if page not in ELSEWHERE and not all(block.kind for block in blocks(page, *CODE))
]
LINE = "medfedaug simulate --data data --methods {0} --out runs/{0}\n"
BEFORE = {
    "README.md": "medfedaug statistics --data data --out statistics.json\nrm -r data",
    "docs/index.md": "medfedaug statistics --data data --out statistics.json",
    "docs/analysis.md": LINE.format("fedrdn") + LINE.format("fedavg").replace("runs", "runs/office"),
    "docs/data.md": "cp -r data/site_A hospital-a\nrm hospital-a/dataset.json",
    "docs/evaluation.md": LINE.format("ditto") + LINE.format("single"),
}
"""Commands that a reader of the page has given before, on another page."""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """Two sites under the names that pages give to a folder of sites, and images of new patients."""
    folder = tmp_path_factory.mktemp("small")
    make_phantom(folder / "data", sites=2, patients=3, shape=(32, 32, 6), seed=0)
    for name in ("DATA", "DIR", "hospitals"):
        (folder / name).symlink_to("data")
    (folder / "new").mkdir()
    for name, file in zip(("patient", "other"), sorted(folder.glob("data/site_B/images/*")), strict=False):
        shutil.copy(file, folder / f"new/{name}.nii.gz")
    return folder


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page, small, request, tmp_path, monkeypatch):
    if re.search(r"--kit|ledger", shell(page)):
        tmp_path = request.getfixturevalue("kits")
    shutil.copytree(small, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "yaml"):  # an experiment's file, which the page names in its first line
        if name := re.match(r"# (\w+\.yml)\n", block.text):
            Path(name[1]).write_text(re.sub("^folds: 5\n", "", block.text, flags=re.M))
    run_shell(BEFORE.get(page, ""), monkeypatch)
    carry_out(page, monkeypatch)


def test_a_block_that_fails_is_an_error(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: no -->\n```python\n1 / 0\n```\n\n1. In a list:\n\n   ```python\n   one = 1\n   ```\n"
    )
    carry_out(page, monkeypatch)
    assert [(block.kind, block.text) for block in blocks(page)] == [("not run", "1 / 0\n"), ("", "one = 1\n")]
    for wrong in (
        "```python\n1 / 0\n```",
        "```bash\nmedfedaug simulate --dta data\n```",
        "```bash\nfalse\n```",
    ):
        page.write_text(wrong)
        with pytest.raises((ZeroDivisionError, AssertionError, CalledProcessError)):
            carry_out(page, monkeypatch)


def test_blocks_that_are_not_run_are_few_and_say_why():
    """A new one is entered here."""
    left_out: dict[str, int] = {}
    for page in PAGES:
        for block in blocks(page, *CODE):
            if block.kind == "run by":
                test = (ROOT / block.remark).read_text(encoding="utf-8")
                test += "".join(
                    (ROOT / f"tests/support/{name}.py").read_text(encoding="utf-8")
                    for name in re.findall(r"^from (\w+) import", test, re.M)
                    if (ROOT / f"tests/support/{name}.py").exists()
                )
                assert Path(page).name in test or f'"{Path(page).stem}' in test, (page, block.line)
            elif block.kind:
                assert len(block.remark.split()) > 1, (page, block.line)
                left_out[page] = left_out.get(page, 0) + 1
    assert left_out == {
        "README.md": 5,
        "CONTRIBUTING.md": 1,
        "docs/containers.md": 4,
        "docs/deploy.md": 16,
        "docs/howto/certificates.md": 3,
        "docs/howto/import.md": 2,
        "docs/howto/nnunet.md": 3,
        "docs/howto/partial_labels.md": 1,
        "docs/howto/store.md": 1,
        "docs/howto/sweep.md": 2,
        "docs/index.md": 1,
        "docs/offline.md": 4,
        "docs/papers.md": 2,
        "docs/pipelines.md": 4,
        "docs/releasing.md": 3,
        "docs/use.md": 1,
    }


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_have_their_options(page):
    """Those that are not run, too."""
    for block in blocks(page, "bash"):
        for words in commands(re.sub(r"<<.*?^END$", "", block.text, flags=re.M | re.S)):
            (_, *rest) = words[words.index("medfedaug") :] if "medfedaug" in words else ("",)
            if rest and rest[0] in KNOWN:
                options = {
                    text
                    for parameter in KNOWN[rest[0]].params
                    for text in (*parameter.opts, *parameter.secondary_opts)
                }
                given = {word.partition("=")[0] for word in rest if word.startswith("--")}
                assert given <= options | {"--help"}, words


@pytest.mark.parametrize("page", PAGES)
def test_data_on_a_page_can_be_read(page):
    for block in blocks(page, "json", "yaml"):
        read = json.loads if block.language == "json" else yaml.safe_load
        read(block.text)


def test_examples_of_docstrings_without_prompt_run(small, tmp_path, monkeypatch):
    """In the order of a script: a run, and the run that is opened again."""
    shutil.copytree(small, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for thing in (medfedaug, medfedaug.load_run):
        (example,) = re.findall(r"::\n\n((?:    .*\n|\n)+)", f"{inspect.getdoc(thing)}\n\n")
        run_python(inspect.cleandoc(example), {}, monkeypatch)
    assert inspect.cleandoc(example).splitlines()[0] in str(inspect.getdoc(medfedaug.simulate))
