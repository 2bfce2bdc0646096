"""Follow a running job by the events that it writes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medfedaug.errors import DataError
from medfedaug.federation.job_folder import ALIVE, EVENTS, JOB_FOLDER, PULSE, SESSION
from medfedaug.utils.event_text import EventLines
from medfedaug.utils.validation import is_number

_DEAD_AFTER = 6 * PULSE
_DEAD = (
    "the process of the job is gone, and NVFlare cannot continue the job: the lead submits it again with "
    "--resume, and it continues from its last round"
)


def find_events(folder: str | Path) -> Path | None:
    """Return the events of the latest job below a kit, or of a job's folder, if any."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError("no such folder", path=folder)
    patterns = (EVENTS, f"{JOB_FOLDER}/{EVENTS}", f"*/{JOB_FOLDER}/{EVENTS}")
    paths = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return max(paths, key=lambda path: path.stat().st_mtime_ns, default=None)


def has_process(events: Path) -> bool | None:
    """Return whether the process of a job is alive, by a file that it touches; ``None`` without the file."""
    alive = events.with_name(ALIVE)
    return time.time() - alive.stat().st_mtime < _DEAD_AFTER if alive.exists() else None


@dataclass
class Watched:
    """State of a run from its events, at the server or at a site.

    Attributes:
        losses: the training loss by site and round, of sites that send one.
        tested: the test scores of each site.
        waiting: silent sites that the job needs to continue.
        approval: whether the job waits for the approval of the site's administrator.
        stalled: the reason why a running job does not continue, if any.
        refusals: updates that the server refused; at a site, requests that it did not answer.
        state: ``"running"``, ``"finished"`` or ``"failed"``; at a site ``"ended"`` without a test; ``"dead"``
            if its process is gone and does not come back.
    """

    rounds: int = 0
    round: int = 0
    metric: str = ""
    losses: dict[str, dict[int, float]] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    tested: dict[str, dict[str, float]] = field(default_factory=dict)
    waiting: tuple[str, ...] = ()
    state: str = "running"
    approval: bool = False
    stalled: str = ""
    refusals: int = 0
    lines: list[str] = field(default_factory=list)
    _teller: EventLines = field(default_factory=EventLines)

    def take(self, event: Mapping[str, Any]) -> list[str]:
        """Process an event; return its lines."""
        lines = self._teller.lines(event)
        self.lines += lines
        if self.state == "ended":  # the process of the site came back
            self.state = "running"
        self.round, self.rounds = self._teller.round, self._teller.rounds
        kind = event["event"]
        self.waiting = tuple(event["sites"]) if kind == "waiting" else () if kind != "away" else self.waiting
        self.refusals += kind in ("refused", "not_answered")
        if kind == "trained" and is_number(event.get("train_loss")):
            self.losses.setdefault(event["site"], {})[event["round"]] = event["train_loss"]
        elif kind == "answered" and event["task"] == "train":
            self._of_this_site(event)
        elif kind == "round_finished":
            self.seconds[event["round"]] = event["seconds"]
        elif kind == "validated":
            for name, value in event.items():
                if name.startswith("val_"):
                    self.metric, self.scores[event["round"]] = name.removeprefix("val_"), value
        elif kind == "tested":
            scores = {k: v for k, v in event.items() if k not in ("event", "site") and is_number(v)}
            self.tested[event["site"]] = scores
        elif kind in ("finished", "failed") or (kind == "ended" and self.state == "running"):
            self.state = kind
        elif kind == "answered" and event["task"] == "test":  # the last request to a site
            self.tested["this site"] = dict(event["scores"])
            self.state = "finished"
        return lines

    def look(self, events: Path) -> None:
        """Check that a running job continues."""
        if self.state != "running":
            return
        self.stalled = f"waiting for {', '.join(self.waiting)}" if self.waiting else ""
        if has_process(events) is False:
            if events.with_name(SESSION).exists():
                self.stalled = "no process of the job runs here; startup/start.sh brings back the site"
            else:
                self.state = "dead"
                self.lines.append(_DEAD)

    def _of_this_site(self, event: Mapping[str, Any]) -> None:
        self.seconds[event["round"]] = event["seconds"]
        for name, value in event["scores"].items():
            if name == "train_loss":
                self.losses.setdefault("this site", {})[event["round"]] = value
            elif name.startswith("val_"):  # of the previous round's model
                self.metric, self.scores[event["round"] - 1] = name.removeprefix("val_"), value

    @property
    def standing(self) -> str:
        """The state in words."""
        if self.state == "running" and self.approval:
            return "waits for approval: medfedaug site jobs shows it, medfedaug site approve lets it begin"
        return f"stalled: {self.stalled}" if self.state == "running" and self.stalled else self.state

    def over_rounds(self, values: Mapping[int, float]) -> list[float | None]:
        """Return the values of each round so far."""
        return [values.get(number) for number in range(1, max(self.round, *values, 1) + 1)]
