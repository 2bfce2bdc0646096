"""The command `watch`: a running job, from the events that the kit's processes write."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Group
from rich.live import Live
from rich.text import Text
from typer import Argument, Option

from medfedaug.cli.console import Table, duration, err_console, exit_if, out_console, say, wrapped
from medfedaug.cli.options import existing_folder
from medfedaug.errors import ConfigError
from medfedaug.nvflare_jobs.kit.kit import Kit, open_kit

if TYPE_CHECKING:
    from medfedaug.nvflare_jobs.kit.job_states import Watched

_BARS = "▁▂▃▄▅▆▇█"
_PERIOD, _LAST = 1.0, 8
_METRICS_PERIOD = 15.0
_QUIET = 60.0  # seconds without an event after which a note appears


def watch(
    kit: Annotated[
        Path,
        Argument(
            metavar="KIT", callback=existing_folder, help="An NVFlare kit, or the folder of a job in it."
        ),
    ],
    prometheus: Annotated[
        Path | None, Option(metavar="FILE", help="NAME.prom to write every 15 seconds for node_exporter.")
    ] = None,
    once: Annotated[bool, Option("--once", help="Show or write the state, and end.")] = False,
) -> None:
    """Watch the latest job of a kit: rounds, sites, losses and scores, until it ends.

    A stalled job waits for a site that is down, or for its own process to come back. A job whose process is
    gone for good is dead, which ends the command with code 1.
    """
    if prometheus is not None:
        _write_metrics(open_kit(kit), prometheus, once=once)
        return
    with err_console.status("starting"):
        from medfedaug.nvflare_jobs.kit.job_states import Watched, find_events
        from medfedaug.utils.event_text import follow

    live = out_console.is_terminal and not once
    opened = open_kit(kit) if (kit / "startup").is_dir() else None
    path = find_events(kit)
    # The server removes the folder of a job that has ended.
    if opened is not None and (path is not None or once) and (ended := _ended_since(opened, path)):
        say(ended)
        return
    if path is None and (once or opened is None):
        raise ConfigError(f"{kit}: no medfedaug job has run here, or its folder is gone")
    if path is None and not live:
        say("waiting for a job")
    watched, position = Watched(), 0
    with Live(console=out_console, auto_refresh=False, transient=False) if live else nullcontext() as screen:
        while True:
            lines = []
            path = path or find_events(kit)
            if path is not None and path.is_file():
                for event, end in follow(path, position):
                    lines += watched.take(event)
                    position = end
                watched.look(path)
                watched.approval = not watched.round and _awaits_approval(path)
            if isinstance(screen, Live):
                screen.update(_shown(watched, path), refresh=True)
            elif not once:
                for line in lines:
                    say(line)
            if once or watched.state != "running" or (path is not None and not path.is_file()):
                break
            time.sleep(_PERIOD)
    if once:
        out_console.print(_shown(watched, path))
    elif watched.state == "dead" and not live:
        say(watched.lines[-1])
    exit_if(watched.state in ("failed", "dead"))


def _write_metrics(kit: Kit, file: Path, *, once: bool) -> None:
    from medfedaug.nvflare_jobs.kit.job_states import write_metrics

    while True:
        write_metrics(kit, file)
        if once:
            say(str(file))
            return
        time.sleep(_METRICS_PERIOD)


def _ended_since(kit: Kit, events: Path | None) -> str:
    """Return a line on a job that ended at the server after the job with these events; empty for none."""
    from medfedaug.nvflare_jobs.kit.job_states import stored_jobs

    jobs = stored_jobs(kit)
    watched = events.parent.parent.name if events is not None else ""
    if not jobs or jobs[-1].job == watched or not jobs[-1].status.startswith("FINISHED"):
        return ""
    newest = jobs[-1]
    fetch = f"fetch it with: nvflare job download {newest.job}"
    return f"{newest.name} ({newest.job}): {newest.status.lower()}; {fetch}"


def _awaits_approval(events: Path) -> bool:
    """Return whether the job with these events waits for approval at its kit."""
    job = events.absolute().parent.parent
    site = (job.parent / "startup/fed_client.json").is_file()
    return site and job.name in open_kit(job.parent).job_book().waiting_jobs()


def _shown(watched: Watched, path: Path | None) -> Group:
    if path is None:
        return Group("waiting for a job")
    left = ""
    if watched.seconds and watched.state == "running" and not watched.stalled:
        mean = sum(watched.seconds.values()) / len(watched.seconds)
        # Earlier rounds of a resumed run have no time.
        left = f", about {duration(mean * (watched.rounds - max(watched.seconds)))} left"
    quiet = ""
    if watched.state == "running" and path.is_file():
        silence = time.time() - path.stat().st_mtime
        quiet = f"; no event for {duration(silence)}" if silence >= _QUIET else ""
    name = path.parent.parent.name
    place = f"round {watched.round} of {watched.rounds}, " if not watched.approval else ""
    title = f"{name}: {place}{watched.standing}{left}{quiet}"
    table = Table("", "last", "by round")
    for site, losses in sorted(watched.losses.items()):
        series = watched.over_rounds(losses)
        table.add_row(f"{site}: training loss", f"{list(losses.values())[-1]:.4f}", _sparkline(series))
    if watched.seconds and not watched.losses:
        table.add_row("training losses", "stay at the sites", "")
    if watched.scores:
        last = list(watched.scores.values())[-1]
        table.add_row(
            f"validation {watched.metric}", f"{last:.4f}", _sparkline(watched.over_rounds(watched.scores))
        )
    for site, scores in sorted(watched.tested.items()):
        text = ", ".join(f"{k} {v:.4f}" for k, v in scores.items())
        table.add_row(f"{site}: tested", text or "none sent", "")
    shown = [Text(title), *([table] if table.rows else ())]
    return Group(*shown, *(Text(wrapped(line)) for line in watched.lines[-_LAST:]))


def _sparkline(values: Sequence[float | None], width: int = 30) -> str:
    """Return values as bars of characters, from the lowest to the highest, with gaps for missing ones."""
    recent = list(values)[-width:]
    known = [value for value in recent if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    span = high - low
    scale = (len(_BARS) - 1) / span if 0 < span < math.inf else 0.0  # also 0 beyond the range of a float
    return "".join(" " if v is None else _BARS[round((v - low) * scale)] for v in recent)
