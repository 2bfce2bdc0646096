"""The ``medfedaug`` command: parse, call, print.

Commands import large packages themselves, so that ``medfedaug --help`` answers at once.
"""

from medfedaug.cli.app import app, main, register
from medfedaug.cli.console import err_console, out_console

__all__ = ["app", "err_console", "main", "out_console"]

register(app)
