"""Convert requests and replies to NVFlare's `FLModel` and back, and write a job's events.

Weights travel as parameters, so that NVFlare's filters see them. The exchange before training travels as
metrics, because filters for parameters destroy statistics. The methods' exchange of every round travels as
metadata, and so do the sites' messages about masks: a filter would destroy masked numbers.

In a simulation NVFlare gets an identifier for each site, whose name may be any printable one.
"""

import json
import logging
import os
import re
import threading
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nvflare.app_common.abstract.fl_model import FLModel

from medfedaug.errors import warnings_to
from medfedaug.federation.job_folder import ALIVE, EVENTS, JOB_FOLDER, PULSE
from medfedaug.federation.messages.messages import Reply, Request
from medfedaug.utils.event_text import EventLines
from medfedaug.utils.printable import printable_values

_META = "medfedaug"


def request_to_model(request: Request) -> FLModel:
    """Convert the server's request to an `FLModel`."""
    plain = ("task", "round", "selected_round", "run", "planned", "frozen", "training", "masks")
    meta = {name: getattr(request, name) for name in plain}
    meta |= {name: _contiguous(getattr(request, name)) for name in ("once", "payload")}
    return _model(_contiguous(request.weights), {"task": request.task}, meta, request.round)


def request_from_model(model: FLModel) -> Request:
    """Convert an `FLModel` to the server's request, at the site."""
    meta = _meta(model)
    return Request(
        task=str(meta.get("task", "")),
        round=meta.get("round", 0),
        weights=_dict(model.params),
        frozen=str(meta.get("frozen", "")),
        once=_dict(meta.get("once")),
        payload=_dict(meta.get("payload")),
        selected_round=meta.get("selected_round", 0),
        run=str(meta.get("run", "")),
        planned=_dict(meta.get("planned")),
        training=str(meta.get("training", "")),
        masks=_dict(meta.get("masks")),
    )


def reply_to_model(reply: Reply) -> FLModel:
    """Convert a site's reply to an `FLModel`."""
    plain = ("task", "round", "num_samples", "metrics", "error", "masks")
    meta = {name: getattr(reply, name) for name in plain}
    payload = _contiguous(reply.payload)
    if reply.weights:
        meta["payload"] = payload
    return _model(_contiguous(reply.weights), payload, meta, reply.round)


def reply_from_model(model: FLModel) -> Reply:
    """Convert an `FLModel` to a site's reply, at the server, without checking its content."""
    meta = _meta(model)
    return Reply(
        task=str(meta.get("task", "")),
        round=_int(meta.get("round")),
        weights=_tensors(model.params),
        payload=_dict(meta.get("payload") if model.params else model.metrics),
        num_samples=_int(meta.get("num_samples")),
        metrics=_dict(meta.get("metrics")),
        error=str(meta.get("error", "")),
        masks=_dict(meta.get("masks")),
    )


def _model(weights: dict[str, Any], metrics: dict[str, Any], meta: dict[str, Any], round_: int) -> FLModel:
    # An FLModel has parameters or metrics: with both, the metrics would count as an evaluation.
    content: dict[str, Any] = {"params": weights} if weights else {"metrics": metrics}
    return FLModel(**content, meta={_META: meta}, current_round=round_)


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Copy views with gaps: NVFlare sends tensors as safetensors, which would end the job."""
    return {
        key: value.contiguous() if isinstance(value, torch.Tensor) else value
        for key, value in tensors.items()
    }


def _meta(model: FLModel) -> dict[str, Any]:
    return _dict((model.meta or {}).get(_META))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tensors(params: Any) -> dict[str, Any]:
    """Convert arrays back to tensors: some of NVFlare's filters turn tensors into NumPy arrays."""
    return {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) and value.dtype.kind == "f" else value
        for key, value in _dict(params).items()
    }


