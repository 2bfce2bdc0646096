"""The command `clean` frees what a finished run no longer needs."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from medfedaug.cli.console import say


def clean(
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a run, or of several runs.")],
    yes: Annotated[bool, Option("--yes", help="Free it; without this option only list.")] = False,
) -> None:
    """List what finished runs no longer need, and free it with --yes: models of the last round, leftovers.

    Results, pages, the selected model, statistics and the sites' own layers stay. A run whose last model is
    freed can no longer be the start of another one (--init). For a kit: medfedaug site clean.
    """
    from medfedaug.runs.folder import free, spare_files
    from medfedaug.runs.load_results import find_runs
    from medfedaug.utils.event_text import size_text

    runs = find_runs([run])
    spare = [(path, size) for folder in runs for path, size in spare_files(folder).items()]
    for path, size in spare:
        say(f"{'freed' if yes else 'would free'}: {path} ({size_text(size)})")
        if yes:
            free(path)
    total = f"{size_text(sum(size for _, size in spare))} of {len(runs)} run{'s' if len(runs) > 1 else ''}"
    say(f"freed: {total}" if yes else f"would free: {total}" + ("; --yes frees it" if spare else ""))
