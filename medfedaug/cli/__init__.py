"""The ``medfedaug`` command: parse, call, print.

Commands import large packages themselves, so that ``medfedaug --help`` answers at once.
"""

import inspect as inspection
import re
from collections.abc import Callable

import typer

from medfedaug.cli.app import app, main
from medfedaug.cli.benchmark import ValuesInARow, benchmark
from medfedaug.cli.bundle import bundle, card
from medfedaug.cli.compare import compare
from medfedaug.cli.console import err_console, out_console
from medfedaug.cli.data import inspect, phantom, plan, statistics
from medfedaug.cli.demo import demo
from medfedaug.cli.enrol import enrol
from medfedaug.cli.evaluate import evaluate, report
from medfedaug.cli.import_ import import_
from medfedaug.cli.methods import datasets, methods, networks
from medfedaug.cli.options import rare_options
from medfedaug.cli.predict import predict
from medfedaug.cli.run import export, simulate
from medfedaug.cli.schema import schema
from medfedaug.cli.setup import init, project
from medfedaug.cli.site import approve, clean, doctor, jobs, ledger, names, site_config
from medfedaug.cli.start import health, restart, start, stop
from medfedaug.cli.watch import watch

__all__ = ["app", "err_console", "main", "out_console"]

# By the panels of `medfedaug --help`, each command with an example.
_COMMANDS: dict[str, dict[Callable[..., None] | typer.Typer, str]] = {
    "Start": {
        demo: "demo --out demo --seed 1 --json demo.json",
        methods: "methods fedrdn",
        networks: "networks dynunet",
        datasets: "datasets prostate_mri",
        phantom: "phantom --out hospitals --sites 3",
        schema: "schema experiment > experiment.schema.json",
    },
    "Data": {
        import_: "import --folder dicom --studies studies.csv --out site_A",
        init: "init data/site_A",
        inspect: "inspect --data data",
        statistics: "statistics --data data/site_A --out statistics.json",
        plan: "plan --data data --out plan.json",
    },
    "Train": {
        compare: "compare --data data",
        simulate: "simulate --data data --methods fedrdn --out runs/fedrdn",
        benchmark: "benchmark --data data --methods fedavg fedrdn --out runs",
        export: "export --methods fedrdn --rounds 50 --out jobs/fedrdn",
    },
    "Use": {
        evaluate: "evaluate --model runs/fedrdn --data data",
        predict: "predict --model runs/fedrdn --images new --out predicted",
        report: "report runs/* --reference fedrdn",
        bundle: "bundle --model runs/fedrdn --out bundle --site site_A",
        card: "card runs/fedrdn",
    },
    "A site": {
        project: "project --server fl-server.example.org --out project",
        enrol: "enrol request hospital-a",
        site_config: "site-config --kit hospital-a --data images --min-images 20",
        doctor: "doctor --kit hospital-a --json doctor.json",
        start: "start hospital-a",
        stop: "stop hospital-a",
        restart: "restart hospital-a",
        health: "health hospital-a",
        jobs: "jobs hospital-a",
        approve: "approve hospital-a 1f3c",
        ledger: "ledger hospital-a",
        names: "names hospital-a",
        clean: "clean --kit hospital-a --older-than 30",
        watch: "watch hospital-a --prometheus /var/lib/hospital-a.prom",
    },
}

for _panel, _commands in _COMMANDS.items():
    for _command, _example in _commands.items():
        _name, _epilog = _example.split()[0], f"Example: medfedaug {_example}"
        if _command is enrol:
            app.add_typer(enrol, name=_name, rich_help_panel=_panel, epilog=_epilog)
        else:
            _class = ValuesInARow if _command is benchmark else None
            _epilog = rare_options(_command) + _epilog
            # Without the breaks of source lines, which Typer keeps in all paragraphs but the first.
            _help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspection.getdoc(_command) or "")
            app.command(
                _name,
                cls=_class,
                rich_help_panel=_panel,
                epilog=_epilog,
                help=_help,
                hidden=_command is schema,  # for editors, which are set up once
            )(_command)
