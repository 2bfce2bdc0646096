"""Commands for the process of a kit: `start`, `stop`, `restart` and `health`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from medfedaug.cli.console import err_console, say
from medfedaug.errors import ConfigError

Kit = Annotated[Path, typer.Argument(help="An NVFlare kit, the server's or a site's.")]
Timeout = Annotated[float, typer.Option(min=1, metavar="SECONDS", help="Longest time to wait.")]


def start(kit: Kit, timeout: Timeout = 60.0) -> None:
    """Start a kit, and wait until it runs; at a site, until the server has answered."""
    from medfedaug.nvflare_jobs.kit import kit_start

    _check_version(kit)
    _do(kit_start.start, kit, timeout)


def stop(kit: Kit, timeout: Timeout = 60.0) -> None:
    """Stop a kit without a question, and wait until its processes have ended.

    Running jobs wait for the site.
    """
    from medfedaug.nvflare_jobs.kit import kit_start

    _do(kit_start.stop, kit, timeout)


def restart(
    kit: Kit,
    timeout: Timeout = 60.0,
    yes: Annotated[bool, typer.Option("--yes", help="Restart without asking, also while jobs run.")] = False,
) -> None:
    """Restart a kit, and wait until it runs. While jobs run, name them and ask.

    A site rejoins its running jobs. A kit in a service or a container stays there. A kit that does not run is
    started.
    """
    from medfedaug.nvflare_jobs.kit import kit_process, kit_start
    from medfedaug.nvflare_jobs.kit.job_states import ACTIVE, job_standings
    from medfedaug.nvflare_jobs.kit.kit import open_kit

    opened = open_kit(kit)
    runs = kit_process.find_process(opened.path) is not None
    jobs = [job for job in job_standings(opened) if job.state in ACTIVE] if runs and not yes else []
    if jobs:
        effect = "ends here; the lead submits it again with --resume" if opened.server else "is rejoined"
        for job in jobs:
            say(f"job {job.job}{f' ({job.name})' if job.name else ''} runs, and {effect}")
        if not sys.stdin.isatty():
            raise ConfigError("nothing is restarted: give --yes to restart while jobs run")
        typer.confirm("Restart?", abort=True)
    _check_version(kit)
    _do(kit_start.restart, kit, timeout)


def health(kit: Kit) -> None:
    """Check that the process of a kit works; exit code 1 if it does not.

    For the healthcheck of a container or a service: a site works while it runs and the server answers it. The
    process writes its state to a file, so that this command connects to nothing.
    """
    from medfedaug.nvflare_jobs.kit.kit import open_kit
    from medfedaug.nvflare_jobs.kit.kit_process import find_trouble

    opened = open_kit(kit)
    trouble = find_trouble(opened.path, server=opened.server)
    say(f"{kit}: {trouble or 'works'}")
    if trouble:
        raise typer.Exit(1)


def _check_version(kit: Path) -> None:
    from medfedaug.nvflare_jobs.kit.kit import open_kit

    open_kit(kit).check_version()


def _do(action: Callable[[Path, float], str], kit: Path, timeout: float) -> None:
    from medfedaug.nvflare_jobs.kit.kit import open_kit

    path = open_kit(kit).path
    with err_console.status("waiting"):
        outcome = action(path, timeout)
    say(f"{kit}: {outcome}")
