"""`make notebooks`: each tutorial as a notebook with the code of its script."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx_gallery", reason="of the extra `docs`")
TUTORIALS = Path(__file__).resolve().parents[2] / "examples/tutorials"
CONVERT = "from sphinx_gallery.notebook import python_to_jupyter_cli; python_to_jupyter_cli()"


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("notebooks")
    scripts = [shutil.copy(path, folder) for path in sorted(TUTORIALS.glob("[0-9]*.py"))]
    subprocess.run([sys.executable, "-c", CONVERT, *scripts], check=True, capture_output=True)
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.ipynb")}


@pytest.mark.parametrize("script", sorted(TUTORIALS.glob("[0-9]*.py")), ids=lambda path: path.stem)
def test_a_notebook_has_the_text_and_all_code_of_its_tutorial(notebooks, script):
    cells = notebooks[script.stem]["cells"]
    assert cells[0]["cell_type"] == "markdown"
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    tree = ast.parse(script.read_text(encoding="utf-8"))
    del tree.body[0]  # the docstring is the first cell
    assert ast.dump(ast.parse(code.replace("%matplotlib inline", ""))) == ast.dump(tree)
