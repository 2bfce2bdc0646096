"""The application, its entry point, and the list of all commands with their registration.

A command belongs to a layer of the package, and a copy without that layer has no such command. Its panel in
``medfedaug --help`` says who uses it.
"""

import atexit
import functools
import gc
import inspect
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Annotated, Any, NamedTuple

import typer
from typer import Option
from typer.core import TyperCommand

from medfedaug._version import __version__
from medfedaug.cli.console import say
from medfedaug.errors import ConfigError, MedFedAugError, warnings_to
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
    except (MedFedAugError, OSError) as error:
        text = str(error)
        if isinstance(error, OSError):
            if error.filename is None:  # an error without a file of the user
                raise
            text = f"{error.filename}: {error.strerror}"
        say(f"medfedaug: {text}", "red", err=True)
        raise SystemExit(2) from error


def _end_quickly() -> None:
    """Leave all memory to the system: Python would look for garbage for over a second when it ends."""
    gc.freeze()
    if "triton" in sys.modules:  # it would report its objects as leaks
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


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


class Entry(NamedTuple):
    """A command.

    Args:
        layer: the layer of `LAYERS` that brings it.
        function: its module below `medfedaug.cli`, and its name there.
        example: an example, which begins with the command's name, or with those of its group and its own.
        in_a_row: whether its repeatable options take several values in a row.
    """

    layer: str
    function: str
    example: str
    in_a_row: bool = False


LAYERS = {"core": "medfedaug.config", "hospital": "medfedaug.hospital", "research": "medfedaug.research"}
"""A package of each layer, by which the layer is found."""

GROUPS = {
    "site": "Run a hospital's site, or the server: commands for an NVFlare kit (KIT).",
    "enrol": "Enrol a participant, whose private key stays there: a command on each side, and a call.",
}
"""The text of each group of commands."""

COMMANDS: dict[str, tuple[Entry, ...]] = {
    "For researchers: methods on one machine": (
        Entry("core", "demo:demo", "demo --out demo --seed 1 --json demo.json"),
        Entry("core", "catalogue:methods", "methods fedrdn"),
        Entry("core", "catalogue:networks", "networks dynunet"),
        Entry("research", "catalogue:datasets", "datasets prostate_mri"),
        Entry("core", "data:phantom", "phantom --out hospitals --sites 3"),
        Entry("core", "data:statistics", "statistics --data data/site_A --out statistics.json"),
        Entry("core", "data:plan", "plan --data data --out plan.json"),
        Entry("core", "run:simulate", "simulate --data data --methods fedrdn --out runs/fedrdn"),
        Entry(
            "research",
            "benchmark:benchmark",
            "benchmark --data data --methods fedavg fedrdn --out runs",
            in_a_row=True,
        ),
        Entry("core", "finished:evaluate", "evaluate --model runs/fedrdn --data data"),
        Entry("core", "finished:report", "report runs/* --reference fedrdn"),
        Entry("core", "finished:clean", "clean runs"),
    ),
    "For hospitals: own images, and a site of a federation": (
        Entry("hospital", "archive:import_", "import --folder dicom --studies studies.csv --out site_A"),
        Entry("core", "data:init", "init data/site_A"),
        Entry("research", "data:inspect", "inspect --data data"),
        Entry(
            "research",
            "benchmark:compare",
            "compare --data data --methods fedrdn ditto --budget 10min",
            in_a_row=True,
        ),
        Entry("core", "finished:predict", "predict --model runs/fedrdn --images new --out predicted"),
        Entry("hospital", "archive:predict", "predict --model runs/fedrdn --images new --out predicted"),
        Entry("hospital", "assurance:calibrate", "calibrate runs/fedrdn --data data/site_A --miss 0.1"),
        Entry("hospital", "assurance:monitor", "monitor runs/fedrdn --data june --out watched"),
        Entry("hospital", "site:configure", "site configure hospital-a --data images --min-images 20"),
        Entry("hospital", "site:start", "site start hospital-a"),
        Entry("hospital", "site:stop", "site stop hospital-a"),
        Entry("hospital", "site:restart", "site restart hospital-a"),
        Entry("hospital", "site:doctor", "site doctor hospital-a"),
        Entry("hospital", "site:jobs", "site jobs hospital-a"),
        Entry("hospital", "site:approve", "site approve hospital-a 1f3c"),
        Entry("hospital", "site:ledger", "site ledger hospital-a"),
        Entry("hospital", "watch:watch", "site watch hospital-a"),
        Entry("hospital", "site:clean", "site clean hospital-a --older-than 30"),
    ),
    "For the lead of a federation": (
        Entry("hospital", "enrol:project", "enrol project --own-keys project"),
        Entry("hospital", "enrol:request", "enrol request hospital-a"),
        Entry("hospital", "enrol:sign", "enrol sign hospital-a.request.zip --project project"),
        Entry("hospital", "enrol:accept", "enrol accept hospital-a.signed.zip"),
        Entry("hospital", "run:export", "export --methods fedrdn --rounds 50 --out jobs/fedrdn"),
        Entry("core", "finished:bundle", "bundle runs/fedrdn --out bundle --site site_A"),
    ),
}
"""All commands, by the panels of ``medfedaug --help``."""


