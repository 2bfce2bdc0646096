"""The application that the commands join, and its entry point."""

import atexit
import gc
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import TracebackType
from typing import Annotated

import typer
from typer import Option

from medfedaug._version import __version__
from medfedaug.cli.console import say
from medfedaug.errors import MedFedAugError, warnings_to
from medfedaug.utils.printable import printable_lines

app = typer.Typer(
    name="medfedaug",
    help="Train one network across hospitals whose scanners differ, without pooling their images.\n\n"
    "Begin with demo. For your own data the order is init, inspect, compare and, for volumes, plan.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command; print errors that a user can fix as one line, with exit code 2."""
    sys.excepthook = _show_traceback
    atexit.register(_end_quickly)
    try:
        with warnings_to(_show_warning), _ends_on_signals():
            _command()()
    except MedFedAugError as error:
        say(f"medfedaug: {error}", "red", err=True)
        raise SystemExit(2) from error
    except OSError as error:
        if error.filename is None:  # an error without a file of the user
            raise
        say(f"medfedaug: {error.filename}: {error.strerror}", "red", err=True)
        raise SystemExit(2) from error


def _end_quickly() -> None:
    """Leave all memory to the system: Python would look for garbage for over a second when it ends."""
    if "triton" in sys.modules:  # it would report its objects as leaks
        gc.unfreeze()
    else:
        gc.freeze()


@cache
def _command() -> Callable[[], None]:
    """Build the command with all options, read from the functions in a fifth of a second."""
    return typer.main.get_command(app)


@contextmanager
def _ends_on_signals() -> Iterator[None]:
    """End on SIGTERM and SIGHUP as on an interrupt, without stray processes and partial files."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # other threads cannot set handlers
        yield
        return
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _show_warning(text: str) -> None:
    say(f"medfedaug: warning: {text}", "yellow", err=True)


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback of an internal error; its text may contain text from outside."""
    text = "".join(traceback.format_exception(kind, error, trace))
    sys.stderr.write(printable_lines(text.rstrip("\n"), "    ") + "\n")


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


_BEGINNING = """\
medfedaug trains one network across hospitals whose scanners differ, without pooling their images.
It serves hospitals that join a federation, researchers, and users of MONAI.

To begin:
  medfedaug demo                  see the harm of one odd scanner, and a remedy, in two minutes
  medfedaug inspect --data DIR    look at your own images first: one folder for each hospital
  medfedaug compare --data DIR    then measure what training together, and each remedy, would bring

All commands: medfedaug --help. Research software, not a medical device."""


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(_BEGINNING)