def _int(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


VARIABLE = "MEDFEDAUG_SITE_NAMES"
"""Environment variable of a simulation's processes: the names by identifier, as JSON."""

_TAKEN = {"server"}  # NVFlare's own
# Letters that Unicode does not take apart.
_WHOLE = str.maketrans({"ł": "l", "Ł": "L", "ø": "o", "Ø": "O", "ß": "ss", "æ": "ae", "Æ": "Ae"})


def identifiers(names: Iterable[str]) -> dict[str, str]:
    """Return an identifier for each name, which NVFlare takes.

    Example:
        >>> identifiers(["site_A", "Łódź Süd", "St. Anna", "東京"])
        {'site_A': 'site_A', 'Łódź Süd': 'Lodz_Sud', 'St. Anna': 'St_Anna', '東京': 'site'}
    """
    found: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (_plain(name) != name, name)):  # what is one already stays
        plain, number = _plain(name), 1
        while (candidate := plain if number == 1 else f"{plain}_{number}") in _TAKEN | {*found.values()}:
            number += 1
        found[name] = candidate
    return {name: found[name] for name in names}


def _plain(name: str) -> str:
    ascii_text = unicodedata.normalize("NFKD", name.translate(_WHOLE)).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_-]+", "_", ascii_text).strip("_-") or "site"


class SiteNames:
    """The names and identifiers of this process's simulation; elsewhere both are the same."""

    def __init__(self) -> None:
        names: Mapping[str, str] = json.loads(os.environ.get(VARIABLE, "{}"))
        self._names, self._identifiers = dict(names), {name: known for known, name in names.items()}

    def name(self, identifier: str) -> str:
        """Return the name of the site that NVFlare knows by an identifier."""
        return self._names.get(identifier, identifier)

    def identifier(self, name: str) -> str:
        """Return NVFlare's identifier of a site."""
        return self._identifiers.get(name, name)


WARNING = "warning"
_LOGGED = ("failed", "not_answered")  # reported as errors elsewhere
_WARNED = (WARNING, "away")
_log = logging.getLogger("medfedaug")


class EventLog:
    """Write each event to the file as one JSON object, and to the log as lines of `EventLines`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path, self.name = folder / JOB_FOLDER / EVENTS, name
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._teller, self._lock = EventLines(), threading.Lock()  # each site answers in its own thread
        before = self.path.read_bytes() if self.path.exists() else b""
        self._file = self.path.open("a", buffering=1, encoding="utf-8")
        if before and not before.endswith(b"\n"):  # a process ended in the middle of a line
            with suppress(OSError):
                self._file.write("\n")
        self._warned: set[str] = set()
        self._over = threading.Event()
        threading.Thread(target=self._pulse, name="alive", daemon=True).start()

    def _pulse(self) -> None:
        """Show by the time of a file that the job's process is alive."""
        alive = self.path.with_name(ALIVE)
        while True:
            with suppress(OSError):
                alive.touch()
            if self._over.wait(PULSE):
                return

    def __call__(self, event: dict[str, Any]) -> None:
        """Write an event; errors of the disk are left to the files that a job needs."""
        with self._lock:
            for line in self._teller.lines(event) if event["event"] not in _LOGGED else ():
                level = logging.WARNING if event["event"] in _WARNED else logging.INFO
                _log.log(level, "%s: %s", self.name, line)
            if not self._file.closed:  # an answer may come after the end
                with suppress(OSError):
                    self._file.write(json.dumps(printable_values(event)) + "\n")

    def warnings(self) -> AbstractContextManager[None]:
        """Record our warnings, each once, as events: a process of NVFlare has no terminal.

        They may have names of files, which stay in the site's file and log.
        """
        return warnings_to(lambda text: self({"event": WARNING, "text": text}), self._warned)

    def close(self) -> None:
        """Close the file, and ignore errors of the disk."""
        self._over.set()
        with suppress(OSError):
            self._file.close()
            self.path.with_name(ALIVE).unlink(missing_ok=True)