def has_layer(name: str) -> bool:
    """Return whether this copy of the package has a layer."""
    return find_spec(LAYERS[name]) is not None


def register(app: typer.Typer) -> None:
    """Add the commands of the layers that this copy has; of two entries with a name the later one counts."""
    layers = [*filter(has_layer, LAYERS)]
    found: dict[tuple[str, str], tuple[str, Entry]] = {}
    for panel, entries in COMMANDS.items():
        for entry in entries:
            first, second, *_ = f"{entry.example} -".split()
            if entry.layer in layers:
                found[(first, second) if first in GROUPS else ("", first)] = panel, entry
    groups = {"": app}
    for (group, name), (panel, entry) in found.items():
        if group not in groups:
            groups[group] = typer.Typer(no_args_is_help=True, epilog=f"Example: medfedaug {entry.example}")
            app.add_typer(groups[group], name=group, help=GROUPS[group], rich_help_panel=panel)
        _add(groups[group], name, entry, None if group else panel)


def _add(app: typer.Typer, name: str, entry: Entry, panel: str | None) -> None:
    module, _, function = entry.function.partition(":")
    command: Callable[..., None] = getattr(import_module(f"medfedaug.cli.{module}"), function)
    app.command(
        name,
        cls=ValuesInARow if entry.in_a_row else None,
        rich_help_panel=panel,
        epilog=f"Example: medfedaug {entry.example}",
        # Without the breaks of source lines, which Typer keeps in all paragraphs but the first.
        help=re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(command) or ""),
    )(with_help_all(command))


class ValuesInARow(TyperCommand):
    """A command whose repeatable options also take several values in a row: ``--methods fedavg fedrdn``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        repeatable = {name for p in self.params if getattr(p, "multiple", False) for name in p.opts}
        repeated: list[str] = []
        option, values = "", 0
        for arg, following in zip(args, [*args[1:], "--"], strict=True):
            if arg in repeatable and following.startswith("--"):
                raise ConfigError(f"{arg} needs a value, or several in a row")
            if arg.startswith("--"):
                name, with_value, _ = arg.partition("=")
                option, values = name if name in repeatable else "", len(with_value)
            else:
                repeated += [option] if option and values else []
                values += 1
            repeated.append(arg)
        return super().parse_args(ctx, repeated)


def with_help_all(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option ``--help-all``, which shows the rare options too; ``--help`` leaves them out."""
    signature = inspect.signature(command, eval_str=True)
    options = [
        one for p in signature.parameters.values() for one in getattr(p.annotation, "__metadata__", ())
    ]
    rare = sum(option.hidden for option in options)
    also = ", which --config takes as well" if "config" in signature.parameters else ""

    def show(context: typer.Context, shown: bool) -> None:
        if not shown:
            return
        parameters: list[Any] = context.command.params
        hidden = [p for p in parameters if getattr(p, "hidden", False) and p.name != "help_all"]
        for parameter in hidden:
            parameter.hidden = False
        typer.echo(context.get_help())
        for parameter in hidden:
            parameter.hidden = True
        raise typer.Exit

    @functools.wraps(command)
    def call(*args: Any, help_all: bool = False, **values: Any) -> None:
        command(*args, **values)

    option = typer.Option(
        "--help-all",
        is_eager=True,
        callback=show,
        hidden=not rare,
        help=f"Show {rare} rare options too{also}.",
    )
    more = inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )
    parameters = [*signature.parameters.values(), more]
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call
