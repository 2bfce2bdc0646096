"""Sphinx configuration: `make docs` builds and checks the pages."""

import importlib
import os
import sys
import tempfile
from pathlib import Path

from medfedaug import __version__

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples/tutorials"))  # `shell`, which the tutorials share, and `archive`
sys.path.insert(0, str(ROOT / "docs"))

# The tutorials' commands are those of this environment, and leave cores to others.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import forked_commands  # noqa: E402
from archive import find_orthanc  # noqa: E402
from docutils import nodes  # noqa: E402
from docutils.parsers.rst import Directive  # noqa: E402
from docutils.statemachine import StringList  # noqa: E402

from medfedaug.config.options import settings_table  # noqa: E402
from medfedaug.utils.printable import plain  # noqa: E402

project = "medfedaug"
copyright = "the medfedaug authors"
release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "sphinx_gallery.gen_gallery"]
html_theme = "furo"
html_title = f"medfedaug {__version__}"
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["pages.css"]
exclude_patterns = ["build"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
default_role = "code"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

sphinx_gallery_conf = {
    "examples_dirs": ["../examples/tutorials", "../examples/gallery"],
    "gallery_dirs": ["tutorials", "gallery"],
    # Without Orthanc, the tutorial with a PACS has no output.
    "filename_pattern": r"/\w+\.py$" if find_orthanc() else r"/(?!07_pacs)\w+\.py$",
    "ignore_pattern": r"^(archive|shell)\.py$",
    "within_subsection_order": "FileNameSortKey",
    "parallel": os.cpu_count() or 1,  # with more, tutorials wait for each other
    "abort_on_example_error": True,  # a tutorial that fails is an error of the build
    "download_all_examples": False,
    "capture_repr": (),
    "show_signature": False,
    "min_reported_time": 3600,
    "write_computation_times": False,
    "matplotlib_animations": False,
}


def _escape_shapes(app, what, name, obj, options, lines):
    """Escape stars of shapes, as in (B, C, *spatial), which begin no emphasis."""
    lines[:] = [line.replace(r"\*spatial", "*spatial").replace("*spatial", r"\*spatial") for line in lines]


class SettingsTable(Directive):
    """Table of a class of settings, whose path is the argument."""

    required_arguments = 1

    def run(self):
        """Return the table."""
        module, _, name = self.arguments[0].rpartition(".")
        rows = settings_table(getattr(importlib.import_module(module), name))
        cells = ((f"`{setting}`", f"`{default or ' '}`", plain(text)) for setting, default, text in rows)
        lines = ["| setting | default | meaning |", "|---|---|---|"]
        lines += [
            "| " + " | ".join(cell.replace("|", "\\|").replace("*", "\\*") for cell in row) + " |"
            for row in cells
        ]
        container = nodes.container()
        self.state.nested_parse(StringList(lines), 0, container)
        return container.children


def _fork_commands(app, config):
    """Let the tutorials' commands share one import of PyTorch and MONAI, if tutorials run."""
    if sys.platform == "linux" and str(config.plot_gallery) not in ("0", "False"):
        app.commands_folder = tempfile.TemporaryDirectory(prefix="medfedaug-docs-")
        app.commands = forked_commands.start(Path(app.commands_folder.name))


def _end_commands(app, error):
    if hasattr(app, "commands"):
        app.commands.stdin.close()
        app.commands.wait()


def setup(app):
    """Connect the parts to Sphinx."""
    app.connect("config-inited", _fork_commands)
    app.connect("build-finished", _end_commands)
    app.add_directive("settings", SettingsTable)
    app.connect("autodoc-process-docstring", _escape_shapes)
