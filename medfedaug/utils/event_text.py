"""Describe events of a run in lines: for the terminal, for the logs of server and sites, and for `watch`."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from medfedaug.utils.printable import printable
from medfedaug.utils.validation import is_number

OnEvent = Callable[[dict[str, Any]], None]
"""Takes a small dictionary for every event that a user may want to see."""

LOSSES_STAY = "losses stay at the sites"
"""Text instead of training losses, which leave a site only with its administrator's consent."""


def size_text(number: float) -> str:
    """Return a number of bytes in words.

    >>> size_text(512), size_text(7_900_000)
    ('512 B', '7.9 MB')
    """
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def follow(path: Path, position: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the complete events from a position on, each with the position after it.

    A line without an event is skipped: a process that ended with its machine, or while the disk was full, may
    have written a part of one.
    """
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):  # the writer is in the middle of it
                return
            position += len(line)
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict) and "event" in event:
                yield event, position


_LINES: Mapping[str, str] = {
    "away": "{site}: not heard from for {seconds} s: its machine, its kit or its line is down; started "
    "again there (startup/start.sh), it comes back into the job",
    "constant_channels": "{site}: channel {channels} is constant in every image; normalised it is 0",
    "ended": "the job has ended",
    "failed": "failed: {message}",
    "finished": "finished",
    "left_out": "left out: {reason}",
    "missing_channels": "{site}: has no channel {channels}; it is 0 there",
    "not_answered": "{task}: not done: {reason}",
    "prepared": "{site}: {samples} training samples",
    "refused": "round {round}: refused: {reason}",
    "resumed": "resumed after round {round}",
    "returned": "{site}: is back",
    "share_lowered": "{site}: counts as {after:.0%} of the average, and not as the {before:.0%} of its "
    "samples; --max-share 1 lets it",
    "stage": "{text}",
    "suspected": "suspected: {site}: {reason}",
    "unscored": "{site}: no validation score: {reason}",
    "unseen": "{site}: unseen, tested only",
    "warning": "warning: {text}",
}
"""Templates of the events with one fixed line, by their kind."""


class EventLines:
    """Turns the events of a run (`medfedaug.federation.server.history.RunHistory`) into lines.

    Args:
        rounds: the number of rounds, if known already.

    Attributes:
        round: the number of the present round, 0 before the first.
        losses: the training losses of this round by site, where sites send them.
    """

    def __init__(self, rounds: int = 0) -> None:
        self.rounds, self.round = rounds, 0
        self.losses: dict[str, float] = {}
        self._unscored_for = ""

    def lines(self, event: Mapping[str, Any]) -> list[str]:
        """Return the printable lines of an event; most have none."""
        kind = event["event"]
        if kind in _LINES:
            return [printable(_LINES[kind].format_map(event))]
        describe = getattr(self, f"_on_{kind}", None)
        return [printable(line) for line in describe(event)] if describe else []

    def _of(self, event: Mapping[str, Any]) -> str:
        return f"round {event['round']}/{self.rounds}"

    def _on_round_started(self, event: Mapping[str, Any]) -> list[str]:
        self.losses, self.round = {}, event["round"]
        self.rounds = event.get("rounds", self.rounds)
        return []

    def _on_trained(self, event: Mapping[str, Any]) -> list[str]:
        if is_number(event.get("train_loss")):
            self.losses[event["site"]] = event["train_loss"]
        return []

    def _on_planned(self, event: Mapping[str, Any]) -> list[str]:
        return [f"plan: {setting}: {reason}" for setting, reason in event["reasons"]]

    def _on_labelled(self, event: Mapping[str, Any]) -> list[str]:
        return [f"{event['site']}: has annotated for training {event['classes'] or 'nothing'}"]

    def _on_init(self, event: Mapping[str, Any]) -> list[str]:
        lines = [f"{event['loaded']} of {event['of']} entries of the network from {event['file']}"]
        return lines + [f"  not used: {name} ({reason})" for name, reason in event["skipped"].items()]

    def _on_stalled(self, event: Mapping[str, Any]) -> list[str]:
        return [f"ended after {self._of(event)}: {event['reason']}"]

    def _on_missing(self, event: Mapping[str, Any]) -> list[str]:
        if event["task"] == "test":
            return [f"not tested: {event['reason']}"]
        return [f"round {event['round']}: missing: {event['reason']}"]

    def _on_waiting(self, event: Mapping[str, Any]) -> list[str]:
        sites = ", ".join(event["sites"])
        return [f"waiting for {sites}: {event['answers']} of {event['needed']} needed answers are here"]

    def _on_round_finished(self, event: Mapping[str, Any]) -> list[str]:
        losses = "  ".join(f"{site} {loss:.4f}" for site, loss in sorted(self.losses.items()))
        of_losses = f"loss {losses}" if losses else LOSSES_STAY
        parts = [f"{event['seconds']:.1f} s"]
        if "samples" in event:
            parts.append(f"{event['samples']} samples")
            sizes = {name: n for name, n in event["bytes"].items() if n["up"] or n["down"]}
            parts += [
                f"{name} {size_text(n['up'])} up, {size_text(n['down'])} down" for name, n in sizes.items()
            ]
        return [f"{self._of(event)}  {of_losses}  ({'; '.join(parts)})"]

    def _on_validated(self, event: Mapping[str, Any]) -> list[str]:
        scores = [(name[4:], value) for name, value in event.items() if name.startswith("val_")]
        return [f"{self._of(event)}  validation {name} {value:.4f}" for name, value in scores[:1]]

    def _on_tested(self, event: Mapping[str, Any]) -> list[str]:
        scores = [f"{k} {v:.4f}" for k, v in event.items() if k not in ("event", "site") and is_number(v)]
        if not scores and event.get("reason"):
            return [f"{event['site']}: tested, no score: {event['reason']}"]
        return [f"{event['site']}: tested{': ' + ', '.join(scores) if scores else ''}"]

    def _on_answered(self, event: Mapping[str, Any]) -> list[str]:
        """Describe a site's own work and messages."""
        self.round, self.rounds = max(self.round, event["round"]), event["rounds"]
        task = event["task"]
        begin = f"round {event['round']}/{event['rounds']}" if event["round"] else "before training"
        parts = [f"{name} {value:.4f}" for name, value in event["scores"].items()]
        parts += [f"{event['samples']} samples"] if event["samples"] else []
        parts.append(f"{event['seconds']:.1f} s")
        sent = [f"the model ({size_text(event['model'])})"] if event["model"] else []
        sent += [f"{name}'s statistics ({size_text(n)})" for name, n in event["statistics"].items()]
        of = f" of {event['cases']} cases" if event["statistics"] else ""
        nothing = "sent only scores" if event["scores"] else "sent nothing"
        end = f"sent {', '.join(sent)}{of}" if sent else nothing
        lines = [f"{begin}: {task}: {', '.join(parts)}; {end}"]
        if (reason := event.get("unscored", "")) != self._unscored_for and reason:
            lines.append(f"no score leaves: {reason}")
        self._unscored_for = reason
        return lines
