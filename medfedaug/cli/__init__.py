"""The ``medfedaug`` command: parse, call, print.

Everything heavy is imported inside the commands, so that ``medfedaug --help`` answers at once.
"""

from medfedaug.cli.app import app, main
from medfedaug.cli.benchmark import ValuesInARow, benchmark
from medfedaug.cli.bundle import bundle, card
from medfedaug.cli.compare import compare
from medfedaug.cli.console import err_console, out_console
from medfedaug.cli.data import inspect, phantom, statistics
from medfedaug.cli.demo import demo
from medfedaug.cli.enrol import enrol
from medfedaug.cli.evaluate import evaluate, report
from medfedaug.cli.import_ import import_
from medfedaug.cli.methods import datasets, methods, networks
from medfedaug.cli.plan import plan
from medfedaug.cli.predict import predict
from medfedaug.cli.prospect import prospect
from medfedaug.cli.run import export, simulate
from medfedaug.cli.schema import schema
from medfedaug.cli.setup import init, project
from medfedaug.cli.site import approve, clean, doctor, jobs, ledger, names, site_config
from medfedaug.cli.start import health, restart, start, stop
from medfedaug.cli.watch import watch

__all__ = ["app", "err_console", "main", "out_console"]

app.command()(demo)
app.command()(methods)
app.command()(networks)
app.command()(datasets)
app.command()(phantom)
app.command("import")(import_)
app.command()(init)
app.command()(inspect)
app.command()(prospect)
app.command()(compare)
app.command()(statistics)
app.command()(plan)
app.command()(simulate)
app.command(cls=ValuesInARow)(benchmark)
app.command()(export)
app.command()(evaluate)
app.command()(predict)
app.command()(report)
app.command()(bundle)
app.command()(card)
app.command()(project)
app.add_typer(enrol, name="enrol")
app.command()(site_config)
app.command()(doctor)
app.command()(start)
app.command()(stop)
app.command()(restart)
app.command()(health)
app.command()(jobs)
app.command()(approve)
app.command()(ledger)
app.command()(names)
app.command()(clean)
app.command()(watch)
app.command()(schema)
