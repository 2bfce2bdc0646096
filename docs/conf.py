"""Sphinx configuration: `pip install -e '.[docs]' && sphinx-build docs build/html`."""

from medfedaug import __version__

project = "medfedaug"
copyright = "the medfedaug authors"
release = __version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "myst_parser"]
html_theme = "furo"
exclude_patterns = ["build"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
default_role = "code"
myst_heading_anchors = 3
