"""Blocks of code on the pages: all run, but for those whose page says why not."""

import inspect
import re
import shutil
from pathlib import Path

import pytest
from page_blocks import ROOT, blocks, carry_out, run_python, run_shell, shell

import medfedaug
from medfedaug.data.phantom import make_phantom

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
ELSEWHERE = {f"docs/{page}.md" for page in ("pipelines", "plans", "use", "dicom", "bundle", "card")}
"""Pages whose blocks run in a test of their own, which looks at the files too."""
RUN = [
    page for page in PAGES if page not in ELSEWHERE and not all(block.kind for block in blocks(page, *CODE))
]
LINE = "medfedaug simulate --data data --methods {0} --out runs/{0}\n"
BEFORE = {
    "README.md": "rm -r data",
    "docs/analysis.md": LINE.format("fedrdn") + LINE.format("fedavg").replace("runs", "runs/office"),
    "docs/calibrate.md": LINE.format("fedrdn"),
    "docs/howto/data.md": "cp -r data/site_A hospital-a\nrm hospital-a/dataset.json",
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
    if re.search(r"medfedaug site ", shell(page)):
        tmp_path = request.getfixturevalue("kits")
    shutil.copytree(small, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "yaml"):  # an experiment's file, which the page names in its first line
        if name := re.match(r"# (\w+\.yml)\n", block.text):
            Path(name[1]).write_text(re.sub("^folds: 5\n", "", block.text, flags=re.M))
    run_shell(BEFORE.get(page, ""), monkeypatch)
    carry_out(page, monkeypatch)


def test_examples_of_docstrings_without_prompt_run(small, tmp_path, monkeypatch):
    """In the order of a script: a run, and the run that is opened again."""
    shutil.copytree(small, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for thing in (medfedaug, medfedaug.load_run):
        (example,) = re.findall(r"::\n\n((?:    .*\n|\n)+)", f"{inspect.getdoc(thing)}\n\n")
        run_python(inspect.cleandoc(example), {}, monkeypatch)
    assert inspect.cleandoc(example).splitlines()[0] in str(inspect.getdoc(medfedaug.simulate))
